"""Resources of a training that forked children do not hold."""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Iterator

_held: list[Callable[[], None]] = []


@contextlib.contextmanager
def not_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """Has each forked child `undo` what it takes of a training."""
    _held.append(undo)
    try:
        yield
    finally:
        if undo in _held:  # not in a child that comes out of this, too
            _held.remove(undo)


def _give_up() -> None:
    while _held:
        _held.pop()()


os.register_at_fork(after_in_child=_give_up)
