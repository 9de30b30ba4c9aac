"""Finds traces that read variables which have been replaced.

A trace holds the handles of the variables that it reads, whoever they belong
to: layers that a model shares, a teacher in its loss, the seed of
`keras.random`. It is stale where a Keras variable has another handle by now.
"""

import weakref
from typing import Any

from keras_conflux._compat import keras_models
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._graphs import bodies

_replaced: Any = weakref.WeakValueDictionary()
"""By id, the handles that Keras variables have had, and have no more."""
_swaps = 0
"""The number of times that Keras variables have got other handles."""
_FUNCTIONS = ("train_function", "test_function", "predict_function")
_settings = 0
"""The number of times that the settings of layers have changed."""


def note_swap(old: Any, new: Any) -> None:
    """Records that a Keras variable has other handles, perhaps old ones."""
    global _swaps
    _swaps += 1
    for copy in old:
        _replaced[id(copy.handle)] = copy.handle
    for copy in new:
        _replaced.pop(id(copy.handle), None)


def note_settings() -> None:
    """Records that layers compute differently from all traces."""
    global _settings
    _settings += 1


class Staleness:
    """Tells whether a function that is traced from now on has become stale."""

    def __init__(self) -> None:
        self._settings = _settings
        self._swaps = -1
        self._reads_replaced = False

    def applies_to(self, function: Any) -> bool:
        """Whether a function reads a variable that has been replaced since."""
        if self._swaps != _swaps:
            self._swaps = _swaps
            graphs = tensorflow_tracing.traces_of(function)
            self._reads_replaced = reads(graphs, _replaced)
        return self._settings != _settings or self._reads_replaced


def reads(graphs: list[Any], handles: Any) -> bool:
    """Whether one of some graphs reads a variable, by ids of handles."""
    return bool(handles) and any(
        id(outside) in handles
        for graph in graphs
        for outside in bodies.captures(graph).values()
    )


def is_stale(function: Any) -> bool:
    """Whether a function of Keras' own trainer reads replaced variables."""
    return bool(_replaced) and reads(traces_of_keras(function), _replaced)


def read_by_functions(model: Any, handles: Any) -> bool:
    """Whether functions of Keras' own trainer read a variable."""
    return any(
        reads(traces_of_keras(getattr(model, x)), handles) for x in _FUNCTIONS
    )


def traces_of_keras(function: Any) -> list[Any]:
    """Returns the graphs of a function of Keras' own trainer."""
    return [
        graph
        for inside in keras_models.tf_functions_in(function)
        for graph in tensorflow_tracing.traces_of(inside)
    ]


def forget(model: Any) -> None:
    """Drops a model's functions, which are made again when it next runs."""
    for each in _FUNCTIONS:
        setattr(model, each, None)
