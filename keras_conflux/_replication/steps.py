"""The step that a replica runs, and the facts about it while it is traced."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple
from typing import Self

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.contexts import having
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat.tensorflow_tracing import ranks_asked_in
from keras_conflux._graphs import walks
from keras_conflux._graphs.effects import waits


class Place(NamedTuple):
    """The place of a replica's samples in the global batch.

    They are uint64, or numbers, and may be in another unit, as shards are.
    """

    own: Any
    """The number of samples: 1 for a copy that stands in for none."""
    before: Any
    """How many come before them."""
    total: Any
    """How many the global batch has."""


@dataclasses.dataclass(frozen=True)
class CompiledStep:
    """The facts about a step that XLA compiles."""

    shapes: Sequence[Sequence[int]] | None = None
    """The shapes of the shard's leaves, if the trace does not know them."""
    rank: Any = None
    """The variable with each replica's position, if there are several."""


@dataclasses.dataclass
class Step:
    """The step of one replica, while it is traced, and where it runs.

    `withdevices` knows a name and how it is compiled; the rest is known in a
    step of `fit`. `Part`s of it keep the values that leave the step.
    """

    name: str
    """The name of the step in warnings."""
    warned: set[str] = dataclasses.field(default_factory=set)
    """The keys of given warnings, in any trace of this step on any replica."""
    compiled: CompiledStep | None = None
    """The facts about it if it becomes part of an XLA program."""
    model: Any = None
    """The model whose step it is."""
    graph: Any = None
    """The graph that the step is traced to."""
    kinds: Any = None
    """The kinds of the step's tensors with respect to the global batch."""
    shard: Any = None
    """The replica's shard of the batch."""
    batch_fraction: Any = None
    """A scalar: this replica's samples over all samples of the batch. All
    replicas' add up to one. `None` in `withdevices`, where the user reduces."""
    place: Any = None
    """Returns the `Place` of this replica's samples in the global batch."""
    may_be_empty: bool = False
    """Whether the replica may run on a stand-in, as it has no samples."""
    turns: Any = None
    """The `TracedTurns` of which one is traced, if the replica runs several."""
    is_updating: bool = False
    """Whether an optimizer is applying gradients, on all replicas alike."""
    parts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    """By class, the parts that somebody has asked for."""

    @property
    def in_xla(self) -> bool:
        """Whether the trace becomes part of an XLA program."""
        return self.compiled is not None

    @property
    def known_sizes(self) -> set[int]:
        """The numbers of the replica's samples that are constants here."""
        leaves = [x for x in trees.present(self.shard) if x.shape.rank]
        return {leaf.shape[0] for leaf in leaves} - {None}

    @property
    def device_fraction(self) -> Any:
        """The samples of all turns of this replica over all samples."""
        return self.turns.device_fraction if self.turns else self.batch_fraction

    def after_turns(self) -> contextlib.AbstractContextManager[None]:
        """Marks a trace that a replica runs once, after all its turns."""
        return having(self, turns=None, batch_fraction=self.device_fraction)

    def warn_once(
        self, key: str, message: str, operation: tf.Operation | None = None
    ) -> None:
        """Warns, once of each `key`, of a difference to one device."""
        count = tf.distribute.get_strategy().num_replicas_in_sync
        if key not in self.warned and (self.turns or count > 1):
            self.warned.add(key)
            warn(f"{self.name}: {message}", operation)


class Part:
    """The facts that one file keeps of a step, and no other file reads."""

    def __init__(self, step: Step) -> None:
        self.step = step

    @classmethod
    def of(cls, step: Step) -> Self:
        """Returns this part of a step, which is made when it is needed."""
        if cls not in step.parts:
            step.parts[cls] = cls(step)
        return step.parts[cls]


class _Local(threading.local):
    step: "Step | None" = None


_local = _Local()


def current() -> Step | None:
    """Returns the step that this replica runs, if the package runs it."""
    return _local.step


def in_xla() -> bool:
    """Whether the graph traced here becomes part of a replica's XLA program."""
    step = current()
    return step is not None and step.in_xla


def current_fit_step() -> Step | None:
    """Returns the step that this replica runs, if it is one of `fit`."""
    step = current()
    return step if step and step.batch_fraction is not None else None


_finishing: list[Callable[[Step], None]] = []
finish_by = _finishing.append
"""Has a function be called with each step for XLA that is traced."""


@tf.autograph.experimental.do_not_convert
def finish() -> None:
    """Ends the trace of the current step, if it is for XLA."""
    step = current()
    if step is not None and step.in_xla:
        step.graph = tf.compat.v1.get_default_graph()
        for function in _finishing:
            function(step)


def refuse_in_turns(what: str, instead: str) -> None:
    """Raises, with reason and cure, if one of several turns is traced."""
    step = current()
    if step is not None and step.turns is not None:
        raise NotImplementedError(
            f"{step.name}: {what}, and with `microbatches=` a replica is "
            f"traced once for all its turns. {instead}, or leave out "
            "`microbatches`."
        )


def entered(step: Step | None) -> contextlib.AbstractContextManager[None]:
    """Makes a step the current one of this replica's thread, or none."""
    return having(_local, step=step)


class UserReductions(Part):
    """The results of the user's own collectives in a step."""

    has_rows: Any = None
    """Whether the parts of a replica in a loop have rows, if not known."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._leaves: list[Any] = []
        self.counted: set[str] = set()
        """The metrics that count a step as one sample."""
        self.of_parts: set[str] = set()
        """The metrics that get values of a replica's own part."""
        self.own: list[Any] = []
        """The arguments of which each replica has its own, in a loop."""
        self._graph = tf.compat.v1.get_default_graph()
        self._asked = ranks_asked_in(self._graph)

    def add(self, tree: trees.Tree) -> None:
        """Notes the result of one."""
        self._leaves.extend(trees.flatten(tree))

    def know_rank(self) -> bool:
        """Whether the program has asked for its rank since these are noted."""
        return ranks_asked_in(self._graph) > self._asked

    def operations(self) -> list[tf.Operation]:
        """Returns the operations that make it."""
        return [value.op for value in symbolic(self._leaves)]

    def are_missing(
        self,
        tensors: Sequence[Any],
        callers: Mapping[Any, tf.Operation] | None = None,
    ) -> bool:
        """Whether a replica's own values reach tensors past all collectives."""
        found = symbolic(tensors)
        return walks.flows_past(found, self.own, waits, callers or {})


def symbolic(leaves: Sequence[Any]) -> list[tf.Tensor]:
    """Returns the tensors of graphs, of sparse ones their values."""
    values = [getattr(leaf, "values", leaf) for leaf in leaves]
    return [value for value in values if tf.is_symbolic_tensor(value)]
