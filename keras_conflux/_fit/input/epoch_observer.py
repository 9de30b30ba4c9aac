"""Observers of calls of `fit`, and of the batches that epochs draw.

By default nobody does. `observe` puts somebody else in place, once.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Generator
from typing import Any

from keras_conflux._common.trees import Tree
from keras_conflux._fit.input.calls import KerasCall


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The steps of an epoch, as Keras enumerates them."""

    steps: Generator[tuple, None, None]
    """Yields `(first step, last step, source)`."""
    skipped: int = 0
    """How many batches of the epoch have been trained before."""
    note_batch: Callable[[int, Tree], None] | None = None
    """Is told the last step of an execution and its batch, before it runs."""


class EpochObserver:
    """Follows the epochs of one epoch iterator of Keras: here, nothing."""

    def begins(self, steps: Generator[tuple, None, None]) -> Epoch:
        """Returns the epoch that is to be run.

        Args:
            steps: The iterator that Keras enumerates.
        """
        return Epoch(steps)


class FitObserver:
    """Follows calls of `fit`: here, nothing."""

    def fit(self, call: KerasCall, run: Callable[[], Any]) -> Any:
        """Returns the result of a call of `fit`.

        Args:
            call: Its arguments may be changed.
            run: Runs it.
        """
        del call
        return run()

    def made(self, iterator: Any) -> EpochObserver:
        """Returns an observer of an epoch iterator that Keras has made."""
        del iterator
        return EpochObserver()


_observers = [FitObserver()]


def observe(observer: FitObserver) -> None:
    """Makes somebody follow all calls of `fit` from now on."""
    _observers.append(observer)


def current_observer() -> FitObserver:
    """Returns who follows them."""
    return _observers[-1]
