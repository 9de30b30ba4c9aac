"""Notes that others add to errors of steps that run on replicas."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

AddNote = Callable[[BaseException, Any, bool], None]
_adding: list[AddNote] = []


def add_by(add: AddNote) -> None:
    """Has a function add notes from now on.

    It takes the arguments of `add_to`.
    """
    _adding.append(add)


def add_to(
    error: BaseException, model: Any = None, keeps_activations: bool = True
) -> None:
    """Has notes added to an error.

    Args:
        error: The error that is about to be raised.
        model: The model whose step has raised it, `None` for a function of the
            user's own.
        keeps_activations: Whether it is a step of a graph that may have
            gradients.
    """
    for add in _adding:
        add(error, model, keeps_activations)


@contextlib.contextmanager
def added(model: Any, keeps_activations: bool = True) -> Iterator[None]:
    """Adds notes to errors raised while a model's step is made or runs."""
    try:
        yield
    except Exception as error:
        add_to(error, model, keeps_activations)
        raise
