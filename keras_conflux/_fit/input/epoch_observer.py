"""Who follows calls of `fit`, and what epochs draw from their data.

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


class FitObserver:
    """Follows nothing."""

    def fit(self, call: KerasCall, run: Callable[[], Any]) -> Any:
        """Returns what a call of `fit` returns.

        Args:
            call: Its arguments may be changed.
            run: Runs it.
        """
        del call
        return run()

    def made(self, iterator: Any) -> None:
        """Is told of each epoch iterator that Keras has made."""

    def begins(
        self, iterator: Any, steps: Generator[tuple, None, None]
    ) -> Epoch:
        """Returns the epoch that is to be run.

        Args:
            iterator: The epoch iterator of Keras.
            steps: What it enumerates.
        """
        del iterator
        return Epoch(steps)


_observers = [FitObserver()]


def observe(observer: FitObserver) -> None:
    """Makes somebody follow all calls and epochs from now on."""
    _observers.append(observer)


def current_observer() -> FitObserver:
    """Returns who follows them."""
    return _observers[-1]
