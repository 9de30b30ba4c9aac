"""The only place that touches TensorFlow's private names. Read in 2.21.0."""

import functools
import threading
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# tf.raw_ops leaves out the ops that gen_xla_ops has.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import mirrored_run

# The extended part of MirroredStrategy is where a strategy's behaviour lives,
# and TensorFlow exports only the strategy around it.
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.eager import context
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import summary_ops_v2


class ReplicatedExtended(mirrored_strategy.MirroredExtended):
    """A MirroredStrategy's inside in which replicas never pause for others.

    Each replica runs the whole program; it meets the others only in
    `all_reduce`, which is given.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        devices: Sequence[str],
        all_reduce: Callable[[str, Any], Any],
        around_run: Callable[[Callable[[], Any]], Any],
        around_replica: Callable[[Callable], Callable],
    ) -> None:
        self._conflux_all_reduce = all_reduce
        self._conflux_around_run = around_run
        self._conflux_around_replica = around_replica
        self._conflux_clones: Any = weakref.WeakKeyDictionary()
        super().__init__(strategy, devices=list(devices))

    def _use_merge_call(self) -> bool:
        # With False, Keras and TensorFlow update variables inside a replica.
        return False

    def _make_collective_ops_with_fallbacks(self) -> Any:
        # TensorFlow would make CollectiveAllReduce, whose keys start anew in
        # each strategy, so that two strategies abort each other
        # (tensorflow#61314). What reduces between replicas goes through
        # `all_reduce`; what is left, reductions asked for outside of
        # replicas, is copies and additions.
        return tf.distribute.ReductionToOneDevice()

    def _get_cross_device_ops(self, value: Any) -> Any:
        return self._cross_device_ops

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # ONLY_FIRST_REPLICA (Keras' step counter) would need the first replica
        # in every assignment. All count the same steps.
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if kwargs.get("aggregation") == first:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return super()._create_variable(next_creator, **kwargs)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        return self._conflux_all_reduce("mean" if mean else "sum", value)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):
            program = self._cloned(fn)
        else:
            program = self._prepared(fn)
        return self._conflux_around_run(
            lambda: super(ReplicatedExtended, self)._call_for_each_replica(
                program, args, kwargs
            )
        )

    def _prepared(self, fn: Callable) -> Callable:
        return self._conflux_around_replica(_in_order_of_its_own(fn))

    def _cloned(self, fn: Any) -> Any:
        # mirrored_run.py runs the Python function of a tf.function in a clone
        # of it and finds that by the function's identity.
        if fn not in self._conflux_clones:
            self._conflux_clones[fn] = fn._clone(
                python_function=self._prepared(fn.python_function)
            )
        return self._conflux_clones[fn]


def _in_order_of_its_own(fn: Callable) -> Callable:
    """Keeps a replica's side effects from waiting for another replica's.

    A tf.function runs ops with side effects on nothing in particular (an
    assertion, a print, a Python call) one after another, in the order of
    tracing: all of replica 0's before those of replica 1. So one after a
    collective in replica 0 and one before it in replica 1 would wait for each
    other for ever. Here each replica has an order of its own.
    """

    @functools.wraps(fn)
    def traced(*args: Any, **kwargs: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        result = fn(*args, **kwargs)
        # The manager of automatic control dependencies, from __enter__ of
        # auto_control_deps.py to its __exit__, where it would order them.
        manager = getattr(graph, "experimental_acd_manager", None)
        if not tf.executing_eagerly() and manager is not None:
            _order(manager, graph.get_operations()[before:])
        return result

    return traced


def _order(manager: Any, operations: Sequence[tf.Operation]) -> None:
    previous = None
    for operation in operations:
        # As AutomaticControlDependencies.__exit__ finds them.
        if (
            auto_control_deps.op_is_stateful(operation)
            and operation._control_flow_context is None
            and not any(auto_control_deps._get_resource_inputs(operation))
        ):
            if previous is not None:
                operation._add_control_input(previous)
            manager.run_independently(operation)
            previous = operation


def in_replica_loop() -> bool:
    """Whether a `tf.while_loop` inside the running replica is being traced.

    TensorFlow tells collectives of one step apart by the loop they are in.
    Each replica has its own copy of the loop, so they would wait for each
    other for ever. A loop around `strategy.run` is fine.
    """
    # `graph` is where the replica's program is traced to; what lies between
    # the current graph and that one was opened by the program.
    thread = threading.current_thread()
    replica_graph = getattr(thread, "graph", None)
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not replica_graph:
        # WhileBodyFuncGraph, of control_flow_v2_func_graphs.
        if type(graph).__name__ == "WhileBodyFuncGraph":
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def has_started() -> bool:
    """Whether TensorFlow has taken its devices and their settings are fixed."""
    # Everything in tf.config that could tell starts it.
    running: Any = context.context()
    return running._initialized


@functools.cache
def memory_of(device: str) -> int:
    """Returns how many bytes TensorFlow may take of a device's memory."""
    # tf.config tells only what is in use. Without the running configuration
    # this would make devices of all GPUs, also of those that are hidden.
    running: Any = context.context()
    for found in device_lib.list_local_devices(running.config):
        if found.name.endswith(f":{device}"):
            return found.memory_limit
    return 0


