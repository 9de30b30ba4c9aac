"""What several processes do once: files are written by the first one."""

import contextvars
from collections.abc import Callable
from typing import Any

import keras

from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._replication import accumulated
from keras_conflux._replication import state

_alone: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "alone", default=False
)
_WRITERS = (
    keras.callbacks.CSVLogger
    | keras.callbacks.RemoteMonitor
    | keras.callbacks.TensorBoard
)
"""Callbacks that only write. Others also decide something."""


def save(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Saves in the first process; the others wait until it has."""
    if (
        _is_here_only()
        or state.replicated_by(state.variables_of(model)) is None
    ):
        return original(model, *args, **kwargs)
    return _in_first_process(original, model, model, *args, **kwargs)


def back_up(original: Callable, callback: Any, *args: Any) -> None:
    """Writes or deletes a backup, of several files, in the first process."""
    if _is_here_only():
        original(callback, *args)
        return
    _in_first_process(original, callback.model, callback, *args)


def of_this_process(callbacks: list[Any]) -> list[Any]:
    """Leaves out callbacks that would write the same files once more."""
    if process_index() == 0:
        return callbacks
    return [each for each in callbacks if not isinstance(each, _WRITERS)]


def _is_here_only() -> bool:
    return process_count() == 1 or _alone.get()


def _in_first_process(
    original: Callable, model: Any, *args: Any, **kwargs: Any
) -> Any:
    what = f"{original.__name__} of {model.name}"
    result = None
    with errors_reported_to_all(what):
        assert_same_place(what)
        accumulated.add_up_on_first_replica(state.stateful_objects(model))
        if process_index() == 0:
            token = _alone.set(True)
            try:
                result = original(*args, **kwargs)
            finally:
                _alone.reset(token)
        assert_same_place(f"the end of {what}")
    return result
