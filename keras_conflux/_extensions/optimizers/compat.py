"""What faster updates need of the insides of Keras."""

import numbers
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state

from keras_conflux._compat.keras_models import is_of_keras

_WITH_TENSORS = (
    keras.optimizers.Adadelta,
    keras.optimizers.Adafactor,
    keras.optimizers.Adagrad,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adamax,
    keras.optimizers.Ftrl,
    keras.optimizers.Lamb,
    keras.optimizers.Lion,
    keras.optimizers.Muon,
    keras.optimizers.Nadam,
    keras.optimizers.RMSprop,
    keras.optimizers.SGD,
)
"""The optimizers that do with tensors what they do with variables.

ScheduleFreeAdamW keeps the `value` of a variable, writes the variable, and then
uses what it has kept. In TensorFlow that is the variable itself, and so the new
value. A tensor would still be the old one.
"""


def updates_with_tensors(optimizer: Any, learning_rate: Any) -> bool:
    """Whether an optimizer can be given tensors in place of variables.

    It does the same for each variable of a shape then, unless its learning rate
    or another setting is a variable that it updates.
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


def decays_at_one_rate(optimizer: Any) -> bool:
    """Whether an optimizer decays all weights by what is known before.

    A weight decay or a learning rate that depends on a variable which is
    trained changes while variables decay, one after another.
    """
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        is_known = all(rate is not x for x in optimizer._trainable_variables)
    else:
        is_known = is_of_keras(rate) and all(
            isinstance(setting, _PLAIN)
            for setting in keras.tree.flatten([*vars(rate).values()])
        )
    return is_known and isinstance(optimizer.weight_decay, numbers.Real)


_PLAIN = (numbers.Real, str, type(None))
"""What settings of a schedule may be."""


def decays(optimizer: Any, variable: tf.Variable) -> bool:
    """Whether an optimizer that decays weights decays those of a variable."""
    return optimizer._use_weight_decay(variable)


def updated_together(optimizer: Any) -> list[list[Any]]:
    """Returns for each variable the variable, and what is kept for it alone.

    Args:
        optimizer: One that has been built.

    Returns:
        Variables of Keras, or `None` for what it does not keep for one. All
        lists of one variable for each count as what it keeps.
    """
    trained = optimizer._trainable_variables
    kept = [
        found
        for name, found in vars(optimizer).items()
        if name not in _NOT_UPDATED and _is_one_for_each(found, trained)
    ]
    # Adafactor puts the integer 0 in the place of what it does not keep for a
    # variable. TensorFlow has integers on the CPU, where XLA cannot read them.
    return [
        [variable, *map(_unless_integer, own)]
        for variable, *own in zip(trained, *kept, strict=True)
    ]


def index_of(optimizer: Any, variable: tf.Variable) -> int:
    """Returns the position of a variable among those that are updated."""
    return optimizer._get_variable_index(variable)


def _unless_integer(variable: keras.Variable | None) -> keras.Variable | None:
    if variable is None or variable.dtype.startswith("int"):
        return None
    return variable


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
        and all(
            each is None or isinstance(each, keras.Variable) for each in found
        )
        and any(each is not None for each in found)
    )


def stateless_scope() -> Any:
    """Returns the `keras.StatelessScope` that this thread is in, or `None`."""
    return global_state.get_global_attribute("stateless_scope")