def graph_function(function: Callable, signature: Any) -> Callable:
    """Returns `function` as a graph, with its control flow as it is."""
    traced = quiet(
        tf.function(function, input_signature=signature, autograph=False)
    )
    concrete: list[Callable] = []

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        # Only a first call can make variables, and only the `tf.function` does
        # that; but it hashes all variables of all replicas in each call.
        eager = tf.config.functions_run_eagerly()
        if concrete and not eager:
            return concrete[0](*arguments)
        result = traced(*arguments)
        if not eager:
            concrete.append(traced.get_concrete_function())
        return result

    return call


def quiet(function: Any) -> Any:
    """Keeps a `tf.function` from warning that it is traced often.

    TensorFlow counts tracings by the line of the source. That is one for all
    models and all steps of a program, each of which is traced for itself.
    """
    # polymorphic_function.py, in `__call__`.
    function._omit_frequent_tracing_warning = True
    return function


def is_stop(error: BaseException) -> bool:
    """Whether a replica was stopped because of what went wrong elsewhere."""
    # Raised in the threads of replicas that wait in `merge_call`.
    return isinstance(error, mirrored_run._RequestedStop)


def with_this_threads_summaries(fn: Callable) -> Callable:
    """Makes `tf.summary` in `fn` write where it would in this thread."""
    # Writer, step and condition are kept by thread; mirrored_run.py hands
    # them on to the threads of replicas in the same way.
    here = dict(vars(summary_ops_v2._summary_state))

    @functools.wraps(fn)
    def run() -> Any:
        vars(summary_ops_v2._summary_state).update(here)
        return fn()

    return run


def xla_all_reduce(tensor: tf.Tensor, count: int, op: str) -> tf.Tensor:
    """All-reduces inside an XLA program that runs on `count` devices.

    Args:
        tensor: float16, bfloat16, float32 or int32.
        count: How many devices.
        op: `"Add"`, `"Mul"`, `"Min"` or `"Max"`.
    """
    # The mode "CrossReplica" gives each replica back its own tensor, as
    # TensorFlow compiles a program for each.
    reduced = gen_xla_ops.xla_all_reduce(
        tensor, [list(range(count))], op, "CrossReplicaAndPartition"
    )
    must_run(reduced)
    return reduced


def must_run(tensor: tf.Tensor) -> None:
    """Keeps the op of `tensor` in the graph even if nothing uses its result."""
    # auto_control_deps.py leaves NcclAllReduce out of the ops that must run
    # (ASYNC_STATEFUL_OPS), and XlaAllReduce is not stateful. If one replica
    # ignored the result, its op would be pruned, and the others would wait for
    # it for ever.
    tensor.graph.control_outputs.append(tensor.op)


def uses_of(variable: tf.Variable) -> list[tf.Operation]:
    """Returns what uses a variable in the graph that is being traced."""
    # A graph knows a variable by a placeholder for its handle, which
    # FuncGraph.capture makes at the first use and finds again.
    graph: Any = tf.compat.v1.get_default_graph()
    return graph.capture(variable.handle).consumers()


def keep_identity(old: tf.Variable, new: tf.Variable) -> None:
    """Makes dictionaries that know `old` by its key find `new` under it."""
    # Keras' optimizers index their state by `_unique_id`
    # (backend/tensorflow/optimizer.py, `_var_key`). A mirrored variable takes
    # the id of its first copy.
    new._unique_id = old._unique_id
