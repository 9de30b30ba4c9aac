"""What a training holds, and children that its process forks do not."""

import contextlib
import os
from collections.abc import Callable
from collections.abc import Iterator

_held: list[Callable[[], None]] = []


@contextlib.contextmanager
def not_in_children(undo: Callable[[], None]) -> Iterator[None]:
    """Has what this process holds meanwhile be given up in each child.

    Args:
        undo: Gives it up.
    """
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
