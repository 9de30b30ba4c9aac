"""The state of callbacks, and its restoration."""

import datetime
import enum
import functools
import logging
import pathlib
import re
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import held_attributes
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.held_attributes import CONTAINERS
from keras_conflux._extensions.resume.held_attributes import HeldAttributes
from keras_conflux._replication import state

_SET_ANEW = {"params", "min_delta"}
"""Attributes that Keras sets in each training, `min_delta` by its old value."""
_FUNCTIONS = (types.FunctionType, types.MethodType)
_WITHOUT_STATE: tuple[type, ...] = (
    types.BuiltinFunctionType,
    types.ModuleType,
    type,
    np.ufunc,
    np.dtype,
    pathlib.PurePath,
    re.Pattern,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    enum.Enum,
    logging.Logger,
    range,
    slice,
    keras.Loss,
    keras.optimizers.schedules.LearningRateSchedule,
    tf.DType,
    tf.TensorShape,
    tf.TypeSpec,
    tf.data.Dataset,
)


class CallbackStates:
    """Tells which attributes of callbacks have changed in training."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._callbacks = callbacks
        self._held = [HeldAttributes(each, _held_by) for each in callbacks]
        for each in callbacks:
            _name_what_is_lost(each)

    def begin_epoch(self) -> None:
        """Called after all callbacks' `on_epoch_begin`."""
        for held in self._held:
            held.begin_epoch()

    def changed(self) -> list[list[Any]]:
        """Returns `[class, values]` for each callback."""
        return [
            [type(callback).__name__, held.changed()]
            for callback, held in zip(self._callbacks, self._held, strict=True)
        ]

    def restore(self, saved: list[list[Any]]) -> None:
        """Gives the callbacks their former values."""
        _assert_same(self._callbacks, saved)
        for held, (_, values) in zip(self._held, saved, strict=True):
            held.restore(values)


def _assert_same(callbacks: list[Any], saved: list[list[Any]]) -> None:
    """Raises `ValueError` if the callbacks are not those that were saved."""
    here = [type(each).__name__ for each in callbacks]
    there = [name for name, *_ in saved]
    if here != there:
        raise ValueError(
            f"The checkpoint was saved with the callbacks {there}, and the "
            f"call has {here}. Their state belongs to the training: pass "
            "the same ones in the same order, or use another directory."
        )


def _held_by(callback: Any) -> dict[str, Any]:
    """Returns the savable values of a callback. These are no copies."""
    of_model = _variables_of(callback)
    found = {}
    for name, value in vars(callback).items():
        own = held_attributes.state_of(value)
        if own is not None and id(value) not in of_model:
            found[name] = plain_values.State(own)
        elif name not in _SET_ANEW and plain_values.is_plain(value):
            found[name] = value
    return found


def _variables_of(callback: Any) -> set[int]:
    """Returns the identities of variables that are saved with the model."""
    model = getattr(callback, "model", None)
    return {id(variable) for variable in state.variables_of(model)}


def _name_what_is_lost(callback: Any) -> None:
    """Warns of attributes that may change in training and are not saved."""
    if held_attributes.is_of_keras(callback) or (
        held_attributes.tells_its_state(callback)
    ):
        return
    known = _variables_of(callback)
    lost = [
        f"{name!r} (a {type(value).__name__})"
        for name, value in vars(callback).items()
        if not plain_values.is_plain(value) and _can_lose_state(value, known)
    ]
    if lost:
        warn(
            f"The callback {type(callback).__name__} holds values not saved, "
            "which cannot be restored if training is interrupted: "
            f"{', '.join(lost)}. If it changes in training, give the callback "
            "`state_dict()` and `load_state_dict(state)`, which return and "
            "take numbers, strings, arrays, and lists and dicts of them."
        )


def _can_lose_state(value: Any, known: set[int]) -> bool:
    if isinstance(value, functools.partial):
        return _can_lose_state(value.func, known)
    if isinstance(value, _FUNCTIONS):
        cells = getattr(value, "__closure__", None) or ()
        return any(isinstance(_content(cell), CONTAINERS) for cell in cells)
    if isinstance(value, keras.Layer | keras.Optimizer):
        return not all(id(each) in known for each in value.variables)
    return held_attributes.state_of(value) is None and not isinstance(
        value, _WITHOUT_STATE
    )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
