"""The order in which a trace runs, and the readers of a tensor there."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks

_TELLING = (tf.float16, tf.bfloat16, tf.float32)
SHAPES = ("Identity", "Reshape", "Transpose", "ExpandDims", "Squeeze")
"""Operations that keep entries as they are, in another shape."""
_MOVES = (*SHAPES, "Cast")


def may_tell(tensor: tf.Tensor) -> bool:
    """Whether an entry of a tensor can travel along with a collective."""
    if tensor.dtype not in _TELLING or tensor.shape.rank is None:
        return False
    return 0 not in tensor.shape.as_list() and bool(tensor.op.inputs)


class Timeline:
    """The operations of a graph that depend on samples, in their order.

    All others may run at any time, such as reading a variable.
    """

    def __init__(self, graph: Any, samples: Iterable[tf.Tensor]) -> None:
        self._graph = graph
        self._timed = {tensor.op for tensor in samples}
        self._latest: tf.Tensor | None = None
        self._count = 0

    def latest(self) -> tf.Tensor | None:
        """Returns the last traced tensor that `may_tell`."""
        self._read_on(self._graph.get_operations())
        return self._latest

    def skip(self) -> None:
        """Counts later tensors as independent: they were made to wait."""
        self._count = len(self._graph.get_operations())

    def before(
        self, operation: tf.Operation, order: dict[tf.Operation, int]
    ) -> tf.Tensor | None:
        """Returns a tensor computed shortly before an operation is needed.

        It is an input of the operation, or else of the first reader of its
        outcome: LoRA adds a product of weights to a weight. See `positions`.
        """
        self._read_on([*order])
        begin = order[operation]
        waiting, seen = [operation], {operation}
        while waiting:
            waiting.sort(key=order.__getitem__, reverse=True)
            each = waiting.pop()
            timed = [x for x in each.inputs if x.op in self._timed]
            before = [x for x in timed if order.get(x.op, begin) < begin]
            known = [*filter(may_tell, before)]
            if known:
                return max(known, key=lambda tensor: order[tensor.op])
            readers = {x for out in each.outputs for x in out.consumers()}
            later = {x for x in readers - seen if x in order}
            seen |= later
            waiting.extend(later)
        return None

    def _read_on(self, operations: list[tf.Operation]) -> None:
        for each in operations[self._count :]:
            if any(tensor.op in self._timed for tensor in each.inputs):
                self._timed.add(each)
                telling = filter(may_tell, each.outputs)
                self._latest = next(telling, self._latest)
        self._count = len(operations)


def positions(graph: Any) -> dict[tf.Operation, int]:
    """Returns the place of each operation, by need: some are traced late."""
    operations = walks.to_run(graph)
    return {each: place for place, each in enumerate(operations)}


Reads = list[tuple[tf.Operation, tf.Tensor]]
"""Operations, each with a tensor that it reads."""


def reads_since(
    tensors: Iterable[tf.Tensor], order: dict[tf.Operation, int], begin: int
) -> Reads:
    """Returns reads of tensors from a place of the `positions` on.

    Reads in another shape or dtype count, too.
    """

    def moved(tensor: tf.Tensor) -> list[tf.Tensor]:
        moves = [each for each in tensor.consumers() if each.type in _MOVES]
        before = [each for each in moves if order.get(each, 0) < begin]
        return [x.outputs[0] for x in before if x.inputs[0] is tensor]

    found = walks.walked(tensors, moved)
    uses = ((each, tensor) for tensor in found for each in tensor.consumers())
    return [pair for pair in uses if order.get(pair[0], 0) >= begin]


def read_others(reads: Reads, others: dict[int, tf.Tensor]) -> None:
    """Lets operations read others of the same values, by the tensors' ids."""
    moves = walks.by_need(
        [tensor.op for _, tensor in reads if id(tensor) not in others],
        lambda x: [x.inputs[0].op] if id(x.inputs[0]) not in others else [],
    )
    rewriting.read_copies(reads, moves, others)
