"""Optimizers read and write tensors in place of variables."""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._replication import steps


def overwrite(variable: tf.Variable, value: tf.Tensor) -> None:
    """Assigns. The other work of `assign` takes longer to trace."""
    tf.raw_ops.AssignVariableOp(resource=variable.handle, value=value)


def update_rest(
    original: Callable,
    optimizer: Any,
    rest: list[tuple[Any, Any]],
    learning_rate: Any,
) -> None:
    """Has an optimizer update the variables that are left."""
    if rest:
        grads, variables = map(list, zip(*rest, strict=True))
        original(optimizer, grads, variables, learning_rate)


class GivenTensors(keras.StatelessScope):
    """In it, an optimizer reads and writes tensors in place of variables.

    They may have other shapes than the variables, as parts of them do. If it
    `reads_late`, a value that is kept is the one that was written last when it
    is used, as for a variable of TensorFlow.
    """

    def __init__(
        self,
        known: Sequence[tuple[keras.Variable, tf.Tensor]],
        reads_late: bool = False,
    ) -> None:
        super().__init__()
        self.values = {id(variable): value for variable, value in known}
        self._reads_late = reads_late

    def get_current_value(self, variable: keras.Variable) -> Any:
        """See `keras.StatelessScope`."""
        value = self.values.get(id(variable))
        if value is None or not self._reads_late:
            return value
        return _Late(self.values, id(variable))

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """See `keras.StatelessScope`."""
        variable, value = update
        self.values[id(variable)] = value


class _Late:
    """A value that is read when it is used."""

    def __init__(self, values: dict[int, tf.Tensor], key: int) -> None:
        self._values = values
        self._key = key

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the value."""
        return self._values[self._key].dtype

    def __tf_tensor__(
        self, dtype: tf.DType | None = None, name: str | None = None
    ) -> tf.Tensor:
        return tf.convert_to_tensor(self._values[self._key], dtype, name=name)


class WritesOthers(Exception):
    """An update writes something else than the variables that it was given."""


class SharedUpdate:
    """An update of an optimizer, as a function of tensors.

    In a program of XLA it is traced once for all tensors of one shape.
    """

    def __init__(self, optimizer: Any, learning_rate: Any) -> None:
        self._optimizer = optimizer
        self._learning_rate = learning_rate
        self._variables: Sequence[keras.Variable] = []
        self._function = tf.function(
            self._updated,
            autograph=False,
            experimental_attributes={"_noinline": True},
        )

    def of(
        self,
        gradient: tf.Tensor,
        variables: Sequence[keras.Variable],
        values: list[tf.Tensor],
        inline: bool = False,
    ) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Returns the variables that the update changes, with new values.

        The updated variable, of which `gradient` is, comes first, and then its
        own optimizer state. Their values may have any shape that the optimizer
        can update. It raises `WritesOthers` if it writes something else.
        """
        self._variables = variables
        updated: Any = self._updated
        if steps.in_xla() and not inline:
            updated = self._function.get_concrete_function(gradient, values)
        new = zip(variables, updated(gradient, values), strict=True)
        return [(each, value) for each, value in new if value is not None]

    def _updated(
        self, gradient: tf.Tensor, values: list[tf.Tensor]
    ) -> list[tf.Tensor | None]:
        known = [*zip(self._variables, values, strict=True)]
        late = keras_optimizers.reads_late(self._optimizer)
        with GivenTensors(known, late) as scope:
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
    """Returns the key by which an optimizer knows a variable.

    Keras asks the `value` for its id, which a tensor does not have.
    """
    if _is_tensor_here(variable):
        variable = keras_variables.backing(variable)
    return original(optimizer, variable)


def write(method: str, variable: Any, value: Any) -> bool:
    """Writes the tensor that is given for a variable, and returns if one is.

    The method is `"assign"`, `"assign_add"` or `"assign_sub"`.
    """
    if not _is_tensor_here(variable):
        return False
    value = tf.cast(value, variable.dtype)
    if method == "assign_add":
        value = tf.convert_to_tensor(variable) + value
    elif method == "assign_sub":
        value = tf.convert_to_tensor(variable) - value
    keras_optimizers.stateless_scope().add_update((variable, value))
    return True


def _is_tensor_here(variable: Any) -> bool:
    is_given = isinstance(keras_optimizers.stateless_scope(), GivenTensors)
    return is_given and isinstance(variable, keras.Variable)
