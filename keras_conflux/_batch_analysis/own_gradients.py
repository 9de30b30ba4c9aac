"""Finds out whether gradients that a program defines mix samples.

`tf.custom_gradient` makes an operation whose outputs tell nothing of how it is
differentiated. Its function is tried out on random derivatives, as operations
are on random rows.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._batch_analysis import trial
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._compat import tensorflow_graphs
from keras_conflux._replication.steps import Step

_KNOWN = (Role.EQUAL, Role.RANDOM, Role.ROWS)


def between(
    output: tf.Tensor, given: Iterable[tf.Tensor], step: Step
) -> list[tf.Operation]:
    """Returns operations of which a program defines the gradient.

    Args:
        output: A tensor.
        given: Tensors of which it is computed.
        step: The replica's.
    """
    ends = {id(tensor) for tensor in given}
    return [
        operation
        for operation in _operations(output, ends, step)
        if tensorflow_graphs.defines_gradient(operation)
    ]


def depending_on_mixed(
    loss: tf.Tensor,
    ends: Collection[int],
    tried: Collection[int],
    step: Step,
) -> set[int]:
    """Returns the ids of tensors whose gradients depend on the whole batch.

    Args:
        loss: They are what leads to it from the outputs of layers, and it.
        ends: The ids of these outputs.
        tried: The ids of operations that have been tried with their layers.
        step: The replica's.
    """
    found: set[int] = set()
    leading = list(_operations(loss, ends, step))
    if not any(map(tensorflow_graphs.defines_gradient, leading)):
        return found
    for operation in tensorflow_graphs.in_order(leading, loss.graph):
        if any(id(each) in found for each in operation.inputs) or (
            id(operation) not in tried
            and tensorflow_graphs.defines_gradient(operation)
            and (_reduces(operation, step) or may_mix(operation, step))
        ):
            found.update(map(id, operation.outputs))
    return found


def _reduces(operation: tf.Operation, step: Step) -> bool:
    kinds = [step.kinds.of(each) for each in operation.outputs]
    return any(kind.role not in _KNOWN for kind in kinds)


def _operations(
    output: tf.Tensor, ends: Collection[int], step: Step
) -> Iterator[tf.Operation]:
    """Yields what makes an output of tensors that are known, or marked."""
    waiting, seen = [output], set()
    while waiting:
        tensor = waiting.pop()
        if tensorflow_graphs.is_eager(tensor):
            continue
        operation = tensor.op
        if id(tensor) in ends or id(operation) in seen:
            continue
        marked = step.kinds.marked(tensor)
        if marked and marked.role in _KNOWN and tensor is not output:
            continue
        seen.add(id(operation))
        yield operation
        waiting.extend(operation.inputs)


def may_mix(operation: tf.Operation, step: Step) -> bool:
    """Whether a gradient mixes samples, or cannot be tried out."""
    try:
        return mixes(operation, step)
    except NotDerivable:
        return True


def mixes(operation: tf.Operation, step: Step) -> bool:
    """Whether the gradient of an operation depends on the batch as a whole.

    The derivatives by rows have to be those of each row, and derivatives by
    what all replicas share have to be sums.

    Raises:
        NotDerivable: If it cannot be tried out.
    """
    graph = tf.__internal__.FuncGraph("gradient", capture_by_value=False)
    tensors = [*operation.outputs, *operation.inputs]
    if any(_kind(each, step) is None for each in tensors):
        raise NotDerivable(operation.name)
    with graph.as_default():
        upstream = [_upstream(each, step) for each in operation.outputs]
        found = tensorflow_graphs.own_gradient(operation, upstream) or []
        for source, slope in zip(operation.inputs, found, strict=False):
            if slope is not None and _is_mixed(slope, source, step):
                return True
    return False


def _kind(tensor: tf.Tensor, step: Step) -> Kind | None:
    """Returns ROWS or EQUAL, if a tensor is one of these.

    What a graph inside of the step's is given is not known yet.
    """
    kind = step.kinds.of(tensor)
    if kind == EQUAL:
        return kind
    if kind.role is Role.ROWS and not kind.is_out_of_order and kind.axis == 0:
        return kind
    is_inner = tensor.graph is not step.graph
    if kind.role is Role.OPAQUE and is_inner and tensor.shape.rank:
        return rows(0)
    return None


def _upstream(output: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns derivatives by an output, of which each sample adds its own."""
    shape = output.shape.as_list()
    if _kind(output, step) == EQUAL:
        made = tf.compat.v1.placeholder(output.dtype, [None, *shape])
        step.kinds.mark(made, rows(0))
        return tf.reduce_sum(made, 0)
    made = tf.compat.v1.placeholder(output.dtype, [None, *shape[1:]])
    step.kinds.mark(made, rows(0))
    return made


def _is_mixed(slope: tf.Tensor, source: tf.Tensor, step: Step) -> bool:
    if _kind(source, step) != EQUAL:
        return trial.rows_of(slope, step) is None
    count = tf.cast(tf.size(slope), slope.dtype)
    weights = tf.reshape(tf.cos(tf.range(count)), tf.shape(slope))
    total = tf.reduce_sum(slope * weights)
    return trial.statistic_of(total, step) != TOTAL
