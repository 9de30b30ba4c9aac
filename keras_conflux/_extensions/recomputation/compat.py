"""The insides of Keras and TensorFlow that recomputation needs."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from tensorflow.python.eager import record
from tensorflow.python.ops import while_v2

from keras_conflux._compat.private_names import module_if_any
from keras_conflux._graphs import resources
from keras_conflux._replication import state

symbolic_scope = module_if_any("keras.src.backend.common.symbolic_scope")
variables = module_if_any("keras.src.backend.common.variables")
_CALL_CONTEXT = "current_call_ctx"
_OF_LOOP_GRADIENTS: Any = getattr(while_v2, "_WhileBodyGradFuncGraph", ())


def asks_for_shapes() -> bool:
    """Whether Keras calls a layer for the shapes of its outputs."""
    return symbolic_scope.in_symbolic_scope()


def mode_of(operation: Any) -> str | None:
    """Returns the mode of the `keras.RematScope` that a layer was made in."""
    mode = getattr(operation, "_remat_mode", None)
    return mode.mode if mode else None


def value_of(variable: keras.Variable) -> tf.Tensor | None:
    """Returns the value of a variable, in a `keras.StatelessScope` as well."""
    value: Any = None
    if backend.in_stateless_scope():
        scope: Any = backend.get_stateless_scope()
        value = scope.get_current_value(variable)
    if value is None:
        value = variable._value
    return None if value is None else tf.identity(tf.convert_to_tensor(value))


def put_value(variable: keras.Variable, value: tf.Tensor) -> None:
    """Gives a variable a value in the `keras.StatelessScope` that is open."""
    scope: Any = backend.get_stateless_scope()
    scope.add_update((variable, value))


def as_written(variable: keras.Variable, value: Any) -> Any:
    """Returns the result of `variable.assign(value)`."""
    return variable._convert_to_tensor(value, dtype=variable._dtype)


def variables_watched() -> Any:
    """Returns a scope whose `watched_variables` are those read inside."""
    return record.VariableWatcher()


def is_in_parts(variable: tf.Variable) -> bool:
    """Whether a variable lies in parts, or is one of these."""
    container = resources.container_of(variable)
    return state.is_in_parts(variable) or state.is_in_parts(container)


def differentiates_a_loop() -> bool:
    """Whether the gradient of a loop of TensorFlow is being traced."""
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        if isinstance(graph, _OF_LOOP_GRADIENTS):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


class PythonState:
    """The Python state of a call: scopes of Keras, attributes of layers.

    Cells of recurrent layers keep masks of their dropout as attributes.

    Args:
        owner: The layer that is called, if it is one.
    """

    def __init__(self, owner: Any) -> None:
        self._autocast = variables.get_autocast_scope()
        self._context = _call_context()
        self._in_context = vars(self._context).copy() if self._context else {}
        layers = [] if owner is None else owner._flatten_layers()
        self._attributes = [(each, vars(each).copy()) for each in layers]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Holds the same state inside of it, and the present one afterwards."""
        now = [(each, vars(each).copy()) for each, _ in self._attributes]
        context = _call_context()
        _set_attributes(self._attributes)
        _set_call_context(self._copied_context())
        autocast = contextlib.nullcontext()
        if self._autocast is not None:
            autocast = variables.AutocastScope(self._autocast.dtype)
        try:
            with autocast:
                yield
        finally:
            _set_call_context(context)
            _set_attributes(now)

    def _copied_context(self) -> Any:
        if self._context is None:
            return None
        copied = object.__new__(type(self._context))
        vars(copied).update(self._in_context)
        return copied


def _set_attributes(attributes: list[tuple[Any, dict[str, Any]]]) -> None:
    for layer, values in attributes:
        # Not by `setattr`, with which Keras would track them anew.
        vars(layer).clear()
        vars(layer).update(values)


def _call_context() -> Any:
    return global_state.get_global_attribute(_CALL_CONTEXT)


def _set_call_context(context: Any) -> None:
    global_state.set_global_attribute(_CALL_CONTEXT, context)


def has_own_remat(remat: Callable) -> bool:
    """Whether Keras has another `remat` than the one which fails.

    Args:
        remat: Keras' function, before it is replaced.
    """
    return "recompute_grad" not in remat.__code__.co_names
