"""Accessors of the private names that `private_tensorflow_names` lists."""

import functools
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

# tf.raw_ops leaves out the ops that gen_xla_ops has.
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.client import device_lib
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.eager import context
from tensorflow.python.ops import summary_ops_v2


def in_replica_loop() -> bool:
    """Whether a `tf.while_loop` inside the running replica is being traced.

    TensorFlow tells collectives of one step apart by the loop they are in.
    Each replica has its own copy of the loop, so they would wait for each
    other forever. A loop around `strategy.run` is fine.
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


def concrete_function(function: Callable, signature: Any) -> Callable:
    """Returns `function` as a graph, with its control flow as it is."""
    traced = without_retracing_warning(
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


def without_retracing_warning(function: Any) -> Any:
    """Keeps a `tf.function` from warning that it is traced often.

    TensorFlow counts tracings by the line of the source. That is one for all
    models and all steps of a program, each of which is traced for itself.
    """
    # polymorphic_function.py, in `__call__`.
    function._omit_frequent_tracing_warning = True
    return function


def is_cancellation(error: BaseException) -> bool:
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
    # it forever.
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
