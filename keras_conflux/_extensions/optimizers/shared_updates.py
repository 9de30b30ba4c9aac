"""One trace of an optimizer's update, and one of its weight decay.

TensorFlow traces the update of each variable, and lowers it to XLA. These were
half of the operations of a step with AdamW, and the square root of each one
takes the passes of MLIR some milliseconds. As a function of tensors, which has
no variables and so no names of any, an update is traced and lowered once for
all variables of one shape. XLA puts it in where it is called.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import tensorflow_internals
from keras_conflux._extensions.optimizers import compat
from keras_conflux._fit.numerics import given_tensors
from keras_conflux._replication import state
from keras_conflux._replication import steps


def update(
    original: Callable,
    optimizer: Any,
    distribution: tf.distribute.Strategy,
    grads_and_vars: list[tuple[Any, tf.Variable]],
    learning_rate: Any,
) -> None:
    """Updates variables, in a program of XLA by functions that they share.

    Optimizers of the user's own may do something else for each variable, and a
    sparse gradient has any number of rows.
    """
    with_tensors = keras_optimizers.updates_with_tensors
    if not steps.in_xla() or not with_tensors(optimizer, learning_rate):
        original(optimizer, distribution, grads_and_vars, learning_rate)
        return
    shared = given_tensors.SharedUpdate(optimizer, learning_rate)
    together = keras_optimizers.updated_together(optimizer)
    for gradient, variable in grads_and_vars:
        kept = together[keras_optimizers.index_of(optimizer, variable)]
        if not _has_updated(shared, gradient, kept):
            single = [(gradient, variable)]
            original(optimizer, distribution, single, learning_rate)


def _has_updated(
    shared: given_tensors.SharedUpdate, gradient: Any, kept: Sequence[Any]
) -> bool:
    """Updates one variable with tensors, if that is possible."""
    is_known = isinstance(kept[0], keras.Variable)
    if not is_known or not isinstance(gradient, tf.Tensor):
        return False
    values = [tf.convert_to_tensor(x) for x in kept]
    try:
        found = shared.of(gradient, kept, values)
    except given_tensors.WritesOthers:
        return False
    for each, value in found:
        given_tensors.overwrite(state.backing(each), value)
    return True


def decay(original: Callable, optimizer: Any, variables: list[Any]) -> None:
    """Decays weights as Keras does, but asks for the learning rate once.

    Keras asks for it for each variable, and traces a schedule each time.
    """
    if not steps.in_xla() or not compat.decays_at_one_rate(optimizer):
        original(optimizer, variables)
        return
    given = optimizer.weight_decay, optimizer.learning_rate
    factors = functools.cache(lambda dtype: [tf.cast(x, dtype) for x in given])
    for each in variables:
        variable = state.backing(each)
        if compat.decays(optimizer, variable):
            weight_decay, rate = factors(variable.dtype)
            # A variable's own method takes longer to trace. The copy of
            # a variable that lies in parts is the replica's part.
            own = tensorflow_internals.copy_that_is_read(variable)
            tf.raw_ops.AssignSubVariableOp(
                resource=own.handle, value=own * weight_decay * rate
            )
