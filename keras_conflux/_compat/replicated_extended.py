"""The inside of the strategy: TensorFlow's mirrored one, without its pauses."""

import contextvars
import functools
import weakref
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

# The extended part of MirroredStrategy is where a strategy's behaviour lives,
# and TensorFlow exports only the strategy around it.
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.distribute import values
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import variable_scope

from keras_conflux._common.errors import StrategyError
from keras_conflux._compat.replicas_in_turn import run_in_turn
from keras_conflux._compat.tensorflow_log import without_untrue_lines


class OfReplicas:
    """What a `tf.Variable` can be made, and one with copies cannot.

    It has a copy for the replicas of one strategy, and for no others.
    """

    def _get_replica(self: Any, replica_id: int) -> Any:
        assert_of_running(self)
        return super()._get_replica(replica_id)

    def __bool__(self: Any) -> bool:
        return bool(self.read_value())

    def __int__(self: Any) -> int:
        return int(self.read_value())

    def __float__(self: Any) -> float:
        return float(self.read_value())

    def __complex__(self: Any) -> complex:
        return complex(self.read_value())

    def __array__(self: Any, dtype: Any = None, copy: Any = None) -> Any:
        del copy  # a copy is made in any case
        return np.array(self.read_value().numpy(), dtype)


class _OurMirroredVariable(OfReplicas, values.MirroredVariable):
    """A variable whose copies are equal."""

    def _update_cross_replica(
        self, update_fn: Any, value: Any, **kwargs: Any
    ) -> Any:
        return super()._update_cross_replica(update_fn, _whole(value), **kwargs)


class _OurSyncOnReadVariable(OfReplicas, values.SyncOnReadVariable):
    """A variable whose copies are reduced when it is read."""


class InParts(OfReplicas):
    """A variable of which each device holds a part, and none the whole.

    It is read and written whole.
    """

    layout: Any
    """How the parts make the whole."""


_CONVERTIBLE = {
    values.MirroredVariable: _OurMirroredVariable,
    values.SyncOnReadVariable: _OurSyncOnReadVariable,
}


def assert_of_running(variable: Any) -> None:
    """Raises if the replica that runs is of another strategy than the copies.

    What lies in parts belongs to a strategy that cuts it.
    """
    own, running = variable.distribute_strategy, tf.distribute.get_strategy()
    if own is running or not isinstance(running.extended, ReplicatedExtended):
        return
    ours, theirs = (each.extended.worker_devices for each in (own, running))
    shard = getattr(own, "shard", None)
    if ours != theirs or shard is not None:
        given = "" if shard is None else f", shard={shard!r}"
        raise StrategyError(
            f"The variable {variable.name!r} is replicated on "
            f"{_short(ours)}{given}, and the step runs on {_short(theirs)}. "
            "Models, optimizers and batches of a step have the same devices: "
            f"write `with keras_conflux.replicate(devices={len(ours)}{given}):`"
            " around all of them, or give each call the same `devices`."
        )


def _whole(value: Any) -> Any:
    return value.read_value() if isinstance(value, InParts) else value


def _some_in_parts(*given: Any) -> bool:
    """Whether a function of these runs once, on wholes, and not by copies."""
    return any(isinstance(each, InParts) for each in tf.nest.flatten(given))


