"""Batches that are made ready as they are drawn, in any number of epochs."""

from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sized
from typing import Any
from typing import Generic
from typing import TypeVar

T_co = TypeVar("T_co", covariant=True)


class Batches(Generic[T_co]):
    """The batches of `distribute` and `prefetch`. Each iteration is an epoch.

    `len` is the number of batches, where the source tells it. A source that is
    an iterator itself, as a generator is, has one epoch. `ready` returns an
    iterator over the results for its batches.
    """

    def __init__(self, source: Iterable[Any], ready: Any) -> None:
        self._source = source
        self._ready = ready
        self._is_used_up = False

    def __len__(self) -> int:
        if not isinstance(self._source, Sized):
            raise TypeError(
                f"A {type(self._source).__name__} does not tell how many "
                "batches it has."
            )
        return len(self._source)

    def __repr__(self) -> str:  # which Keras shows of data that it cannot take
        return (
            "<batches for a loop of your own: give `fit`, `evaluate` and "
            "`predict` the data set itself>"
        )

    def __bool__(self) -> bool:
        return True  # also where the length is not known

    def __iter__(self) -> Iterator[T_co]:
        if self._is_used_up:
            raise ValueError(
                f"The batches of the {type(self._source).__name__} have been "
                "drawn, and it can be iterated over once. For several epochs, "
                "give a `tf.data.Dataset`, a list or another object whose "
                "`__iter__` begins anew."
            )
        return self._epoch()

    def _epoch(self) -> Iterator[T_co]:
        yield from self._ready(self._source)
        self._is_used_up = isinstance(self._source, Iterator)
