"""The insides of TensorFlow that the cache of programs needs.

XLA's cache looks programs up by the names of traced functions, which end with
the number of functions traced before.
"""

import contextlib
import contextvars
import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tensorflow.python.eager import context
from tensorflow.python.framework import ops

_NAMES_OF_A_TRACE = 2**24
_TRACES_OF_A_PROGRAM = 2**12
_PROGRAMS = 2**26
"""Together they leave out the small numbers, which are TensorFlow's, and stay
below 2**63, as they have to be int64."""

_tensorflows_uid = ops.uid
_numbers: contextvars.ContextVar[Iterator[int] | None] = contextvars.ContextVar(
    "numbers", default=None
)
_lock = threading.Lock()
_traces: Counter[int] = Counter()
"""How often each program was traced in this process."""


@contextlib.contextmanager
def repeatable_names(program: str) -> Iterator[None]:
    """Makes names depend on the program and not on traces before.

    The n-th trace of a program in a process has the names of the n-th trace in
    another one. No name occurs twice in a process. TensorFlow names the traces
    of other threads meanwhile.
    """
    ops.uid = _uid
    token = _numbers.set(_numbers_of(program))
    try:
        yield
    finally:
        _numbers.reset(token)


def _numbers_of(program: str) -> Iterator[int]:
    digest = hashlib.sha256(program.encode()).digest()
    index = 1 + int.from_bytes(digest[:8], "big") % (_PROGRAMS - 1)
    with _lock:
        trace = _traces[index]
        _traces[index] += 1
    if trace >= _TRACES_OF_A_PROGRAM:
        return iter(())
    first = (index * _TRACES_OF_A_PROGRAM + trace) * _NAMES_OF_A_TRACE
    return itertools.islice(itertools.count(first), _NAMES_OF_A_TRACE)


def _uid() -> int:
    """Returns the next number of a trace, elsewhere TensorFlow's."""
    numbers = _numbers.get()
    number = None if numbers is None else next(numbers, None)
    return _tensorflows_uid() if number is None else number


def has_listed_devices() -> bool:
    """Whether TensorFlow has looked for devices, and has read its flags."""
    running: Any = context.context()
    return running._physical_devices is not None
