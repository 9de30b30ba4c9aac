"""Where training stands in its data, and how it gets there again.

The batches of a source follow from random generators and from the iterators
made before. So they are drawn once more, and dropped.
"""

import collections
import dataclasses
import itertools
import operator
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

import numpy as np

from keras_conflux._common.trees import Tree
from keras_conflux._extensions.resume import data_state
from keras_conflux._extensions.resume import fingerprint
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.compat import private_state
from keras_conflux._extensions.resume.compat import random_generators
from keras_conflux._extensions.resume.held_attributes import HeldAttributes
from keras_conflux._fit.input.calls import Epoch
from keras_conflux._fit.input.calls import EpochObserver

_WHAT_TO_DO = (
    "Give the training the data that it had, or begin another one in another "
    "directory; `model.load_weights` reads the `model.weights.h5` of the "
    "checkpoint."
)


@dataclasses.dataclass
class Place:
    """A place in the data, which can be found again."""

    step: int = 0
    """The step of the epoch: so many batches of it have been trained."""
    seeds_at_begin: list[int] = dataclasses.field(default_factory=list)
    """The seeds that shuffles had taken when the current iterator was made."""
    seeds: list[int] = dataclasses.field(default_factory=list)
    """Those that they have taken at this place."""
    begun: bool = False
    """Whether that iterator had been drawn from, and is to be again."""
    drawn: int = 0
    """The number of its trained batches, in all epochs."""
    drawn_before: int = 0
    """The batches of former epochs, where `steps_per_epoch` cuts a source."""
    generators_at_begin: Any = None
    """The states of random generators when it was made."""
    generators: Any = None
    """Their states at this place."""
    number: int | None = None
    """The number of batches of an epoch, if it is known by now."""
    attributes: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The state of a `PyDataset` when it was made, or now if not begun."""
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The state, at this place, of a `PyDataset` that callbacks hold."""
    validation: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The state of the validation data."""
    last: np.ndarray | None = None
    """The sketch of the last batch that has been trained, if it is known."""


class InputPosition(EpochObserver):
    """Follows the data of one call of `fit`, from a place on."""

    def __init__(
        self,
        start: Place | None,
        validation: data_state.ValidationData,
        others: list[Any],
        is_part: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._start = start
        self.validation = validation
        self._datasets = [validation.dataset, *others]
        self._is_part, self._warn = is_part, warn
        self._here = Place()
        self.iterator: Any = None
        """Keras' epoch iterator."""
        self.varies = False
        """Whether the data is known to be another each time."""
        self._batches = collections.deque[tuple[int, Tree]]([(-1, None)], 2)
        """The last ones that were noted, each behind its step."""

    @property
    def skipped(self) -> int:
        """How many batches of the next epoch have been trained already."""
        return 0 if self._start is None else self._start.step

    def place_before(self, step: int) -> Place:
        """Returns the place before a step; before 0, an epoch has ended."""
        here, dataset = self._here, private_state.dataset_of(self.iterator)
        # A source cut by `steps_per_epoch` goes on; else an epoch makes one.
        goes_on = here.begun and private_state.draws_on(self.iterator)
        begun = goes_on or step > 0
        return dataclasses.replace(
            here,
            step=step,
            begun=begun,
            drawn=here.drawn_before + step if step else here.drawn,
            drawn_before=here.drawn_before if step else here.drawn,
            generators=random_generators.states(dataset),
            number=self.iterator.num_batches,
            attributes=here.attributes if begun else self._held.changed(),
            shared=self._held.changed() if step and self._is_shared else {},
            seeds=data_state.seeds_taken(self._shuffles),
            validation=self.validation.state(),
            last=self._sketch(step) if begun else None,
        )

    def _note_batch(self, step: int, batch: Tree) -> None:
        """Notes the batch of the last step of an execution, before it."""
        self._batches.append((step, batch))

    def _sketch(self, step: int) -> np.ndarray | None:
        """Returns the sketch of the batch before a step, if it is known."""
        latest, _ = self._batches[-1]  # also where an epoch has ended
        batch = dict(self._batches).get(step - 1 if step else latest)
        return None if batch is None else fingerprint.sketch(batch)

    def attach(self, iterator: Any) -> None:
        """Follows an epoch iterator of Keras."""
        self.iterator = iterator
        dataset = private_state.dataset_of(iterator)
        self._shuffles = data_state.shuffles_of([dataset, *self._datasets])
        owner = private_state.py_dataset_of(iterator)
        self._held = HeldAttributes(owner, plain_values.mark)
        self._is_shared = any(each is owner for each in self._datasets)
        drawn = [dataset, self.validation.dataset]
        self._code = data_state.state_of_code(drawn)
        private_state.count_iterators(iterator, self._note_iterator)

    def restore(self, is_over: bool) -> bool:
        """Brings the data to where it was, or lets the first epoch do that.

        Returns whether no shuffle is further on, as one that this process has
        used before may be.
        """
        start = self._start
        if start is None:
            return True
        private_state.set_learned_number(self.iterator, start.number)
        begun = start.begun and not is_over
        if not begun:
            self._held.restore(start.attributes)
        # Else the training's own, which is drawn from again.
        validation = self.validation
        if validation.source is not private_state.py_dataset_of(self.iterator):
            validation.restore(start.validation)
        there = start.seeds_at_begin if begun else start.seeds
        here = data_state.seeds_taken(self._shuffles)
        if not begun:
            data_state.take_seeds(self._shuffles, there)
        return all(map(operator.le, here, there))

    def begins(self, steps: Generator[tuple, None, None]) -> Epoch:
        """Begins where a training has left off."""
        return Epoch(self._from_here(steps), self.skipped, self._note_batch)

    def _from_here(
        self, enumerated: Iterator[tuple]
    ) -> Generator[tuple, None, None]:
        """Yields the part of an epoch's steps, as Keras has them, from here."""
        here, skipped = self._here, self.skipped
        here.drawn_before = here.drawn
        for step in enumerated:
            first, *_, source = step
            self._draw_again(source)
            if first >= skipped:
                executed = self.iterator.steps_per_execution
                here.drawn = here.drawn_before + first + executed
                here.begun = True
                yield step

    def _note_iterator(self) -> None:
        """Called before an iterator is made of the data."""
        here, start = self._here, self._start
        dataset = private_state.dataset_of(self.iterator)
        self._name_changed_by_code()
        here.drawn = here.drawn_before = 0
        if start is not None and start.begun:
            # After `on_epoch_begin` of callbacks, which may make and draw some.
            if not start.step:
                start.generators = random_generators.states(dataset)
            data_state.take_seeds(self._shuffles, start.seeds_at_begin)
            random_generators.set_states(start.generators_at_begin, dataset)
            self._held.restore(start.attributes)
        here.seeds_at_begin = data_state.seeds_taken(self._shuffles)
        here.generators_at_begin = random_generators.states(dataset)
        here.attributes = self._held.changed()

    def _name_changed_by_code(self) -> None:
        """Warns of what nobody saves."""
        if changed := self._code.changed():
            self._warn(
                "This training cannot be resumed exactly if its data depends "
                f"on {sorted(changed)}, which their Python code has changed, "
                "and nobody saves. Hold them in a `keras.utils.PyDataset`."
            )

    def _draw_again(self, source: Any) -> None:
        """Draws trained batches again, from an iterator that has just begun."""
        start, self._start = self._start, None
        if start is None or not start.begun:
            return
        batches = enumerate(itertools.islice(source, start.drawn), 1)
        last = collections.deque(batches, maxlen=1)
        count, batch = last[0] if last else (0, None)
        had_ended = self._is_part and start.last is None
        if count < start.drawn and not had_ended:
            raise ValueError(
                f"The data ends after {count} batches, and {start.drawn} had "
                f"been trained when the checkpoint was saved. {_WHAT_TO_DO}"
            )
        self._assert_same(start, batch)
        data_state.take_seeds(self._shuffles, start.seeds)
        self._here.drawn_before = start.drawn_before
        self._here.begun = True
        if self.iterator.steps_per_epoch:
            private_state.add_steps_seen(self.iterator, start.drawn_before)
        random_generators.set_variables(
            private_state.dataset_of(self.iterator),
            start.generators["variables"],
            start.generators_at_begin["variables"],
        )
        # Drawing again has repeated the draws of the user's Python code.
        changed, digest = set(), plain_values.digest
        if private_state.calls_python(self.iterator):
            now, begun = random_generators.states(), start.generators_at_begin
            differ = {k for k in now if digest(now[k]) != digest(begun[k])}
            changed = differ if count else {*now}
        random_generators.set_states(start.generators, but=changed)
        # It has also repeated what draws change, but not what callbacks do.
        now, begun = self._held.changed(), start.attributes
        drawn = {k for k in now if digest(now[k]) != digest(begun.get(k))}
        if kept := {k: v for k, v in start.shared.items() if k not in drawn}:
            self._held.restore(kept)

    def _assert_same(self, start: Place, batch: Tree) -> None:
        """Raises `ValueError` if other samples would be trained from here."""
        if start.last is None or batch is None or self.varies:
            return
        gap = fingerprint.gap(start.last, fingerprint.sketch(batch))
        if gap <= fingerprint.SMALL:
            return
        error = ValueError(
            "The data is another than when the checkpoint was saved: batch "
            f"{start.drawn}, the last one that had been trained, has "
            f"{'other samples' if gap > 1 else 'slightly other values'} now. "
            "Its files or the program that reads them have changed, this "
            "process has used it before, or it draws numbers without a seed. "
            f"{_WHAT_TO_DO}"
        )
        if gap > 1:
            raise error
        self._warn(f"{error} Another processor may round pixels otherwise.")
