"""The inside of the strategy: TensorFlow's mirrored one, without its pauses."""

import contextvars
import functools
import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

# The extended part of MirroredStrategy is where a strategy's behaviour lives,
# and TensorFlow exports only the strategy around it.
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.framework import auto_control_deps
from tensorflow.python.ops import variable_scope

from keras_conflux._compat import cross_device
from keras_conflux._compat.per_replica import by_leaves
from keras_conflux._compat.per_replica import same_everywhere
from keras_conflux._compat.replicas_in_turn import run_in_turn
from keras_conflux._compat.replicated_variables import make_ours
from keras_conflux._compat.replicated_variables import places
from keras_conflux._compat.replicated_variables import some_in_parts
from keras_conflux._compat.replicated_variables import whole
from keras_conflux._compat.tensorflow_internals import without_untrue_lines


class ReplicatedExtended(mirrored_strategy.MirroredExtended):
    """A MirroredStrategy's inside in which replicas never pause.

    The strategy around it has the methods that begin with `_conflux_`.
    """

    def __init__(
        self,
        strategy: Any,
        devices: Sequence[str],
        cross_device_ops: tf.distribute.CrossDeviceOps | None,
    ) -> None:
        self._conflux_strategy = strategy
        self._communicator = strategy.communicator
        self._conflux_clones: Any = weakref.WeakKeyDictionary()
        with without_untrue_lines():
            super().__init__(strategy, list(devices), cross_device_ops)
        if self._communicator.spans_processes:
            self._cross_device_ops = strategy._conflux_across

    def _scope(self, strategy: tf.distribute.Strategy) -> Any:
        if tf.executing_eagerly():
            # `tf.map_fn` leaves this where its function has raised an error.
            # TensorFlow refuses to enter a scope with it outside of graphs.
            variable_scope.get_variable_scope()._caching_device = None
        return super()._scope(strategy)

    def _use_merge_call(self) -> bool:
        # With False, Keras and TensorFlow update variables inside a replica.
        return False

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._communicator.size

    def _get_local_replica_id(self, replica_id_in_sync_group: Any) -> Any:
        return replica_id_in_sync_group - self._communicator.rank(0)

    def _get_replica_id_in_sync_group(self, replica_id: Any) -> Any:
        return self._communicator.rank(0) + replica_id

    def _experimental_distribute_values_from_function(
        self, value_fn: Callable
    ) -> Any:
        count = self._num_replicas_in_sync
        context = tf.distribute.experimental.ValueContext
        found = [
            value_fn(context(self._communicator.rank(index), count))
            for index in range(len(self._devices))
        ]
        return distribute_utils.regroup(found, always_wrap=True)

    def _experimental_distribute_dataset(
        self, dataset: Any, options: Any
    ) -> Any:
        if not self._communicator.spans_processes:
            return super()._experimental_distribute_dataset(dataset, options)
        shards = self._conflux_strategy._conflux_across.shards(dataset)
        return super()._distribute_datasets_from_function(
            lambda _: shards, options
        )

    def _distribute_datasets_from_function(
        self, dataset_fn: Any, options: Any
    ) -> Any:
        make = dataset_fn
        if self._communicator.spans_processes:
            across = self._conflux_strategy._conflux_across
            make = functools.partial(across.of_process, make)
        return super()._distribute_datasets_from_function(make, options)

    def _make_collective_ops_with_fallbacks(self) -> Any:
        # TensorFlow would make CollectiveAllReduce, whose keys start anew in
        # each strategy, so that two strategies abort each other
        # (tensorflow#61314). Reductions between replicas go through
        # `all_reduce`; these are for reductions outside of replicas.
        return cross_device.usual(self._devices)

    def _get_cross_device_ops(self, value: Any) -> Any:
        if self._communicator.spans_processes:
            return self._cross_device_ops
        return cross_device.able_to_reduce(value, self._cross_device_ops)

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        is_mean = reduce_op == tf.distribute.ReduceOp.MEAN
        value = tf.nest.map_structure(
            lambda leaf: self._of_replicas(leaf, is_mean), value
        )
        to = places(destinations)
        pairs = [(leaf, to) for leaf in tf.nest.flatten(value)]
        if self._may_be_traced_once(pairs):
            found = self._batch_reduce_to(reduce_op, pairs, options)
            return tf.nest.pack_sequence_as(value, found)
        return cross_device.kept(
            super()._reduce_to, reduce_op, whole(value), to, options
        )

    def _may_be_traced_once(self, pairs: Any) -> bool:
        return cross_device.may_be_traced_once(
            pairs, self._cross_device_ops, self._devices
        )

    def _of_replicas(self, value: Any, is_mean: bool = False) -> Any:
        """Returns a tree of values of replicas, or of processes."""
        value, here = by_leaves(value), len(self._devices)
        if not self._communicator.spans_processes or (here > 1 and not is_mean):
            return value
        return tf.nest.map_structure(lambda x: same_everywhere(x, here), value)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        given = value_destination_pairs
        pairs = [(by_leaves(x), places(to)) for x, to in given]
        if self._may_be_traced_once(pairs):
            across = self._conflux_strategy._conflux_across
            return across.batch_reduce_implementation(reduce_op, pairs, options)
        if len({self._get_cross_device_ops(value) for value, _ in pairs}) == 1:
            return cross_device.kept(
                super()._batch_reduce_to, reduce_op, pairs, options
            )
        return [self._reduce_to(reduce_op, x, to, options) for x, to in pairs]

    def _gather_to_implementation(
        self, value: Any, destinations: Any, axis: int, options: Any
    ) -> Any:
        return cross_device.kept(
            super()._gather_to_implementation,
            self._of_replicas(value),
            places(destinations),
            axis,
            options,
        )

    def _broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        return super()._broadcast_to(tensor, places(destinations))

    def of_first_replica(self, value: Any) -> Any:
        """Returns in a replica the value of the first one of all."""
        of_first = self._conflux_strategy._conflux_of_first_replica
        if not isinstance(value, tf.IndexedSlices):
            return of_first(value)
        rows, indices = of_first([value.values, value.indices])
        return tf.IndexedSlices(rows, indices, value.dense_shape)

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        made = super()._create_variable(next_creator, **kwargs)
        for copy in getattr(made, "values", ()):
            # Of a copy that a tf.function makes, TensorFlow notes this on the
            # variable alone, and a trace captures the handle.
            copy.handle._distributed_container = weakref.ref(made)
        make_ours(made)
        return made

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: str, primary_var: Any, **kwargs: Any
    ) -> Any:
        # A variable whose copies are added up when it is read starts with its
        # initial value once, not on each replica.
        given = kwargs["initial_value"]
        once = given if isinstance(given, _Once) else _Once(given)
        in_trace = not tf.executing_eagerly()  # else `make_ours` divides it
        rank = self._communicator.rank(replica_id) if in_trace else replica_id
        on_read = tf.VariableSynchronization.ON_READ
        is_sum = kwargs.get("aggregation") == tf.VariableAggregation.SUM
        if rank and is_sum and kwargs.get("synchronization") == on_read:
            return lambda: tf.zeros_like(once())
        if in_trace:
            # TensorFlow would read the first copy, which has no value yet
            # where the function that makes it has only been traced.
            return once
        return super()._get_variable_creator_initial_value(
            replica_id, device, primary_var, **kwargs
        )

    def _update(
        self, var: Any, fn: Callable, args: Any, kwargs: Any, group: bool
    ) -> Any:
        # Replicas write their copies without this.
        if tf.executing_eagerly():
            note_assigned(var)
        if some_in_parts(var, args, kwargs):
            return fn(var, *args, **kwargs)
        return super()._update(var, fn, args, kwargs, group)

    def _update_non_slot(
        self, colocate_with: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        if some_in_parts(args, kwargs):
            return fn(*args, **kwargs)
        return super()._update_non_slot(colocate_with, fn, args, kwargs, group)

    def _replica_ctx_all_reduce(
        self, reduce_op: Any, value: Any, options: Any = None
    ) -> Any:
        all_reduce = self._conflux_strategy._conflux_all_reduce
        if reduce_op != tf.distribute.ReduceOp.MEAN:
            return all_reduce("sum", value)
        return all_reduce("mean", tf.nest.map_structure(_as_quotient, value))

    def _replica_ctx_update(
        self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool
    ) -> Any:
        if some_in_parts(var, args, kwargs):
            return fn(var, *args, **kwargs)
        return super()._replica_ctx_update(var, fn, args, kwargs, group)

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        is_function = isinstance(fn, tf.types.experimental.PolymorphicFunction)
        program = self._cloned(fn) if is_function else self._prepared(fn)
        run: Callable = super()._call_for_each_replica
        if not is_function and tf.executing_eagerly():
            program = _with_these_context_variables(program)
        elif not is_function:
            run = functools.partial(run_in_turn, self._conflux_strategy)
        return self._communicator.trace_replicas(
            lambda: run(program, args, kwargs), is_function
        )

    def _prepared(self, fn: Callable) -> Callable:
        in_order = _in_order_of_its_own(fn)
        return self._conflux_strategy._conflux_around_replica(in_order)

    def _cloned(self, fn: Any) -> Any:
        # mirrored_run.py runs the Python function of a tf.function in a clone
        # of it and finds that by the function's identity.
        if fn not in self._conflux_clones:
            self._conflux_clones[fn] = fn._clone(
                python_function=self._prepared(fn.python_function)
            )
        return self._conflux_clones[fn]


def _as_quotient(value: Any) -> Any:
    """Returns an integer as a float of the type that TensorFlow divides to."""
    is_integer = tf.is_tensor(value) and value.dtype.is_integer
    return tf.truediv(value, 1) if is_integer else value


_assigned: Any = weakref.WeakValueDictionary()
"""By their ids, variables that nobody has compared since."""


def assigned() -> list[Any]:
    """Returns what was assigned outside of replicas, and not compared since."""
    return [*_assigned.values()]


def note_assigned(variable: Any) -> None:
    """Notes a variable that was assigned outside of replicas."""
    _assigned[id(variable)] = variable


def note_compared(variables: Iterable[Any] | None = None) -> None:
    """Notes variables, or all, that processes have compared."""
    for variable in assigned() if variables is None else variables:
        _assigned.pop(id(variable), None)


class _Once:
    """An initial value that is computed for the first copy, and kept."""

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
    assertion, a print, a Python call) in the order of tracing: all of replica
    0's before all of replica 1's. One after a collective in replica 0 and one
    before it in replica 1 would wait for each other. Here each has its order.
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
