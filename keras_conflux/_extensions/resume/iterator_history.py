"""The iterators that this process has made of a data set.

A shuffle of tf.data takes a seed for each iterator that is made of it, whether
by this call of `fit`, its validation, a former call or `evaluate`. So the next
elements of a data set follow from all that were made before.
"""

import weakref
from collections.abc import Generator
from typing import Any

from keras_conflux._extensions.resume.compat import pipelines
from keras_conflux._extensions.resume.compat import private_state

_made: Any = weakref.WeakKeyDictionary()
"""By data set, whether each iterator has been drawn from."""


class IteratorTracker:
    """Notes which iterators an epoch iterator of Keras makes."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = weakref.ref(iterator)
        self._latest: int | None = None
        private_state.count_iterators(iterator, self._note_iterator)

    def noting_draws(
        self, steps: Generator[tuple, None, None]
    ) -> Generator[tuple, None, None]:
        """Yields the steps that Keras enumerates; notes that there are some."""
        for first in steps:
            if self._latest is not None:
                self._made_before()[self._latest] = True
            yield first
            yield from steps

    def _note_iterator(self) -> None:
        made = self._made_before()
        self._latest = len(made)
        made.append(False)

    def _made_before(self) -> list[bool]:
        dataset = private_state.dataset_of(self._iterator())
        return _made.setdefault(dataset, [])


def drawn_iterators(dataset: Any) -> list[bool]:
    """Returns of each iterator of a data set whether it has been drawn from."""
    return [] if dataset is None else list(_made.get(dataset, ()))


def make_again(dataset: Any, made: list[bool]) -> bool:
    """Makes the iterators that another process had, and drops them.

    Returns whether the data set is where it was there. If there are more
    iterators here, it is further on.
    """
    here = _made.setdefault(dataset, [])
    further_on = len(here) > len(made)
    for drawn in made[len(here) :]:
        pipelines.make_iterator(dataset, drawn)
        here.append(drawn)
    return not (further_on and pipelines.has_shuffles(dataset))
