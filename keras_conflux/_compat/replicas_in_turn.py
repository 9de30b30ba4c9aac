"""Traces the replicas of a strategy one after another, in the caller's thread.

TensorFlow traces each replica in a thread of its own, so that `merge_call` can
pause it. State that a program keeps by thread (Keras' settings, context
variables, `threading.local`) would be missing in a step. Replicas of ours pause
only if the user calls `merge_call`: then the first one goes on waiting in the
caller's thread, and the others run in threads of TensorFlow.
"""

import weakref
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute import shared_variable_creator

from keras_conflux._compat.tensorflow_tracing import note_rank
from keras_conflux._graphs import bodies
from keras_conflux._graphs import resources
from keras_conflux._graphs.effects import Effect
from keras_conflux._graphs.effects import of_type


def run_in_turn(
    strategy: tf.distribute.Strategy, fn: Callable, args: Any, kwargs: Any
) -> Any:
    """Traces `fn` for each replica, and returns all their results."""
    results = _Replicas(strategy, fn, args, kwargs).results()
    return distribute_utils.regroup(tuple(results))


class _Replicas:
    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        fn: Callable,
        args: Any,
        kwargs: Any,
    ) -> None:
        self.graph = tf.compat.v1.get_default_graph()
        # Else a thread would begin in the scopes that are open in another.
        self.graph.switch_to_thread_local()
        self._strategy = strategy
        self._devices = strategy.extended.worker_devices
        self._fn = fn
        self._args, self._kwargs = args, kwargs
        self._variables: dict[str, Any] = {}
        self._coordinator = tf.train.Coordinator(
            clean_stop_exception_types=(mirrored_run._RequestedStop,)
        )
        self._scope = self.graph.get_name_scope()
        # They note here which scopes the caller has opened.
        self._others = [self._thread(i) for i in range(1, len(self._devices))]
        self._have_threads = False

    def results(self) -> list[Any]:
        """Runs all replicas."""
        try:
            results = [self._here(0)]
            if not self._have_threads:
                indices = range(1, len(self._devices))
                return results + [self._here(index) for index in indices]
            self._resume_others()
            if not all(other.done for other in self._others):
                raise _different_numbers()
            return results + [other.main_result for other in self._others]
        finally:
            if self._have_threads:
                self._coordinator.request_stop()
                for other in self._others:
                    other.should_run.set()
                self._coordinator.join(self._others)

    def merge_arguments(self, index: int, args: Any, kwargs: Any) -> Any:
        """Returns the arguments of all replicas' `merge_call`."""
        if index > 0:
            raise _different_numbers()
        if tf.compat.v1.get_default_graph() is not self.graph:
            raise RuntimeError(
                "`merge_call` was called inside a `tf.function`, a `tf.cond` "
                "or a loop of a replica's program, where replicas cannot "
                "pause. Call it outside of them, or call `kc.allreduce`."
            )
        self._resume_others()
        if any(other.done for other in self._others):
            raise _different_numbers()
        regroup = distribute_utils.regroup
        return (
            regroup((args, *(other.merge_args for other in self._others))),
            regroup((kwargs, *(other.merge_kwargs for other in self._others))),
        )

    def give_others(self, result: Any) -> None:
        """Gives the result of `merge_call` to the other replicas."""
        for index, other in enumerate(self._others, start=1):
            other.merge_result = distribute_utils.select_replica(index, result)

    def _here(self, index: int) -> Any:
        """Runs a replica in this thread, in the scopes that a thread has."""
        scope = f"{self._scope}/" if self._scope else ""
        with (
            _ReplicaHere(self._strategy, index, self),
            tf.device(self._devices[index]),
            tf.name_scope(f"{scope}replica_{index}/" if index else scope),
            tf.variable_creator_scope(self._creator(index)),
        ):
            args, kwargs = self._arguments(index)
            return self._fn(*args, **kwargs)

    def _arguments(self, index: int) -> Any:
        given = self._args, self._kwargs
        return distribute_utils.select_replica(index, given)

    def _creator(self, index: int) -> Callable:
        # Replicas after the first get the variables that it has made.
        return shared_variable_creator.make_fn(self._variables, index)

    def _thread(self, index: int) -> Any:
        return mirrored_run._MirroredReplicaThread(
            self._strategy,
            self._coordinator,
            index,
            self._devices,
            self._creator(index),
            self._fn,
            distribute_utils.caching_scope_local,
            *self._arguments(index),
        )

    def _resume_others(self) -> None:
        """Runs the other replicas until they pause or end."""
        if not self._have_threads:
            self._have_threads = True
            for other in self._others:
                other.start()
        for other in self._others:
            other.should_run.set()
            other.has_paused.wait()
            other.has_paused.clear()
            if self._coordinator.should_stop():
                raise mirrored_run._RequestedStop  # `join` raises the cause


