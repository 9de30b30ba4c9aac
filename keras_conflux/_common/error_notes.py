"""Notes that others add to errors of what runs on replicas."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

AddNote = Callable[[BaseException, Any], None]
_adding: list[AddNote] = []


def add_by(add: AddNote) -> None:
    """Has a function add notes from now on.

    Args:
        add: Takes an error, and the model whose step has raised it, `None` for
            a function of the user's own.
    """
    _adding.append(add)


def add_to(error: BaseException, model: Any = None) -> None:
    """Has notes added to an error.

    Args:
        error: What is about to be raised.
        model: The model whose step has raised it, if it is that of one.
    """
    for add in _adding:
        add(error, model)


@contextlib.contextmanager
def added(model: Any) -> Iterator[None]:
    """Adds notes to what is raised while a model's step is made or runs."""
    try:
        yield
    except Exception as error:
        add_to(error, model)
        raise
