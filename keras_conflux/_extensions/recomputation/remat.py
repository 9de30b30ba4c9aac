"""`keras.remat` for TensorFlow, which trains as the same program without it."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._compat import patching
from keras_conflux._extensions.recomputation import compat
from keras_conflux._extensions.recomputation import regions


def remat(_: Callable, f: Callable) -> Callable:
    """Returns a function that is computed again for its gradient.

    Eagerly, where nothing is kept of a graph, and where Keras asks for shapes,
    it only calls `f`: a function, a layer, or the `call` of one.
    """
    patching.begin()

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        is_symbolic = compat.symbolic_scope.in_symbolic_scope()
        if tf.executing_eagerly() or is_symbolic or _is_done_by_its_layers(f):
            return f(*args, **kwargs)
        return regions.traced(_name(f), f, args, kwargs)

    return call


def choose(
    original: Callable, layer: Any, call: Callable, *args: Any, **kwargs: Any
) -> Callable:
    """Returns the function to call in place of a layer, by its mode.

    Keras' method would ask for shapes with tensors.
    """
    mode = compat.scope_of(layer).mode
    # The activations of LSTM and GRU belong to their cells.
    of_cells = isinstance(getattr(type(layer), "activation", None), property)
    if (mode == "activations" and of_cells) or (
        mode == "larger_than" and isinstance(layer, keras.Model)
    ):
        return call
    symbolic: Any = keras.tree.map_structure(_symbolic, (args, kwargs))
    args, kwargs = symbolic
    return original(layer, call, *args, **kwargs)


def build(original: Callable, model: Any, **given: Any) -> None:
    """Warns of a scope around `fit`, and of names that no layer has."""
    original(model, **given)
    if "iterator" not in given or not model.built:  # as in `train_on_batch`
        return
    layers = keras_models.all_layers(model)
    names = [each.name for each in layers]
    scopes = [compat.scope_of(each) for each in layers]
    unknown = {x for scope in scopes for x in scope.layer_names} - {*names}
    around = compat.scope_of(keras.layers.Identity(name="in_scope"))
    if unknown:
        warn(
            f"{model.name}: no layer has a name that a `keras.RematScope` "
            f"lists: {sorted(unknown)}. Write names of these: {names[:20]}."
        )
    elif around.mode and not any(scope.mode for scope in scopes):
        warn(
            f"{model.name}: a `keras.RematScope` around `fit` changes nothing. "
            "Write it around the lines that make the layers."
        )


def _symbolic(value: Any) -> Any:
    if not isinstance(value, tf.Tensor) or value.shape.rank is None:
        return value
    return keras.KerasTensor(tuple(value.shape), value.dtype.name)


def _is_done_by_its_layers(f: Callable) -> bool:
    """Whether this is a model whose layers are computed again, each alone."""
    owner = getattr(f, "__self__", None)
    named = compat.scope_of(owner).mode in (None, "list_of_layers")
    return isinstance(owner, keras.Model) and not named


def _name(f: Callable) -> str:
    owner = getattr(f, "__self__", f)
    if isinstance(owner, keras.layers.Layer):
        return f"The layer {owner.name!r}"
    return f"The function {getattr(f, '__name__', f)!r} of `keras.remat`"
