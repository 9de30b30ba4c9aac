"""Objects that callbacks hold: which have a state, and which can lose one."""

import collections
import datetime
import enum
import functools
import logging
import pathlib
import random
import re
import types
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import plain_values

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
_MUTABLE = (list, dict, set, bytearray, collections.deque)


def state_of(value: Any) -> Any:
    """Returns the state of an object as a plain value, or `None`."""
    if isinstance(value, keras.Variable | tf.Variable):
        return value.numpy()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, np.random.RandomState):
        return value.get_state(legacy=False)
    return value.getstate() if isinstance(value, random.Random) else None


def set_state(value: Any, state: Any) -> None:
    """Gives an object the state that it had. Others have none."""
    if isinstance(value, keras.Variable | tf.Variable):
        value.assign(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    elif isinstance(value, np.random.RandomState):
        value.set_state(state)
    elif isinstance(value, random.Random):
        value.setstate(state)


def variables_of(callback: Any) -> set[int]:
    """Returns the identities of variables that are saved with the model."""
    model = getattr(callback, "model", None)
    optimizer = getattr(model, "optimizer", None)
    return {
        id(variable)
        for owner in (model, optimizer)
        for variable in getattr(owner, "variables", ())
    }


def name_what_is_lost(callback: Any) -> None:
    """Warns of attributes that may change in training and are not saved.

    The attributes of Keras' own callbacks are known.
    """
    if is_of_keras(callback):
        return
    known = variables_of(callback)
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


def is_of_keras(callback: Any) -> bool:
    """Whether Keras or this package has written the callback or its parent."""
    plain = (keras.callbacks.Callback, keras.callbacks.LambdaCallback)
    return any(
        each.__module__.startswith(("keras.", "keras_conflux."))
        for each in type(callback).__mro__
        if each not in plain
    )


def _can_lose_state(value: Any, known: set[int]) -> bool:
    if isinstance(value, functools.partial):
        return _can_lose_state(value.func, known)
    if isinstance(value, _FUNCTIONS):
        cells = getattr(value, "__closure__", None) or ()
        return any(isinstance(_content(cell), _MUTABLE) for cell in cells)
    if isinstance(value, keras.Layer | keras.Optimizer):
        return not all(id(each) in known for each in value.variables)
    return state_of(value) is None and not isinstance(value, _WITHOUT_STATE)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None