class _ReplicaHere(tf.distribute.ReplicaContext):
    """Says which replica runs in the caller's thread."""

    def __init__(
        self, strategy: tf.distribute.Strategy, index: int, replicas: _Replicas
    ) -> None:
        rank = strategy.extended._get_replica_id_in_sync_group(index)
        super().__init__(strategy, rank)
        self.graph = replicas.graph
        self._conflux_index = index
        self._conflux_replicas = replicas

    @property
    def replica_id_in_sync_group(self) -> Any:
        mark_replica_specific()
        note_rank()
        return super().replica_id_in_sync_group

    @property
    def devices(self) -> Any:
        mark_replica_specific()
        return super().devices

    def _merge_call(self, merge_fn: Callable, args: Any, kwargs: Any) -> Any:
        replicas = self._conflux_replicas
        merged = replicas.merge_arguments(self._conflux_index, args, kwargs)
        with tf.device(None):
            result = super()._merge_call(merge_fn, *merged)
        replicas.give_others(result)
        return distribute_utils.select_replica(0, result)


def _different_numbers() -> Exception:
    return RuntimeError(
        "Some replicas made a different number of `merge_call` calls."
    )


_of_one_replica: Any = weakref.WeakSet()
"""The graphs of functions whose trace has asked for which replica it is."""


def mark_replica_specific() -> None:
    """Marks the graph that is traced here as one of a single replica."""
    _of_one_replica.update(bodies.being_traced())


class SharedTrace:
    """A function as a replica has traced it."""

    def __init__(self, function: Any, arguments: Sequence[Any]) -> None:
        self._concrete = function.get_concrete_function(*arguments)
        self._captures = self._concrete.captured_inputs

    def serves_others(self) -> bool:
        """Whether other replicas would have traced the same."""
        graph = self._concrete.graph
        return (
            all(map(_is_known_elsewhere, self._captures))
            and _is_for_all(graph)
            and all(map(_calls_for_all, graph._functions.values()))
        )

    def __call__(self, *arguments: Any, replica: int | None = None) -> Any:
        """Calls it in a graph, with the variables of this or another one."""
        captures = self._captures
        if replica is not None:
            captures = [_capture_of(replica, each) for each in captures]
        call = self._concrete._inference_function.call_with_captures
        return call(arguments, {}, captures)


def _is_for_all(graph: Any) -> bool:
    types = (each.type for each in graph.get_operations())
    return graph not in _of_one_replica and not _draw(types)


def _calls_for_all(function: Any) -> bool:
    if hasattr(function, "graph"):
        return _is_for_all(function.graph)
    # One of TensorFlow 1, such as the loops of `tf.nn.ctc_loss`, is called by
    # the graph around it, which `mark_replica_specific` has marked.
    return not _draw(each.op for each in function.definition.node_def)


def _draw(types: Iterable[str]) -> bool:
    """Whether XLA draws a seed for some when it compiles a program."""
    return any(Effect.DRAWS in of_type(each) for each in types)


def _is_known_elsewhere(capture: Any) -> bool:
    # A tensor of the graph around may have been computed by replica 0, and a
    # resource that no variable of all replicas holds is on its device alone.
    return isinstance(capture, tf.__internal__.EagerTensor) and (
        capture.dtype != tf.resource
        or resources.container_of(capture) is not None
    )


def _capture_of(index: int, capture: Any) -> Any:
    """Returns a replica's capture in place of another's."""
    variable = resources.container_of(capture)
    return capture if variable is None else variable.values[index].handle
