"""Finds out whether gradients that a program defines mix samples.

`tf.custom_gradient` makes an operation whose outputs tell nothing of how it is
differentiated. Its function is tried out on random derivatives, as operations
are on random rows.
"""

from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator

import tensorflow as tf

from keras_conflux._batch_analysis import traced_graphs
from keras_conflux._batch_analysis import trial
from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows

_KNOWN = (Role.EQUAL, Role.RANDOM, Role.ROWS)


class OwnGradients:
    """Which operations of a step have gradients that a program defines.

    Args:
        kinds: Those of the step's tensors.
    """

    def __init__(self, kinds: KindInference) -> None:
        self._kinds = kinds
        self._outputs: set[int] = set()
        self._known: set[int] = set()

    def between(
        self, outputs: Iterable[tf.Tensor], given: Iterable[tf.Tensor]
    ) -> Iterator[tf.Operation]:
        """Yields those of a layer that have not been asked for.

        Args:
            outputs: What the layer returns.
            given: Tensors of which that is computed.
        """
        ends = {id(tensor) for tensor in given}
        for output in outputs:
            self._outputs.add(id(output))
            for operation in _operations(output, ends, self._kinds):
                is_new = id(operation) not in self._known
                if is_new and traced_graphs.defines_gradient(operation):
                    self._known.add(id(operation))
                    yield operation

    def trust(self, operation: tf.Operation) -> None:
        """Says that a gradient, as the package's own, does not mix samples."""
        self._known.add(id(operation))

    def depending_on_mixed(self, loss: tf.Tensor) -> set[int]:
        """Returns the ids of tensors whose gradients depend on the whole batch.

        Args:
            loss: They are what leads to it from the outputs of layers, and it.
        """
        found: set[int] = set()
        leading = list(_operations(loss, self._outputs, self._kinds))
        if not any(map(traced_graphs.defines_gradient, leading)):
            return found
        for operation in traced_graphs.in_order(leading, loss.graph):
            if any(id(each) in found for each in operation.inputs) or (
                id(operation) not in self._known
                and traced_graphs.defines_gradient(operation)
                and (
                    _reduces(operation, self._kinds) or self._may_mix(operation)
                )
            ):
                found.update(map(id, operation.outputs))
        return found

    def _may_mix(self, operation: tf.Operation) -> bool:
        """Whether a gradient mixes samples, or cannot be tried out."""
        try:
            return self.mixes(operation)
        except NotDerivable:
            return True

    def mixes(self, operation: tf.Operation) -> bool:
        """Whether the gradient of an operation depends on the batch as a whole.

        The derivatives by rows have to be those of each row, and derivatives by
        what all replicas share have to be sums.

        Raises:
            NotDerivable: If it cannot be tried out.
        """
        kinds = self._kinds
        graph = tf.__internal__.FuncGraph("gradient", capture_by_value=False)
        tensors = [*operation.outputs, *operation.inputs]
        if any(_kind(each, kinds) is None for each in tensors):
            raise NotDerivable(operation.name)
        with graph.as_default():
            upstream = [_upstream(each, kinds) for each in operation.outputs]
            found = traced_graphs.own_gradient(operation, upstream) or []
            for source, slope in zip(operation.inputs, found, strict=False):
                if slope is not None and _is_mixed(slope, source, kinds):
                    return True
        return False


def _reduces(operation: tf.Operation, kinds: KindInference) -> bool:
    return any(kinds.of(each).role not in _KNOWN for each in operation.outputs)


def _operations(
    output: tf.Tensor, ends: Collection[int], kinds: KindInference
) -> Iterator[tf.Operation]:
    """Yields what makes an output of tensors that are known, or marked."""
    waiting, seen = [output], set()
    while waiting:
        tensor = waiting.pop()
        if traced_graphs.is_eager(tensor):
            continue
        operation = tensor.op
        if id(tensor) in ends or id(operation) in seen:
            continue
        marked = kinds.marked(tensor)
        if marked and marked.role in _KNOWN and tensor is not output:
            continue
        seen.add(id(operation))
        yield operation
        waiting.extend(operation.inputs)


def _kind(tensor: tf.Tensor, kinds: KindInference) -> Kind | None:
    """Returns ROWS or EQUAL, if a tensor is one of these.

    What a graph inside of the step's is given is not known yet.
    """
    kind = kinds.of(tensor)
    if kind == EQUAL:
        return kind
    if kind.role is Role.ROWS and not kind.is_out_of_order and kind.axis == 0:
        return kind
    is_inner = tensor.graph is not kinds.graph
    if kind.role is Role.OPAQUE and is_inner and tensor.shape.rank:
        return rows(0)
    return None


def _upstream(output: tf.Tensor, kinds: KindInference) -> tf.Tensor:
    """Returns derivatives by an output, of which each sample adds its own."""
    shape = output.shape.as_list()
    if _kind(output, kinds) == EQUAL:
        made = tf.compat.v1.placeholder(output.dtype, [None, *shape])
        kinds.mark(made, rows(0))
        return tf.reduce_sum(made, 0)
    made = tf.compat.v1.placeholder(output.dtype, [None, *shape[1:]])
    kinds.mark(made, rows(0))
    return made


def _is_mixed(
    slope: tf.Tensor, source: tf.Tensor, kinds: KindInference
) -> bool:
    if _kind(source, kinds) != EQUAL:
        return trial.rows_by_trial(slope, kinds) is None
    count = tf.cast(tf.size(slope), slope.dtype)
    weights = tf.reshape(tf.cos(tf.range(count)), tf.shape(slope))
    total = tf.reduce_sum(slope * weights)
    return trial.statistic_by_trial(total, kinds) != TOTAL
