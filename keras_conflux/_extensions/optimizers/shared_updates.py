"""One trace of an optimizer's update for all variables of one shape.

TensorFlow traces the update of each variable, and lowers it to XLA. These were
half of the operations of a step with AdamW, and the square root of each one
takes the passes of MLIR some milliseconds. As a function of tensors, which has
no variables and so no names of any, an update is traced and lowered once for
each shape. XLA puts it in where it is called.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_variables
from keras_conflux._extensions.optimizers.tensors import GivenTensors
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
    if not steps.in_xla() or not keras_models.updates_with_tensors(
        optimizer, learning_rate
    ):
        original(optimizer, distribution, grads_and_vars, learning_rate)
        return
    shared = _SharedUpdate(optimizer, learning_rate)
    for gradient, variable in grads_and_vars:
        try:
            shared(gradient, variable)
        except _CannotShare:
            single = [(gradient, variable)]
            original(optimizer, distribution, single, learning_rate)


class _CannotShare(Exception):
    """An update takes or writes something else than tensors of a variable."""


class _SharedUpdate:
    """Updates one variable after another.

    Args:
        optimizer: Whose `update_step` is traced.
        learning_rate: What it takes.
    """

    def __init__(self, optimizer: Any, learning_rate: Any) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._updated_together = keras_models.updated_together(optimizer)
        self._variables: list[keras.Variable | None] = []
        self._function = tf.function(
            self._updated,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

    def __call__(self, gradient: Any, variable: tf.Variable) -> None:
        index = keras_models.index_of(self._optimizer, variable)
        self._variables = self._updated_together[index]
        is_known = isinstance(self._variables[0], keras.Variable)
        if not is_known or not isinstance(gradient, tf.Tensor):
            raise _CannotShare
        values = [
            None if each is None else tf.convert_to_tensor(each)
            for each in self._variables
        ]
        function = self._function.get_concrete_function(gradient, values)
        found = function(gradient, values)
        for each, value in zip(self._variables, found, strict=True):
            if each is not None and value is not None:
                # What a variable does besides takes longer to trace.
                handle = keras_variables.backing(each).handle
                tf.raw_ops.AssignVariableOp(resource=handle, value=value)

    def _updated(
        self, gradient: tf.Tensor, values: list[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        """Returns what an update leaves in the variables that it changes."""
        known = [
            (variable, value)
            for variable, value in zip(self._variables, values, strict=True)
            if variable is not None
        ]
        with GivenTensors(known) as scope:
            before = scope.state_mapping.copy()
            self._optimizer.update_step(
                gradient, self._variables[0], self._learning_rate
            )
        after = scope.state_mapping
        if after.keys() != before.keys():
            raise _CannotShare
        changed = {key for key in after if after[key] is not before[key]}
        return [
            after[id(each)] if id(each) in changed else None
            for each in self._variables
        ]
