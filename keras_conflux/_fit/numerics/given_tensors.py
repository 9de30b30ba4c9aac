"""Optimizers read and write tensors in place of variables."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._replication import steps


class GivenTensors(keras.StatelessScope):
    """In it, an optimizer reads and writes tensors in place of variables.

    They may have other shapes than the variables, as parts of them do.

    Args:
        known: The variables, and the tensors.
    """

    def __init__(
        self, known: Sequence[tuple[keras.Variable, tf.Tensor]]
    ) -> None:
        super().__init__()
        self.values = {id(variable): value for variable, value in known}

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """See `keras.StatelessScope`."""
        return self.values.get(id(variable))

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """See `keras.StatelessScope`."""
        variable, value = update
        self.values[id(variable)] = value


class WritesOthers(Exception):
    """An update writes something else than the variables that it was given."""


class SharedUpdate:
    """An update of an optimizer, as a function of tensors.

    In a program of XLA it is traced once for all tensors of one shape.

    Args:
        optimizer: Whose `update_step` is called.
        learning_rate: What it takes.
    """

    def __init__(self, optimizer: Any, learning_rate: Any) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._variables: Sequence[keras.Variable | None] = []
        self._function = tf.function(
            self._updated,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

    def of(
        self,
        gradient: tf.Tensor,
        variables: Sequence[keras.Variable | None],
        values: list[tf.Tensor | None],
    ) -> list[tf.Tensor | None]:
        """Returns what the update leaves in the variables that it changes.

        Args:
            gradient: For the first variable.
            variables: What is updated, and what is kept for it alone.
            values: What they hold, in any shape that the optimizer can update.

        Raises:
            WritesOthers: If it writes something else.
        """
        self._variables = variables
        if not steps.in_xla():
            return self._updated(gradient, values)
        function = self._function.get_concrete_function(gradient, values)
        return function(gradient, values)

    def _updated(
        self, gradient: tf.Tensor, values: list[tf.Tensor | None]
    ) -> list[tf.Tensor | None]:
        known = [
            (variable, value)
            for variable, value in zip(self._variables, values, strict=True)
            if variable is not None and value is not None
        ]
        with GivenTensors(known) as scope:
            before = scope.values.copy()
            self._optimizer.update_step(
                gradient, self._variables[0], self._learning_rate
            )
        after = scope.values
        if after.keys() != before.keys():
            raise WritesOthers
        changed = {key for key in after if after[key] is not before[key]}
        return [
            after[id(each)] if id(each) in changed else None
            for each in self._variables
        ]


def key(original: Callable, optimizer: Any, variable: Any) -> Any:
    """Returns what an optimizer knows a variable by.

    Keras asks the `value` for its id, which a tensor does not have.
    """
    if _is_tensor_here(variable):
        variable = keras_variables.backing(variable)
    return original(optimizer, variable)


def write(method: str, variable: Any, value: Any) -> bool:
    """Writes the tensor that is given for a variable, and returns if one is.

    Args:
        method: `"assign"`, `"assign_add"` or `"assign_sub"`.
        variable: What an optimizer writes.
        value: What it is set to, or what is added or subtracted.
    """
    if not _is_tensor_here(variable):
        return False
    value = tf.cast(value, variable.dtype)
    if method == "assign_add":
        value = variable.value + value
    elif method == "assign_sub":
        value = variable.value - value
    keras_optimizers.stateless_scope().add_update((variable, value))
    return True


def _is_tensor_here(variable: Any) -> bool:
    scope = keras_optimizers.stateless_scope()
    return isinstance(scope, GivenTensors) and isinstance(
        variable, keras.Variable
    )
