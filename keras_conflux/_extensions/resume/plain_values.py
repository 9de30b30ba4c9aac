"""Plain Python values as JSON, and their arrays beside it."""

import collections
import dataclasses
import functools
import hashlib
import io
import json
import pathlib
import random
import zlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._extensions.resume import stored_arrays

_FACTORIES = {
    kind.__name__: kind
    for kind in (int, float, str, bool, list, dict, set, collections.Counter)
}
"""The types of a `defaultdict`'s values."""


@dataclasses.dataclass(frozen=True)
class State:
    """The state of an object, as a plain value in the place of the object."""

    value: Any


def encode(value: Any, arrays: stored_arrays.Arrays) -> Any:
    """Returns a plain value as JSON can hold it, or raises `TypeError`.

    Its arrays, no copies of them, are put beside, by names in the result.
    """
    kind = type(value)
    # Python refuses to write integers of thousands of digits.
    is_int = kind is int and value.bit_length() < 2**13
    if value is None or is_int or kind in (bool, float, str):
        return value
    if kind is list:
        return [encode(each, arrays) for each in value]
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        return _encoded_array(value, arrays)
    if kind not in _SIMPLER:
        raise TypeError(f"A {kind.__name__} is no plain value.")
    simpler, _ = _SIMPLER[kind]
    return {kind.__name__: encode(simpler(value), arrays)}


def _encoded_array(value: Any, arrays: stored_arrays.Arrays) -> dict[str, str]:
    array = np.asarray(value)
    is_own = type(value) in (np.ndarray, np.memmap)
    if array.dtype.hasobject or (isinstance(value, np.ndarray) and not is_own):
        raise TypeError("An array of objects or of a class is no plain value.")
    name = f"value{len(arrays)}"
    arrays[name] = array
    if isinstance(value, np.ndarray):
        return {"array": name}
    is_tensor = isinstance(value, tf.Tensor)
    return {"tensor" if is_tensor else "scalar": name}


def decode(value: Any, arrays: stored_arrays.Arrays) -> Any:
    """Returns the value that `encode` was given. It takes the arrays away."""
    if isinstance(value, list):
        return _checked([decode(each, arrays) for each in value])
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind in _OF_ARRAYS:
        return _OF_ARRAYS[kind](arrays.pop(inside))
    return _checked(_BACK[kind](decode(inside, arrays)))


def _checked(value: Any) -> Any:
    """Refuses a generator's place from which NumPy would read other memory."""
    state = value
    if isinstance(value, tuple | list) and len(value) > 2:
        name, _, place, *_ = value
        is_name = isinstance(name, str | np.ndarray)
        if is_name and str(name).strip("[]'") == "MT19937":
            state = {"bit_generator": name, "state": {"pos": place}}
    if isinstance(state, dict) and "bit_generator" in state:
        inner: Any = state.get("state")
        for held, name, end in ((state, "buffer_pos", 4), (inner, "pos", 624)):
            place = held.get(name, 0) if isinstance(held, dict) else held or 0
            is_number = isinstance(place, int | np.integer)
            if not is_number or not 0 <= place <= end:
                raise ValueError(f"its generator is at {place!r}")
    return value


def to_bytes(value: Any) -> bytes:
    """Returns a plain value as the content of a file of arrays."""
    arrays: stored_arrays.Arrays = {}
    file = io.BytesIO()
    stored_arrays.write(file, encode(value, arrays), arrays)
    return file.getvalue()


def from_bytes(content: bytes) -> Any:
    """Undoes `to_bytes`."""
    return decode(*stored_arrays.read(io.BytesIO(content)))


def _items(value: Mapping) -> list[list[Any]]:
    return [[key, each] for key, each in value.items()]


def _default_and_items(value: collections.defaultdict) -> list[Any]:
    factory: Any = value.default_factory
    if factory not in _FACTORIES.values():
        raise TypeError(f"A defaultdict of {factory} is no plain value.")
    return [factory.__name__, _items(value)]


_SIMPLER: dict[type, tuple[Callable, Callable]] = {
    tuple: (list, tuple),
    set: (lambda x: sorted(x, key=repr), set),
    frozenset: (lambda x: sorted(x, key=repr), frozenset),
    dict: (_items, dict),
    collections.OrderedDict: (_items, collections.OrderedDict),
    collections.Counter: (_items, lambda x: collections.Counter(dict(x))),
    collections.defaultdict: (
        _default_and_items,
        lambda x: collections.defaultdict(_FACTORIES[x[0]], x[1]),
    ),
    collections.deque: (
        lambda x: [list(x), x.maxlen],
        lambda x: collections.deque(*x),
    ),
    bytes: (lambda x: x.decode("latin-1"), lambda x: x.encode("latin-1")),
    bytearray: (bytes, bytearray),
    type(pathlib.Path()): (str, pathlib.Path),
    complex: (lambda x: [x.real, x.imag], lambda x: complex(*x)),
    State: (lambda x: x.value, State),
}
"""How a value becomes a simpler one, and how it is made of that again."""
_BACK = {kind.__name__: back for kind, (_, back) in _SIMPLER.items()}
_OF_ARRAYS: dict[str, Callable[[np.ndarray], Any]] = {
    "array": lambda array: array,
    "scalar": lambda array: array[()],
    "tensor": tf.constant,
}


