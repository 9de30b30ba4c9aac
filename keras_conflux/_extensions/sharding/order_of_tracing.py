"""The order in which a trace runs, and the readers of a tensor there."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Iterator
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
    return (
        tensor.dtype in _TELLING
        and tensor.shape.rank is not None
        and 0 not in tensor.shape.as_list()
        and bool(tensor.op.inputs)
    )


class Timeline:
    """The operations of a graph that depend on samples, in their order.

    All others may run at any time, such as reading a variable.

    Args:
        graph: The graph that is being traced.
        samples: Tensors of the graph.
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
        outcome: LoRA adds a product of weights to a weight.

        Args:
            operation: An operation of the order.
            order: See `positions`.
        """
        self._read_on([*order])
        begin = order[operation]
        waiting, seen = [operation], {operation}
        while waiting:
            waiting.sort(key=order.__getitem__, reverse=True)
            each = waiting.pop()
            known = [
                tensor
                for tensor in each.inputs
                if tensor.op in self._timed
                and order.get(tensor.op, begin) < begin
                and may_tell(tensor)
            ]
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
                self._latest = next(
                    filter(may_tell, each.outputs), self._latest
                )
        self._count = len(operations)


def positions(graph: Any) -> dict[tf.Operation, int]:
    """Returns the place of each operation, by need: some are traced late."""
    operations = walks.by_need(graph.get_operations())
    return {each: place for place, each in enumerate(operations)}


@dataclasses.dataclass(frozen=True)
class Reader:
    """An operation that reads a tensor, perhaps in another shape."""

    operation: tf.Operation
    index: int
    """Which of its inputs it is."""
    position: int
    """The key by which the caller knows the tensor."""
    moves: tuple[tf.Operation, ...]
    """The operations that have changed the shape or the dtype before."""

    def read(self, tensor: tf.Tensor) -> None:
        """Lets it read another tensor of the same value."""
        for move in self.moves:
            tensor = _moved(move, tensor)
        rewriting.redirect(
            self.operation.inputs[self.index], tensor, [self.operation]
        )


def readers_since(
    tensor: tf.Tensor,
    order: dict[tf.Operation, int],
    begin: int,
    position: int,
    moves: tuple[tf.Operation, ...] = (),
) -> Iterator[Reader]:
    """Yields the readers of a tensor among the operations from one on.

    Args:
        tensor: It, or another shape of it, is read.
        order: See `positions`.
        begin: The place of the first operation that counts.
        position: See `Reader`.
        moves: See `Reader`.
    """
    for operation in tensor.consumers():
        if order.get(operation, 0) >= begin:
            for index, given in enumerate(operation.inputs):
                if given is tensor:
                    yield Reader(operation, index, position, moves)
        elif operation.type in _MOVES and operation.inputs[0] is tensor:
            yield from readers_since(
                operation.outputs[0],
                order,
                begin,
                position,
                (*moves, operation),
            )


def _moved(operation: tf.Operation, tensor: tf.Tensor) -> tf.Tensor:
    """Returns another tensor after the same change of shape or dtype."""
    if operation.type == "Transpose":
        order: Any = operation.inputs[1]
        return tf.transpose(tensor, order)
    if operation.type == "Cast":
        return tf.cast(tensor, operation.outputs[0].dtype)
    if operation.type == "Identity":
        return tensor
    return tf.reshape(tensor, operation.outputs[0].shape)