def _short(names: Sequence[str]) -> str:
    return ", ".join(":".join(name.split(":")[-2:]) for name in names)


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
        with without_untrue_lines():
            super().__init__(strategy, devices=list(devices))

    def _scope(self, strategy: tf.distribute.Strategy) -> Any:
        if tf.executing_eagerly():
            # `tf.map_fn` leaves this where what it maps has raised an error.
            # TensorFlow refuses to enter a scope with it outside of graphs.
            variable_scope.get_variable_scope()._caching_device = None
        return _WholeScope(super()._scope(strategy))

    def _use_merge_call(self) -> bool:
        # With False, Keras and TensorFlow update variables inside a replica.
        return False

    def _make_collective_ops_with_fallbacks(self) -> Any:
        # TensorFlow would make CollectiveAllReduce, whose keys start anew in
        # each strategy, so that two strategies abort each other
        # (tensorflow#61314). What reduces between replicas goes through
        # `all_reduce`; what is left, reductions asked for outside of
        # replicas, is copies and additions.
        return _ReductionToOneDevice()

    def _get_cross_device_ops(self, value: Any) -> Any:
        return self._cross_device_ops

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # ONLY_FIRST_REPLICA (Keras' step counter) would need the first replica
        # in every assignment. All count the same steps.
        first = tf.VariableAggregation.ONLY_FIRST_REPLICA
        if kwargs.get("aggregation") == first:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        made = super()._create_variable(next_creator, **kwargs)
        for copy in getattr(made, "values", ()):
            # Of a copy that a tf.function makes, TensorFlow notes this on the
            # variable alone, and a trace captures the handle.
            copy.handle._distributed_container = weakref.ref(made)
        if type(made) in _CONVERTIBLE:
            made.__class__ = _CONVERTIBLE[type(made)]
        return made

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        # A variable whose copies are added up when it is read starts with its
        # initial value once, not on each replica.
        on_read = tf.VariableSynchronization.ON_READ
        is_sum = kwargs.get("aggregation") == tf.VariableAggregation.SUM
        if replica_id and is_sum and kwargs.get("synchronization") == on_read:
            return lambda: tf.zeros(primary_var.shape, primary_var.dtype)
        if not tf.executing_eagerly():
            # TensorFlow would read the first copy, which has no value yet
            # where the function that makes it has only been traced.
            given = kwargs["initial_value"]
            return given if isinstance(given, _Once) else _Once(given)
        return super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )

    def _update(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: bool
    ) -> Any:
        # Replicas write their copies without this.
        if tf.executing_eagerly():
            _note_assignment(var)
        if _some_in_parts(var, args, kwargs):
            return fn(var, *args, **kwargs)
        return super()._update(var, fn, args, kwargs, group)

    def _update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        if _some_in_parts(args, kwargs):
            return fn(*args, **kwargs)
        return super()._update_non_slot(colocate_with, fn, args, kwargs, group)

    def _reduce_to(self, reduce_op: Any, value: Any, *others: Any) -> Any:
        return super()._reduce_to(reduce_op, _whole(value), *others)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        return self._conflux_all_reduce("mean" if mean else "sum", value)

    def _replica_ctx_update(
        self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        if _some_in_parts(var, args, kwargs):
            return fn(var, *args, **kwargs)
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        is_function = isinstance(fn, tf.types.experimental.PolymorphicFunction)
        program = self._cloned(fn) if is_function else self._prepared(fn)
        run: Callable = super()._call_for_each_replica
        if not is_function and tf.executing_eagerly():
            program = _with_these_context_variables(program)
        elif not is_function:
            run = functools.partial(run_in_turn, self._container_strategy())
        return self._conflux_around_run(lambda: run(program, args, kwargs))

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


class _ReductionToOneDevice(tf.distribute.ReductionToOneDevice):
    """TensorFlow's, which logs a line for each reduction."""

    def reduce_implementation(self, *args: Any, **kwargs: Any) -> Any:
        with without_untrue_lines():
            return super().reduce_implementation(*args, **kwargs)

    def _gather_implementation(self, *args: Any, **kwargs: Any) -> Any:
        with without_untrue_lines():
            return super()._gather_implementation(*args, **kwargs)


_assignments = 0


def _note_assignment(variable: Any) -> None:
    global _assignments
    _assignments += 1
    variable.conflux_assignments = assignments(variable) + 1


def assignments_of_all() -> int:
    """Returns how often any variable has been assigned outside of replicas."""
    return _assignments


def assignments(variable: Any) -> int:
    """Returns how often a variable has been assigned outside of replicas."""
    # Not by `getattr`, which would read a variable that has no value.
    return vars(variable).get("conflux_assignments", 0)


class _WholeScope:
    """A strategy's scope that is left if it cannot be entered."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def __enter__(self) -> Any:
        before = distribute_lib._get_per_thread_mode()
        try:
            return self._scope.__enter__()
        except BaseException:
            if distribute_lib._get_per_thread_mode() is not before:
                distribute_lib._pop_per_thread_mode()
            raise

    def __exit__(self, *error: Any) -> None:
        self._scope.__exit__(*error)


class _Once:
    """An initial value that is computed for the first copy, and kept.

    Args:
        given: The value, or a function that returns it.
    """

    def __init__(self, given: Any) -> None:
        self._given = given

    def __call__(self) -> Any:
        if callable(self._given):
            self._given = self._given()
        return tf.identity(self._given)


def _with_these_context_variables(fn: Callable) -> Callable:
    """Makes `fn` see this thread's context variables in other threads."""
    here = contextvars.copy_context()

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        return here.copy().run(fn, *args, **kwargs)

    return run


def _in_order_of_its_own(fn: Callable) -> Callable:
    """Keeps a replica's side effects from waiting for another replica's.

    A tf.function runs ops with side effects on nothing in particular (an
    assertion, a print, a Python call) one after another, in the order of
    tracing: all of replica 0's before those of replica 1. So one after a
    collective in replica 0 and one before it in replica 1 would wait for each
    other forever. Here each replica has an order of its own.
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
