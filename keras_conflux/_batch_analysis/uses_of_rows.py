"""Tells by their use whether drawn rows are several of each sample.

A shape such as `(2 * n, 4)` says only how many rows there are. They belong to
two batches, one after the other, unless the program groups rows that follow
each other, or combines them with several rows of each sample.
"""

import math

import tensorflow as tf

from keras_conflux._batch_analysis import rules
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._graphs import walks


def are_of_one_sample(
    drawn: tf.Tensor, kind: Kind, kinds: KindInference
) -> bool:
    """Whether rows that follow each other are used as one sample's.

    Args:
        drawn: As many rows as a multiple of the number of samples.
        kind: Their kind if they belong to joined batches.
        kinds: The kinds of the step's tensors.
    """
    known = {id(drawn): kind}
    waiting = [drawn]

    def kind_of(tensor: tf.Tensor) -> Kind:
        return known.get(id(tensor)) or kinds.of(tensor)

    def follow(tensor: tf.Tensor, rows: Kind) -> None:
        if rows.blocks == kind.blocks and id(tensor) not in known:
            known[id(tensor)] = rows
            waiting.append(tensor)

    while waiting:
        tensor = waiting.pop()
        for operation in tensor.consumers():
            inputs = [kind_of(x) for x in operation.inputs]
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
