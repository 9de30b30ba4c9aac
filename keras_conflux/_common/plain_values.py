"""Plain Python values as JSON, and their arrays beside it."""

import copy
import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._common.stored_arrays import Arrays


def encode(value: Any, arrays: Arrays, copies: bool = True) -> Any:
    """Returns what JSON can hold of a value.

    Args:
        value: Of Python's and NumPy's numbers, strings, arrays, tensors, and
            lists, tuples and dicts of them.
        arrays: Gets the arrays, under names that the result refers to.
        copies: Whether it gets copies of them.

    Raises:
        TypeError: If something else is in it.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        array = np.array(value) if copies else np.asarray(value)
        if array.dtype.hasobject:
            raise TypeError("An array of objects is no plain value.")
        name = f"value{len(arrays)}"
        arrays[name] = array
        if isinstance(value, np.ndarray):
            return {"array": name}
        is_tensor = isinstance(value, tf.Tensor)
        return {"tensor" if is_tensor else "scalar": name}
    if kind in (list, tuple):
        return {kind.__name__: [encode(each, arrays, copies) for each in value]}
    if kind is dict:
        items = [
            [encode(key, arrays, copies), encode(each, arrays, copies)]
            for key, each in value.items()
        ]
        return {"dict": items}
    raise TypeError(f"A {kind.__name__} is no plain value.")


def decode(value: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """Returns what `encode` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "array":
        return np.array(arrays[inside])
    if kind == "scalar":
        return arrays[inside][()]
    if kind == "tensor":
        return tf.constant(arrays[inside])
    if kind == "dict":
        return {decode(k, arrays): decode(v, arrays) for k, v in inside}
    items = [decode(each, arrays) for each in inside]
    return items if kind == "list" else tuple(items)


def is_plain(value: Any) -> bool:
    """Whether `encode` takes a value."""
    try:
        encode(value, {}, copies=False)
    except TypeError:
        return False
    return True


def attributes(owner: Any, largest: int | None = None) -> dict[str, Any]:
    """Returns copies of the attributes of an object that are plain values.

    Args:
        owner: The object.
        largest: Leaves out arrays of more bytes.
    """
    return {
        name: copy.deepcopy(value)
        for name, value in vars(owner).items()
        if largest is None or getattr(value, "nbytes", 0) <= largest
        if is_plain(value)
    }


def digest(value: Any) -> str:
    """Returns by what a plain value is known again, bit by bit."""
    arrays: Arrays = {}
    text = json.dumps(encode(value, arrays, copies=False))
    found = hashlib.sha256(text.encode())
    for array in arrays.values():
        found.update(f"{array.dtype} {array.shape}".encode())
        if array.nbytes:
            flat = np.ascontiguousarray(array).reshape(-1)
            found.update(flat.view(np.uint8).data)
    return found.hexdigest()


def size(value: Any) -> int:
    """Returns how many bytes the arrays in a plain value have."""
    arrays: Arrays = {}
    encode(value, arrays, copies=False)
    return sum(array.nbytes for array in arrays.values())
