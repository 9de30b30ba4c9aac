"""Keras' epoch iterators in `fit`, `evaluate` and `predict`.

Keras' loops ask an epoch iterator for `(first step, last step, iterator)` and
hand the iterator to the train function. Here the iterator is a `StepGroup`.
Keras 3.10 asks for no last step, and gets none.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Generator
from collections.abc import Iterator
from typing import Any

from keras_conflux._common.contexts import Setting
from keras_conflux._compat import keras_iterators
from keras_conflux._fit.input.calls import EpochObserver
from keras_conflux._fit.input.calls import observers
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._fit.input.execution_plan import current_plan
from keras_conflux._fit.input.local_batches import agree_on_specs
from keras_conflux._fit.input.step_groups import EndOfData
from keras_conflux._fit.input.step_groups import StepGroups
from keras_conflux._fit.input.step_groups import not_the_end
from keras_conflux._replication.strategy import default_strategy

_reshuffles = Setting(False)
reshuffling = _reshuffles.to
"""Has arrays shuffled in another order in each epoch, or not."""


@dataclasses.dataclass(frozen=True)
class _Attachment:
    """The facts about an epoch iterator of Keras, which are kept with it."""

    observer: EpochObserver = dataclasses.field(default_factory=EpochObserver)
    groups: StepGroups | None = None
    """`None` if Keras' own loop draws the batches."""


def make(
    original: Callable,
    iterator: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Makes an epoch iterator over global batches, which is drawn from here.

    One that is made outside of `fit`, `evaluate` and `predict` is TensorFlow's.
    """
    plan, groups = current_plan(), None
    if plan is not None and plan.strategy is not distribute_strategy:
        plan = None
    strategy = distribute_strategy if plan is None else default_strategy()
    make = functools.partial(original, iterator, strategy, *args, **kwargs)
    with reshuffling(plan.reshuffles if plan else _reshuffles.get()):
        observer = observers[-1].follow(iterator, make)
    if plan is not None:
        # A callback may change the next batch of Python code after each batch.
        waits = plan.steered and keras_iterators.has_python_source(iterator)
        groups = StepGroups(plan, iterator.steps_per_execution, not waits)
        if plan.is_local:
            groups.spec = agree_on_specs(iterator, plan.name)
    iterator.conflux = _Attachment(observer, groups)


def enumerate_step_groups(original: Callable, iterator: Any) -> Iterator[tuple]:
    """Yields `(first step, last step, step group)` for an epoch."""
    attachment = _attachment_of(iterator)
    number = iterator.num_batches
    epoch = attachment.observer.begins(original(iterator))
    if attachment.groups is None:
        return epoch.steps
    left = number and number - epoch.skipped
    drawing = attachment.groups.of_epoch(epoch, left)
    plan = current_plan()
    if plan is None:
        return drawing
    plan.drawing.callback(drawing.close)
    return _followed(drawing, plan)


def _followed(
    drawing: Generator[tuple[Any, ...]], plan: ExecutionPlan
) -> Iterator[tuple[Any, ...]]:
    try:
        for group in drawing:
            yield group
            del group  # lest its batches are held while others are drawn
    except EndOfData:  # of data whose length was not known
        plan.at_epoch_end()
        raise
    finally:
        if not drawing.gi_running:  # else the plan closes it now
            drawing.close()
    plan.at_epoch_end()


@contextlib.contextmanager
def catch_end(original: Callable, iterator: Any) -> Iterator[None]:
    """Ends Keras' loop, callbacks included, at the end of data alone."""
    groups, ends = _attachment_of(iterator).groups, contextlib.nullcontext()
    if groups is not None:
        ends = not_the_end(groups.name, of_a_step=True)
    with original(iterator), ends:
        yield


def make_dataset(original: Callable, adapter: Any) -> Any:
    """Makes a data set of the arrays of an adapter."""
    if _reshuffles.get() and keras_iterators.shuffles_samples(adapter):
        return keras_iterators.reshuffled(adapter)
    return original(adapter)


def _attachment_of(iterator: Any) -> _Attachment:
    # One that was made before this package was imported has none.
    return getattr(iterator, "conflux", _Attachment())
