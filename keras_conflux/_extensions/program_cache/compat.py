"""The insides of TensorFlow that the cache of programs needs.

XLA's cache looks programs up by the names of traced functions, which end with
the number of functions traced before.
"""

import contextlib
import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.framework import ops

from keras_conflux._common.contexts import Setting

_ROOM = 2**20
"""The names of a trace, and the traces of a program, are fewer."""
_PROGRAMS = 2**22
"""With those they stay below 2**63, as int64. Small ones are TensorFlow's."""

_tensorflows_uid = ops.uid
_numbers: Setting[Iterator[int] | None] = Setting(None)
_traces: dict[int, Iterator[int]] = {}
"""Counts the traces of each program in this process."""


def repeatable_names(program: str) -> contextlib.AbstractContextManager[None]:
    """Makes names depend on the program and its traces before.

    No name occurs twice in a process. TensorFlow names traces of other threads.
    """
    ops.uid = _uid
    digest = hashlib.sha256(program.encode()).digest()
    index = 1 + int.from_bytes(digest[:8], "big") % (_PROGRAMS - 1)
    trace = next(_traces.setdefault(index, itertools.count()))
    return _numbers.to(itertools.count((index * _ROOM + trace) * _ROOM))


def _uid() -> int:
    """Returns the next number of a trace, elsewhere TensorFlow's."""
    numbers = _numbers.get()
    return _tensorflows_uid() if numbers is None else next(numbers)


def has_listed_devices() -> bool:
    """Whether TensorFlow has looked for devices, and has read its flags."""
    running: Any = context.context()
    return running._physical_devices is not None
