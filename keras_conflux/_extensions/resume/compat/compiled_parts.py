"""The metrics and losses of `compile`, which Keras builds in the first step."""

import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import keras
from keras.src import backend

_LARGEST = 2**16
"""How long an axis may be that no weight has, as metrics may have one."""


def note_specs(original: Callable, part: Any, y_true: Any, y_pred: Any) -> None:
    """Notes the shapes for which one of them is built."""
    original(part, y_true, y_pred)
    given = [y_true, y_pred]
    if all(map(_is_known, keras.tree.flatten(given))):
        # As text, since Keras would track a list of a tracked object.
        part.conflux_built_for = json.dumps(
            keras.tree.map_structure(_described, given)
        )


def _is_known(tensor: Any) -> bool:
    if tensor is None:  # an output that has no targets
        return True
    has_rank = getattr(getattr(tensor, "shape", 0), "rank", 0) is not None
    return hasattr(tensor, "dtype") and has_rank


def built_for(model: keras.Model) -> dict[str, str]:
    """Returns the shapes for which they were built."""
    return {
        name: part.conflux_built_for
        for name, part in _parts(model).items()
        if part.built and hasattr(part, "conflux_built_for")
    }


def build(model: keras.Model, saved: dict[str, str]) -> None:
    """Builds unbuilt parts for the saved result of `built_for`."""
    sizes = itertools.chain(*(weight.shape for weight in model.weights))
    symbolic = functools.partial(_symbolic, largest=max([_LARGEST, *sizes]))
    for name, part in _parts(model).items():
        if not part.built and name in saved:
            described = json.loads(saved[name])
            given: Any = keras.tree.map_structure(symbolic, described)
            is_loss = name == "_compile_loss"
            backend.compute_output_spec(
                part.call if is_loss else part.update_state, *given
            )


def _parts(model: keras.Model) -> dict[str, Any]:
    names = ("_compile_metrics", "_compile_loss")
    found = {name: getattr(model, name, None) for name in names}
    return {name: each for name, each in found.items() if each is not None}


def metrics_of(model: keras.Model) -> list[keras.Metric]:
    """Returns the metrics and losses of `compile`, if they are built."""
    return [x for each in _parts(model).values() for x in each.metrics]


def _described(tensor: Any) -> str:
    if tensor is None:
        return ""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    return " ".join([dtype, *map(str, tensor.shape)])


def _symbolic(described: str, largest: int) -> keras.KerasTensor | None:
    if not described:
        return None
    dtype, *dims = described.split()
    shape = [None if n == "None" else int(n) for n in dims]
    if max([1, *filter(None, shape[1:])]) > largest:
        raise ValueError(f"it has a metric for the shape {shape}")
    return keras.KerasTensor(shape, dtype)
