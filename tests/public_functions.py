"""What is public of Keras and TensorFlow, and calls of it.

Arguments are guessed: a function is called with each kind of leaf in place of
those of its arguments of which no name tells what they are. Where that does not
do, a table has a call.
"""

import functools
import inspect
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from function_calls import CALLS
from function_calls import LAYERS
from function_calls import LOSSES
from function_calls import METRICS
from function_calls import NAMED
from function_calls import NO_OPERATIONS
from function_calls import Given
from function_calls import Leaf

MODULES = {
    "keras.ops": keras.ops,
    "keras.activations": keras.activations,
    "keras.random": keras.random,
    "tf": tf,
    "tf.math": tf.math,
    "tf.math.special": tf.math.special,
    "tf.bitwise": tf.bitwise,
    "tf.linalg": tf.linalg,
    "tf.nn": tf.nn,
    "tf.image": tf.image,
    "tf.sparse": tf.sparse,
    "tf.ragged": tf.ragged,
    "tf.signal": tf.signal,
    "tf.strings": tf.strings,
    "tf.random": tf.random,
    "tf.quantization": tf.quantization,
}
TEMPLATES = {
    "reals": (
        *("floats", "images", "matrices", "steps", "volumes", "vector"),
        *("waves", "doubles", "boxes"),
    ),
    "integers": ("ints", "labels", "bytes", "longs", "bools"),
    "texts": ("strings", "words"),
    "complex": ("complex", "complex matrices", "complex images"),
    "ragged": ("ragged",),
    "sparse": ("sparse",),
}
"""Leaves to be tried. Of each family, two that do are enough."""
ENOUGH = 2
OF_LAYERS = (
    *("floats", "steps", "images", "volumes", "films", "tokens", "strings"),
    *("waves", "matrices"),
)
Call = Callable[[Any], Any]


def functions() -> dict[str, list[list[Call]]]:
    """Returns calls of all public functions, by the functions' names.

    A function that has several names is called by the first one. Its calls come
    in families, of each of which `ENOUGH` are to be traced.
    """
    found: dict[str, list[list[Call]]] = {}
    seen: set[Any] = set()
    for path, module in MODULES.items():
        for name in sorted(dir(module)):
            function = getattr(module, name)
            if not _is_function(name, function) or function in seen:
                continue
            seen.add(function)
            full = f"{path}.{name}"
            if full not in NO_OPERATIONS:
                found[full] = list(
                    _named_calls(function, CALLS[full])
                    if full in CALLS
                    else _guesses(function)
                )
    return found


def _is_function(name: str, found: Any) -> bool:
    is_public = not name.startswith("_")
    return is_public and callable(found) and not inspect.isclass(found)


def _named_calls(function: Any, given: list[Given]) -> Iterator[list[Call]]:
    for each in given:
        yield [functools.partial(_called, function, each)]


def _called(function: Any, given: Given, t: Any) -> Any:
    return function(*_filled(given.args, t), **_filled(given.kwargs, t))


def _filled(arguments: Any, t: Any) -> Any:
    """Returns arguments with leaves where their names were."""
    return tf.nest.map_structure(
        lambda x: t(x) if isinstance(x, Leaf) else x, arguments
    )


def _guesses(function: Any) -> Iterator[list[Call]]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return
    required = [each for each in parameters if _is_required(each)]
    if all(each.name in NAMED for each in required):
        yield [_guess(function, required, "floats")]
        return
    for family in TEMPLATES.values():
        yield [_guess(function, required, template) for template in family]


def _guess(function: Any, required: list[Any], template: str) -> Call:
    def call(t: Any) -> Any:
        given = {
            x.name: _filled(NAMED.get(x.name, Leaf(template)), t)
            for x in required
        }
        positional = [
            given.pop(x.name) for x in required if x.kind is not x.KEYWORD_ONLY
        ]
        return function(*positional, **given)

    return call


def _is_required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )


def made(kind: Any, makers: dict[str, Any]) -> Any:
    """Returns an object of a class of Keras, with arguments by their names."""
    if kind.__name__ in makers:
        return makers[kind.__name__]()
    parameters = inspect.signature(kind.__init__).parameters.values()
    required = [x for x in parameters if _is_required(x) and x.name != "self"]
    return kind(**{each.name: NAMED[each.name] for each in required})


def classes(module: Any, base: Any) -> dict[str, Any]:
    """Returns the public classes of a module, each by its own name."""
    return {
        found.__name__: found
        for _, found in sorted(vars(module).items())
        if inspect.isclass(found) and issubclass(found, base)
    }


def layers() -> dict[str, Any]:
    return classes(keras.layers, keras.layers.Layer)


def losses() -> dict[str, Any]:
    return classes(keras.losses, keras.losses.Loss)


def metrics() -> dict[str, Any]:
    return classes(keras.metrics, keras.metrics.Metric)


def layer(kind: Any) -> Any:
    return made(kind, {k: v for k, (v, _) in LAYERS.items() if v})


def loss(kind: Any) -> Any:
    return made(kind, LOSSES)


def metric(kind: Any) -> Any:
    return made(kind, METRICS)


def calls_of_layer(kind: Any) -> list[Call]:
    """Returns what may be given to a layer."""
    _, given = LAYERS.get(kind.__name__, (None, ()))
    single = [lambda t, name=name: (t(name),) for name in OF_LAYERS]
    several = [
        lambda t, name=name: ([t(name), t(name)],)
        for name in ("floats", "steps", "images")
    ]
    return [*given, *single, *several]


TARGETS = (
    lambda t: (t.floats, t.floats),
    lambda t: (t.column, t.column),
    lambda t: (t.labels, t.floats),
    lambda t: (t.ints, t.floats),
    lambda t: (t.tokens, t.steps),
    lambda t: (t.images, t.images),
    lambda t: (t.floats,),
)
"""What may be given to a loss or a metric."""
