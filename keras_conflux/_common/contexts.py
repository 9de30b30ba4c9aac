"""Values that hold as long as a context is entered."""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any
from typing import Generic
from typing import TypeVar

T = TypeVar("T")


class Setting(Generic[T]):
    """A value of this thread, and of threads that it starts calls in."""

    def __init__(self, default: T) -> None:
        self._variable = contextvars.ContextVar("setting", default=default)

    def get(self) -> T:
        """Returns the value that holds here."""
        return self._variable.get()

    @contextlib.contextmanager
    def to(self, value: T) -> Iterator[None]:
        """Gives it another value."""
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


@contextlib.contextmanager
def having(owner: Any, **attributes: Any) -> Iterator[None]:
    """Gives attributes of an object other values."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)
