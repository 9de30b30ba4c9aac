"""What is known of the step that this replica runs, while it is traced."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import tensorflow as tf

from keras_conflux._common.user_warnings import warn


class Place(NamedTuple):
    """Where a replica's samples are among those of the global batch.

    They are uint64, or numbers, and may be in another unit, as shards are.
    """

    own: Any
    """How many there are: 1 for a copy that stands in for none."""
    before: Any
    """How many come before them."""
    total: Any
    """How many the global batch has."""


@dataclasses.dataclass
class StepContext:
    """The state of one replica's step, from its begin to its end."""

    name: str
    """What a warning calls the step."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """What has been warned of, in any trace of this step on any replica."""
    mixing_layers: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, the layers that mix samples, in the order of their calls."""
    called_functions: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """By id, where it is called, and the kinds of what it reads, each
    `tf.function` that the step has called, and the one in its place."""
    tried_gradients: set[int] = dataclasses.field(default_factory=set)
    """The ids of operations whose gradients layers define, and were tried."""
    layer_outputs: set[int] = dataclasses.field(default_factory=set)
    """The ids of what layers have returned."""
    in_xla: bool = False
    """Whether what is traced becomes part of an XLA program."""
    compiled_shapes: Any = None
    """The shapes that the leaves of the shard will have where XLA compiles the
    step, which is traced for any number of samples."""
    optimizing: bool = False
    """Whether an optimizer is applying gradients."""
    accumulating: bool = False
    """Whether the gradients that it applies are accumulated before they are
    reduced."""
    reduced: list[Any] = dataclasses.field(default_factory=list)
    """The leaves that the user's `allreduce` returned."""

    # What follows belongs to a step of `fit`.

    batch_fraction: Any = None
    """A scalar: this replica's samples over those of the global batch. All
    replicas' add up to one. `None` in `withdevices`, where the user reduces."""
    place: Any = None
    """Returns the `Place` of this replica's samples in the global batch."""
    place_is_written: bool = False
    """Whether the step has written it, for functions that it calls."""
    rank: Any = None
    """The variable that holds the position of each replica among all, in a
    compiled step of several replicas."""
    graph: Any = None
    """The graph that the step is traced to."""
    assigned: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, the Keras variables that the step has written."""
    kept: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, those of them that a seed generator has not counted on."""
    before: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, what a variable was before the step first added to it."""
    averages: list[Any] = dataclasses.field(default_factory=list)
    """The Keras variables that are to be averaged after the last step."""
    results: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By the positions of leaves that the step returns, what computes those
    that are results of metrics."""
    note_metric: Any = None
    """Called with each metric that is updated, as the step may have made it."""
    noted: list[Any] = dataclasses.field(default_factory=list)
    """Results of metrics that the step has computed, with what computes them.
    """
    may_be_empty: bool = False
    """Whether the replica may run on a stand-in, as it has no samples."""
    roles: list[str] = dataclasses.field(default_factory=list)
    """How the replicas' values of each leaf that the step returns become one.
    """
    statistics: set[int] = dataclasses.field(default_factory=set)
    """The ids of variables that hold statistics of a replica's own samples, of
    which the mean over replicas is kept."""
    kinds: Any = None
    """What each tensor of the step is with respect to the global batch."""
    is_counter_of_keras: Any = None
    """Tells whether a metric of Keras adds sums over samples to a variable."""
    gathered: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, the tensors whose rows have been gathered from all replicas."""
    in_gradient: bool = False
    """Whether a gradient tape is computing a gradient."""
    in_layer: bool = False
    """Whether a layer or a model is being called."""
    in_keras_step: bool = False
    """Whether Keras' own `train_step` is running."""
    losses_to_accumulate: list[Any] = dataclasses.field(default_factory=list)
    """The losses whose gradients are reduced only when the optimizer updates
    from what it has accumulated."""
    unclear_losses: list[Any] = dataclasses.field(default_factory=list)
    """The losses that may differ from those of one device, of which a warning
    has told."""
    local_gradients: list[Any] = dataclasses.field(default_factory=list)
    """The gradients of these losses."""
    shard: Any = None
    """The replica's shard of the batch."""
    internal: bool = False
    """Whether what writes variables now is the package or a seed generator."""
    untracked: dict[int, Any] = dataclasses.field(default_factory=dict)
    """By id, the Keras variables with a single copy that the step writes."""
    draws_rows: bool | None = None
    """Whether what is drawn now is drawn as one device draws it, so that seeds
    are equal on all replicas. `None` if no function of `keras.random` draws."""
    loops_over_samples: int = 0
    """In how many loops what is traced now is that may have a turn for each
    sample."""
    choices: list[Any] = dataclasses.field(default_factory=list)
    """What chooses the branches, and calls the functions, that are being
    traced, the outermost first."""
    updates_inside: list[Any] = dataclasses.field(default_factory=list)
    """Optimizers that have changed weights in a graph inside of the step's, by
    name, and these graphs."""
    counts_rows: str | None = None
    """What it does with a number that may be that of its samples, which is
    known while tracing."""

    def warn_once(
        self, key: str, message: str, operation: tf.Operation | None = None
    ) -> None:
        """Warns of what several replicas do and one device does not.

        Args:
            key: What is warned of, once in this step on any replica.
            message: What to say after the name of the step.
            operation: What is warned of, if it was traced before this call.
        """
        if key not in self.warned and not _is_alone():
            self.warned.add(key)
            warn(f"{self.name}: {message}", operation)

    @contextlib.contextmanager
    def drawing(self, rows: bool) -> Iterator[None]:
        """Says that a function of `keras.random` draws: see `draws_rows`."""
        before, self.draws_rows = self.draws_rows, rows
        try:
            yield
        finally:
            self.draws_rows = before


def _is_alone() -> bool:
    """Whether this replica is the only one, of all processes."""
    strategy = tf.distribute.get_strategy()
    communicator = getattr(strategy, "communicator", None)
    if communicator is None:
        return strategy.num_replicas_in_sync == 1
    return communicator.size == 1


_local = threading.local()


def current() -> StepContext | None:
    """Returns the context of this replica's step, if the package runs it."""
    return getattr(_local, "context", None)


def in_xla() -> bool:
    """Whether what is traced here becomes part of a replica's XLA program."""
    context = current()
    return context is not None and context.in_xla


def current_fit_step() -> StepContext | None:
    """Returns the context of this replica's step if it is one of `fit`."""
    context = current()
    if context is None or context.batch_fraction is None:
        return None
    return context


@contextlib.contextmanager
def entered(context: StepContext | None) -> Iterator[None]:
    """Makes a context the current one of this replica's thread, or none."""
    before = current()
    _local.context = context
    try:
        yield
    finally:
        _local.context = before


@contextlib.contextmanager
def optimizing(accumulating: bool = False) -> Iterator[None]:
    """Says that an optimizer is applying gradients in this replica.

    An optimizer may hold others, as `LossScaleOptimizer` does, whose `apply`
    reduces nothing again.

    Args:
        accumulating: See `StepContext`.
    """
    context = current() or StepContext("strategy.run")
    context.optimizing, context.accumulating = True, accumulating
    try:
        with entered(context):
            yield
    finally:
        context.optimizing = context.accumulating = False


@contextlib.contextmanager
def internal() -> Iterator[None]:
    """Says that a seed generator is writing its state in this replica."""
    context = current() or StepContext("strategy.run")
    before, context.internal = context.internal, True
    try:
        yield
    finally:
        context.internal = before
