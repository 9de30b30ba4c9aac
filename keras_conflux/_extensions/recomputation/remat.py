"""`keras.remat` for TensorFlow, which trains as the same program without it.

The result of a call gets another gradient: one for which the call is run again,
from the state of the first run, so that nothing of the first run has to be kept
until then.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._compat import patching
from keras_conflux._extensions.recomputation import compat
from keras_conflux._extensions.recomputation import runs
from keras_conflux._extensions.recomputation import unrepeatable

_custom_gradient: Any = tf.custom_gradient


def remat(original: Callable, f: Callable) -> Callable:
    """Returns a function that is computed again for its gradient.

    Args:
        original: Keras' function, which is not asked.
        f: A function, a layer, or the `call` of one.

    Returns:
        A function that calls `f`. Eagerly, where nothing is kept of a graph, in
        a call that is computed again as a whole, and where Keras asks for
        shapes, it does nothing else.
    """
    del original
    patching.begin()

    @functools.wraps(f, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        if (
            tf.executing_eagerly()
            or compat.asks_for_shapes()
            or runs.current() is not None
            or _is_done_by_its_layers(f)
        ):
            return f(*args, **kwargs)
        return _Call(f, args, kwargs).result()

    return call


def choose(
    original: Callable, layer: Any, call: Callable, *args: Any, **kwargs: Any
) -> Callable:
    """Returns the function to call in place of a layer, by its mode.

    Args:
        original: Keras' method, which asks for shapes with tensors.
        layer: A layer.
        call: The function that computes it.
        *args: Positional arguments of the call.
        **kwargs: Keyword arguments of the call.
    """
    mode = compat.mode_of(layer)
    kind = type(layer)
    if mode == "activations" and isinstance(
        getattr(kind, "activation", None), property
    ):
        return call  # the activations of LSTM and GRU belong to their cells
    if mode == "larger_than" and isinstance(layer, keras.Model):
        return call
    symbolic: Any = keras.tree.map_structure(_symbolic, (args, kwargs))
    args, kwargs = symbolic
    return original(layer, call, *args, **kwargs)


def fit(original: Callable, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Warns of a scope around `fit` in which no layer was made."""
    if (
        model.built
        and compat.mode_of(keras.layers.Identity(name="in_scope"))
        and not any(map(compat.mode_of, keras_models.all_layers(model)))
    ):
        warn(
            f"{model.name}: a `keras.RematScope` around `fit` changes nothing. "
            "Write it around the lines that make the layers."
        )
    return original(model, *args, **kwargs)


def _symbolic(value: Any) -> Any:
    if not _is_tensor(value) or value.shape.rank is None:
        return value
    return keras.KerasTensor(tuple(value.shape), value.dtype.name)


def _is_done_by_its_layers(f: Callable) -> bool:
    """Whether this is a model whose layers are computed again, each alone."""
    owner = getattr(f, "__self__", None)
    named = compat.mode_of(owner) in (None, "list_of_layers")
    return isinstance(owner, keras.Model) and not named


