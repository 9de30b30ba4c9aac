"""What is known of the step that this replica runs, while it is traced."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple
from typing import TypeVar

import tensorflow as tf

from keras_conflux._common.user_warnings import warn

T = TypeVar("T")


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
    in_xla: bool = False
    """Whether what is traced becomes part of an XLA program."""
    compiled_shapes: Any = None
    """The shapes that the leaves of the shard will have where XLA compiles the
    step, which is traced for any number of samples."""

    # What follows belongs to a step of `fit`.

    batch_fraction: Any = None
    """A scalar: this replica's samples over those of the global batch. All
    replicas' add up to one. `None` in `withdevices`, where the user reduces."""
    place: Any = None
    """Returns the `Place` of this replica's samples in the global batch."""
    rank: Any = None
    """The variable that holds the position of each replica among all, in a
    compiled step of several replicas."""
    graph: Any = None
    """The graph that the step is traced to."""
    may_be_empty: bool = False
    """Whether the replica may run on a stand-in, as it has no samples."""
    kinds: Any = None
    """What each tensor of the step is with respect to the global batch."""
    shard: Any = None
    """The replica's shard of the batch."""
    model: Any = None
    """The model whose step it is."""
    _parts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """By class, what others keep of the step."""

    def part(self, kind: Callable[["StepContext"], T]) -> T:
        """Returns what a class keeps of this step, which is made when needed.

        Args:
            kind: The class, which is called with the step.
        """
        if kind not in self._parts:
            self._parts[kind] = kind(self)
        return self._parts[kind]

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
