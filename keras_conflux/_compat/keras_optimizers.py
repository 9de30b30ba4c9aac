"""The state of Keras' optimizers for each variable, and their updates."""

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state


def _of_this_version(*names: str) -> tuple[type, ...]:
    found = [getattr(keras.optimizers, name, None) for name in names]
    return tuple(each for each in found if each is not None)


_ELEMENTWISE = _of_this_version(
    *("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
    *("Ftrl", "Lion", "Nadam", "RMSprop", "SGD"),
)
"""The optimizers that update each entry of a variable by itself."""

_OF_WHOLE_TENSORS = _of_this_version("Adafactor", "Lamb", "Muon")
"""The optimizers whose updates compare the entries of a variable."""

_WITH_TENSORS = (*_ELEMENTWISE, *_OF_WHOLE_TENSORS)
"""The optimizers that treat tensors as they treat variables."""

_READING_LATE = _of_this_version("ScheduleFreeAdamW")
"""The optimizers that update each entry by itself, and read a value late.

They keep the `value` of a variable, write the variable, and then use the kept
value. In TensorFlow that is the variable itself, and so the new value.
"""


def updates_with_tensors(optimizer: Any, learning_rate: Any) -> bool:
    """Whether an optimizer can be given tensors in place of variables.

    Its learning rate and settings must not be variables that it updates.
    """
    settings = vars(optimizer)
    updated = set(map(id, optimizer._trainable_variables))
    return (
        type(optimizer) in _WITH_TENSORS
        and "update_step" not in settings
        and not any(
            id(each) in updated for each in (*settings.values(), learning_rate)
        )
    )


def updates_each_entry(optimizer: Any) -> bool:
    """Whether an update of an entry depends on no other entry of a variable."""
    return _updates_as_one_of(optimizer, _ELEMENTWISE) or reads_late(optimizer)


def reads_late(optimizer: Any) -> bool:
    """Whether the `value` of a variable is to be read when it is used."""
    return _updates_as_one_of(optimizer, _READING_LATE)


def updates_whole_tensors(optimizer: Any) -> bool:
    """Whether an optimizer of Keras compares the entries of a variable."""
    return _updates_as_one_of(optimizer, _OF_WHOLE_TENSORS)


def applies_as_keras(optimizer: Any) -> bool:
    """Whether gradients reach Keras' own `apply` as they are given."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return all(
        getattr(type(optimizer), name).__module__.startswith("keras.")
        for name in ("apply_gradients", "apply")
    ) and (inner is None or applies_as_keras(inner))


def _updates_as_one_of(optimizer: Any, classes: Sequence[type]) -> bool:
    known: Any = next((x for x in classes if isinstance(optimizer, x)), None)
    return (
        known is not None
        and type(optimizer).update_step is known.update_step
        and "update_step" not in vars(optimizer)
    )


def updated_together(optimizer: Any) -> list[list[Any]]:
    """Returns for each variable the variable, and its own optimizer state.

    All lists of one variable, or `None`, for each count as such state, of
    which variables of one shape have the same.
    """
    trained = optimizer._trainable_variables
    kept = [
        found
        for name, found in vars(optimizer).items()
        if name not in _NOT_UPDATED and _is_one_for_each(found, trained)
    ]
    # Adafactor puts the integer 0 in the place of missing state of a variable.
    # TensorFlow has integers on the CPU, where XLA cannot read them.
    return [
        [variable, *filter(_is_updated, own)]
        for variable, *own in zip(trained, *kept, strict=True)
    ]


def trained_by(optimizer: Any) -> list[Any]:
    """Returns the variables that an optimizer was built for."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return list(inner._trainable_variables)


def accumulated(optimizer: Any) -> list[tuple[Any, Any]]:
    """Returns the accumulators of gradients, each with its variable."""
    found = getattr(optimizer, "_accumulated_gradients", None) or []
    trained = trained_by(optimizer) if found else []
    return [
        (accumulator, variable)
        for accumulator, variable in zip(found, trained, strict=True)
        if accumulator is not None
    ]


def averages(optimizer: Any) -> list[Any]:
    """Returns the averages of the variables that an optimizer was built for."""
    return optimizer._model_variables_moving_average


def index_of(optimizer: Any, variable: tf.Variable) -> int:
    """Returns the position of a variable among those that are updated."""
    return optimizer._get_variable_index(variable)


def _is_updated(state: keras.Variable | None) -> bool:
    return state is not None and not state.dtype.startswith("int")


_NOT_UPDATED = (
    "_trainable_variables",
    "_variables",
    "_accumulated_gradients",
    "_model_variables_moving_average",
)
"""Lists of variables of an optimizer that its `update_step` does not use."""


def _is_one_for_each(found: Any, trained: Sequence[Any]) -> bool:
    """Whether something is a list of a variable, or `None`, for each."""
    return (
        isinstance(found, list | tuple)
        and len(found) == len(trained)
        and all(x is None or isinstance(x, keras.Variable) for x in found)
        and any(each is not None for each in found)
    )


def stateless_scope() -> Any:
    """Returns the `keras.StatelessScope` that this thread is in, or `None`."""
    return global_state.get_global_attribute("stateless_scope")
