"""Who follows what epochs draw from their data.

By default nobody does. `observe` puts somebody else in place, once.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Generator
from typing import Any

from keras_conflux._common.trees import Tree


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
    """Follows nothing."""

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


_observers = [EpochObserver()]


def observe(observer: EpochObserver) -> None:
    """Makes somebody follow all epochs from now on."""
    _observers.append(observer)


def current_observer() -> EpochObserver:
    """Returns who follows the epochs."""
    return _observers[-1]