class _Call:
    """One call of a function that is computed again for its gradient.

    Args:
        f: The function.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """

    def __init__(self, f: Callable, args: Any, kwargs: Any) -> None:
        owner = f if isinstance(f, keras.layers.Layer) else None
        owner = getattr(f, "__self__", owner)
        owner = owner if isinstance(owner, keras.layers.Layer) else None
        self._f = f
        self._name = _name(f, owner)
        self._given = args, kwargs
        self._leaves = keras.tree.flatten(self._given)
        self._floats = [*filter(_is_float, self._leaves)]
        self._first = runs.FirstRun(self._name, owner)

    def result(self) -> Any:
        """Returns the function's result, with the other gradient."""
        args, kwargs = self._given
        start = len(self._first.graph.get_operations())
        # It stays known to tapes: losses that it adds, and tensors that it
        # hands out in other ways than as a result, have their gradients so.
        with compat.variables_watched() as watcher, self._first.running():
            result = self._f(*args, **kwargs)
        self._variables = [
            each
            for each in watcher.watched_variables()
            if not compat.is_in_parts(each)
        ]
        self._captured = self._captured_since(start)
        flat = keras.tree.flatten(result)
        self._places = [i for i, x in enumerate(flat) if _is_float(x)]
        floats = [flat[i] for i in self._places]
        if not floats or not self._first.in_step.is_of_samples(floats):
            return result
        attached = self._attach(floats)
        for place, tensor in zip(self._places, attached, strict=True):
            keras_models.copy_mask(flat[place], tensor)
            self._first.in_step.mark_alike(flat[place], tensor)
            flat[place] = tensor
        self._first.in_step.trust(attached[0].op)
        return keras.tree.pack_sequence_as(result, flat)

    def _captured_since(self, start: int) -> list[tf.Tensor]:
        """Returns tensors of which the call is differentiated besides inputs.

        These are its captures, other than arguments, and the values of
        variables that are trained.
        """
        new = self._first.graph.get_operations()[start:]
        ids = set(map(id, new))
        found = {id(each): each for each in self._first.trained}
        for operation in new:
            if operation.type == "Placeholder":  # of a graph around this one
                found.update((id(x), x) for x in operation.outputs)
            found.update(
                (id(x), x) for x in operation.inputs if id(x.op) not in ids
            )
        held = [value for _, value in self._first.before.values()]
        for each in [*self._leaves, *held, *self._first.whole.values()]:
            if all(each is not x for x in self._first.trained):
                found.pop(id(each), None)
        return [*filter(_is_float, found.values())]

    def _attach(self, results: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the results, whose gradient comes from a second run."""

        @_custom_gradient
        def attach(*tensors: tf.Tensor) -> tuple[list[tf.Tensor], Callable]:
            for variable in self._variables:
                tf.convert_to_tensor(variable)  # so that it is asked for

            def gradient(*upstream: Any, variables: Any = ()) -> Any:
                variables = [*variables]
                found = self._gradients(upstream, variables)
                by_tensors = found[: len(tensors)]
                if variables:
                    return by_tensors, found[len(tensors) :]
                return by_tensors

            return [tf.identity(each) for each in results], gradient

        return attach(*self._floats, *self._captured)

    def _gradients(self, upstream: Sequence[Any], variables: list) -> list:
        """Returns the derivatives by inputs, captured tensors and variables."""
        self._refuse_in_loops(variables)
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            inputs = [tf.identity(x) for x in self._floats]
            sources = [*inputs, *self._captured, *variables]
            for source in sources:
                tape.watch(source)
            results = self._second_run(inputs, _one_that_depends_on(upstream))
        with self._first.in_step.differentiating():
            found = tape.gradient(
                results, sources, output_gradients=list(upstream)
            )
        return _together(found)

    def _second_run(self, inputs: list[tf.Tensor], one: tf.Tensor) -> list:
        """Runs the call a second time, on the same numbers.

        Args:
            inputs: The inputs that are differentiated.
            one: A factor that is known in the backward pass, and not before.
                Without it XLA would find that all is computed already.
        """
        differentiated = iter(inputs)
        leaves = []
        for leaf in self._leaves:
            new = next(differentiated) if _is_float(leaf) else leaf
            if _is_number(leaf):
                new *= tf.cast(one, leaf.dtype)
                keras_models.copy_mask(leaf, new)
                self._first.in_step.mark_alike(leaf, new)
            leaves.append(new)
        given: Any = keras.tree.pack_sequence_as(self._given, leaves)
        args, kwargs = given
        graph: Any = tf.compat.v1.get_default_graph()
        start = len(graph.get_operations())
        with self._first.second_run():
            flat = keras.tree.flatten(self._f(*args, **kwargs))
        unrepeatable.refuse(graph.get_operations()[start:], self._name)
        return [flat[place] for place in self._places]

    def _refuse_in_loops(self, variables: list) -> None:
        has_state = variables or self._first.before
        if has_state and compat.differentiates_a_loop():
            raise NotImplementedError(
                f"{self._name} is called in a loop of TensorFlow that is "
                "differentiated from outside, where its variables cannot be "
                "read again. Leave it out of `keras.RematScope`, and make the "
                "layer that has the loop inside of the scope instead."
            )


def _name(f: Callable, owner: keras.layers.Layer | None) -> str:
    if owner is not None:
        return f"The layer {owner.name!r}"
    return f"The function {getattr(f, '__name__', f)!r} of `keras.remat`"


def _together(found: list) -> list:
    """Returns derivatives of which none is known before all of them are.

    So no weight is updated that another one of them still needs.
    """
    parts = tf.nest.flatten(found, expand_composites=True)
    with tf.control_dependencies([x for x in parts if x is not None]):
        parts = [None if x is None else tf.identity(x) for x in parts]
    return tf.nest.pack_sequence_as(found, parts, expand_composites=True)


def _one_that_depends_on(upstream: Sequence[Any]) -> tf.Tensor:
    first = tf.reshape(tf.convert_to_tensor(upstream[0]), [-1])[:1]
    if first.dtype.is_complex:
        first = tf.math.real(first)
    flag = tf.cast(tf.reduce_max(first), tf.bool)
    return tf.where(flag == flag, 1.0, float("nan"))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tf.Tensor)


def _is_float(value: Any) -> bool:
    return _is_tensor(value) and (
        value.dtype.is_floating or value.dtype.is_complex
    )


def _is_number(value: Any) -> bool:
    return _is_float(value) or (_is_tensor(value) and value.dtype.is_integer)
