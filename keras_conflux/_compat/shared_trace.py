"""One trace of a function, which each replica calls with its own variables."""

import weakref
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._graphs import resources
from keras_conflux._graphs.effects import Effect
from keras_conflux._graphs.effects import of_type

_of_one_replica: Any = weakref.WeakSet()
"""The graphs of functions whose trace has asked for which replica it is."""


def mark_replica_specific() -> None:
    """Marks the graph that is traced here as one of a single replica."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        _of_one_replica.add(graph)
        graph = getattr(graph, "outer_graph", None)


class SharedTrace:
    """A function as a replica has traced it."""

    def __init__(self, function: Any, arguments: Sequence[Any]) -> None:
        self._concrete = function.get_concrete_function(*arguments)
        self._captures = self._concrete.captured_inputs

    def serves_others(self) -> bool:
        """Whether other replicas would have traced the same.

        A function that it calls may have been traced before, for another
        program of the same replica.
        """
        graph = self._concrete.graph
        return (
            all(map(_is_known_elsewhere, self._captures))
            and _is_for_all(graph)
            and all(map(_calls_for_all, graph._functions.values()))
        )

    def __call__(self, *arguments: Any) -> Any:
        """Calls it in a graph, with the variables of the same replica."""
        return self._called(arguments, self._captures)

    def for_replica(self, index: int, *arguments: Any) -> Any:
        """Calls it in a graph, with the variables of another replica."""
        captures = [_capture_of(index, each) for each in self._captures]
        return self._called(arguments, captures)

    def _called(self, arguments: Sequence[Any], captures: list[Any]) -> Any:
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
    if capture.dtype != tf.resource:
        return capture
    return resources.container_of(capture).values[index].handle
