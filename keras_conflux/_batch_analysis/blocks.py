"""Tensors of rows that were joined of others, and the number of such rows."""

import functools
import math
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import Block
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._graphs import bodies
from keras_conflux._graphs import walks


def split_blocks(tensor: tf.Tensor, kind: Kind) -> list[tf.Tensor]:
    """Returns the blocks of rows of a replica, or of all, in their order."""
    if kind.blocks == 1:
        return [tensor]
    total = _length(tensor, kind.axis)
    lengths = _lengths(kind.joined, kind.blocks, total)
    return tf.split(tensor, lengths, kind.axis)


def counted_rows(
    size: tf.Tensor, axis: int, kinds: KindInference
) -> tuple[Kind, list[Any], bool]:
    """Returns the kind of the rows, along an axis, that a COUNT counts.

    With it come the lengths of their blocks, and whether the COUNT is a
    multiple of a number, or a sum of several.
    """
    blocks = _blocks(size, kinds)
    lengths = [size]
    if len(blocks) > 1 or any(block.kind.blocks > 1 for block in blocks):
        lengths = [
            tf.shape(part)[block.kind.axis]
            for block in blocks
            for part in split_blocks(*block)
        ]
    one_each = len(blocks) == 1 and blocks[0].one_each
    kind = Kind(
        Role.ROWS,
        axis,
        Entries.ONE if one_each else Entries.SAME,
        blocks=len(lengths),
        joined=blocks[0].kind.joined if len(blocks) == 1 else tuple(blocks),
    )
    return kind, lengths, len(blocks) > 1


def _blocks(size: tf.Tensor, kinds: KindInference) -> list[Block]:
    """Returns the tensors whose rows a number counts, if that is shown."""
    inputs = list(size.op.inputs)
    nested = functools.partial(_blocks, kinds=kinds)
    if size.op.type in ("Cast", "Identity"):
        return nested(inputs[0])
    if size.op.type in ("Add", "AddV2"):
        found = [nested(each) for each in inputs]
        return [*found[0], *found[1]] if all(found) else []
    if size.op.type == "Mul":
        for one, other in (inputs, reversed(inputs)):
            factor = tf.get_static_value(one)
            if factor is not None:
                return nested(other) * int(factor)
    if size.op.type in ("StridedSlice", "Unpack"):
        shape = inputs[0].op
        if shape.type == "Shape":
            return [Block(shape.inputs[0], kinds.of(shape.inputs[0]))]
    return []


def _lengths(joined: tuple[Block, ...], blocks: int, total: Any) -> list[Any]:
    """Returns how long blocks are that are `total` rows together."""
    if not all(bodies.is_reachable(each.tensor) for each in joined):
        joined = ()
    if not joined:
        return [total // blocks] * blocks
    lengths = [_length(each.tensor, each.kind.axis) for each in joined]
    whole = sum(lengths)
    found = []
    for each, length in zip(joined, lengths, strict=True):
        # Products of two lengths need more than 32 bits.
        share = _wide(length) * _wide(total) // _wide(whole)
        found.extend(_lengths(each.kind.joined, each.kind.blocks, share))
    return found


def _length(tensor: tf.Tensor, axis: int) -> Any:
    known = tensor.shape[axis]
    return tf.shape(tensor)[axis] if known is None else known


def _wide(length: Any) -> Any:
    return length if isinstance(length, int) else tf.cast(length, tf.int64)


def are_of_a_sample(drawn: tf.Tensor, kind: Kind, kinds: KindInference) -> bool:
    """Whether rows that follow each other are used as one sample's.

    They are a multiple of the samples. `kind` is theirs in joined batches.
    """
    known = {id(drawn): kind}
    waiting = [drawn]

    def follow(tensor: tf.Tensor, rows: Kind) -> None:
        if rows.blocks == kind.blocks and id(tensor) not in known:
            known[id(tensor)] = rows
            waiting.append(tensor)

    while waiting:
        tensor = waiting.pop()
        for operation in tensor.consumers():
            inputs = [known.get(id(x)) or kinds.of(x) for x in operation.inputs]
            if _groups(operation, inputs, known[id(tensor)].axis):
                return True
            found = rules.kinds_of_outputs(operation, inputs)
            for output, each in zip(operation.outputs, found, strict=True):
                follow(output, each)
        for each in walks.in_other_graphs(tensor):
            follow(each, known[id(tensor)])
    return False


def _groups(operation: tf.Operation, inputs: list[Kind], axis: int) -> bool:
    """Whether an operation takes rows that follow each other together."""
    if operation.type == "Reshape":
        return _groups_rows(operation, axis)
    if operation.type == "StridedSlice":
        return _takes_every_other(operation, axis)
    is_beside = _puts_beside(operation, axis)
    return is_beside and any(kind.has_several_each for kind in inputs)


def _puts_beside(operation: tf.Operation, axis: int) -> bool:
    """Whether a row is made of one row of each of several inputs."""
    if operation.type != "ConcatV2":
        return len(rules.sources_of_entries(operation)) > 1
    along = tf.get_static_value(operation.inputs[-1])
    rank = operation.outputs[0].shape.rank
    return along is not None and rank is not None and along % rank != axis


def _groups_rows(reshape: tf.Operation, axis: int) -> bool:
    """Whether a row after a reshape is made of several rows before."""
    before, after = (
        tensor.shape.as_list() if tensor.shape.rank is not None else []
        for tensor in (reshape.inputs[0], reshape.outputs[0])
    )
    if before[:axis] != after[:axis] or after[axis : axis + 1] != [None]:
        return False
    rests = before[axis + 1 :], after[axis + 1 :]
    if len({rest.count(None) for rest in rests}) > 1:
        return False
    one, other = (
        math.prod(size for size in rest if size is not None) for rest in rests
    )
    return other > one


def _takes_every_other(part: tf.Operation, axis: int) -> bool:
    """Whether it is `rows[::2]`, which takes the first row of each sample."""
    steps = tf.get_static_value(part.inputs[3])
    masks = part.get_attr("ellipsis_mask") | part.get_attr("new_axis_mask")
    if steps is None or masks or axis >= len(steps):
        return False
    return bool(steps[axis] > 1)