def is_plain(value: Any) -> bool:
    """Whether `encode` takes a value."""
    try:
        encode(value, {})
    except TypeError:
        return False
    return True


def told_state(owner: Any) -> dict[str, Any]:
    """Returns the `state_dict` of an object, if it is plain. It is no copy."""
    state = dict(owner.state_dict())
    assert_plain(f"`{type(owner).__name__}.state_dict()`", state)
    return state


def assert_plain(name: str, value: Any) -> None:
    """Raises `TypeError` that names the part of a value that is not plain."""
    if is_plain(value):
        return
    parts = dict(enumerate(value)) if type(value) in (list, tuple) else value
    if isinstance(parts, dict):
        for key, each in parts.items():
            assert_plain(f"{name}[{key!r}]", each)
    raise TypeError(
        f"{name} is no plain value. Expected: numbers, strings, arrays, and "
        f"lists, tuples and dicts of them. Received: a {type(value).__name__}. "
        "Of a NumPy generator, take `generator.bit_generator.state`, and of a "
        "value of each device one, as in `float(losses[0])`."
    )


class Form:
    """The form of a plain value that a checkpoint's value has to keep."""

    def __init__(self, value: Any) -> None:
        self.kind = _kind(value)
        self.texts = frozenset(_texts(value))
        """All that are in it, also as keys."""

    def admits(self, value: Any, any_words: bool = False) -> bool:
        """Whether a value may be put in the place of this one.

        It is of the same kind, where one of both may be `None`. Its texts are
        among those that are here. A container without any may get words, such
        as names of logs, or with `any_words` all texts.
        """
        other = Form(value)
        kinds, new = {self.kind, other.kind}, other.texts - self.texts
        if len(kinds) > 1 and ("NoneType" not in kinds or _STATE in kinds):
            return False
        are_words = all(isinstance(x, str) and x.isidentifier() for x in new)
        may_be = any_words or (are_words and not self.texts)
        return not new or (other.kind != _TEXT and may_be)


_TEXT, _STATE = "text", State.__name__


def _kind(value: Any) -> str:
    if isinstance(value, str | bytes | bytearray | pathlib.Path):
        return _TEXT
    if isinstance(value, bool | int | float | complex):
        return "number"
    if isinstance(value, np.ndarray | np.generic | tf.Tensor):
        is_text = np.asarray(value).dtype.kind in "OSU"
        return "array" if np.ndim(value) else _TEXT if is_text else "number"
    return type(value).__name__


def _texts(value: Any) -> Iterator[str | bytes]:
    if isinstance(value, str | bytes | bytearray):
        yield bytes(value) if isinstance(value, bytearray) else value
    elif isinstance(value, pathlib.Path):
        yield str(value)
    elif isinstance(value, np.ndarray | np.generic):
        if value.dtype.kind in "SU" or value.dtype.names:
            yield from _texts(value.tolist())
    elif isinstance(value, State):
        yield from _texts(value.value)
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Iterable) and not isinstance(value, tf.Tensor):
        for each in value:
            yield from _texts(each)


def digest(value: Any) -> str:
    """Returns a digest by which a plain value is known again, bit by bit."""
    arrays: stored_arrays.Arrays = {}
    text = json.dumps(encode(value, arrays))
    found = hashlib.sha256(text.encode())
    for array in arrays.values():
        found.update(f"{array.dtype} {array.shape}".encode())
        if array.nbytes:
            flat = np.ascontiguousarray(array).reshape(-1)
            found.update(flat.view(np.uint8).data)
    return found.hexdigest()


_LARGE = 8 * 2**20
"""Of arrays of more bytes, mostly samples, a checksum is enough."""


def mark(value: Any) -> Any:
    """Returns a mark that shows, within a process, that a value changes."""
    if not isinstance(value, np.ndarray) or value.nbytes <= _LARGE:
        return digest(value)
    seen = value.shape, value.dtype.str
    if isinstance(value, np.memmap) or not value.flags.writeable:
        return *seen, id(value)
    flat = np.ascontiguousarray(value).reshape(-1)
    return *seen, zlib.crc32(flat.view(np.uint8).data)


def access(value: Any) -> tuple[Callable[[], Any], Callable] | None:
    """Returns what reads and what sets the state of an object that has one."""
    if isinstance(value, keras.random.SeedGenerator | tf.random.Generator):
        value = value.state
    if isinstance(value, keras.Variable | tf.Variable):
        return value.numpy, value.assign
    if isinstance(value, np.random.Generator):
        return _access_of_bits(value.bit_generator)
    if isinstance(value, np.random.RandomState):
        return functools.partial(value.get_state, legacy=False), value.set_state
    is_of_system = isinstance(value, random.SystemRandom)
    if isinstance(value, random.Random) and not is_of_system:
        return value.getstate, value.setstate
    return None


def _access_of_bits(bits: np.random.BitGenerator) -> tuple[Callable, Callable]:
    """Returns the same of a generator, which counts those that it spawns."""

    def set_state(told: Any) -> None:
        bits.state, seeds = told
        if seeds and isinstance(bits.__getstate__(), tuple):  # as in NumPy 2
            seeds |= {"pool_size": bits.seed_seq.state["pool_size"]}
            bits.__setstate__((told[0], np.random.SeedSequence(**seeds)))

    return lambda: [bits.state, getattr(bits.seed_seq, "state", {})], set_state
