"""The operations between tensors with known global values and a result."""

import dataclasses
from collections.abc import Collection
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.rule import of_a_sample
from keras_conflux._graphs import effects
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks

MAX_OPERATIONS = 300
"""How many operations are computed once more at most."""

MAX_ENTRIES = 1 << 17
"""How many entries per sample are gathered at most."""

_OF_SHAPES = (Role.EQUAL, Role.COUNT, Role.SHAPE)
_KNOWN = (*_OF_SHAPES, Role.TOTAL, Role.MEAN, Role.RANDOM)
"""Their values on one device can be had, as of ROWS that do not mix."""


class NotDerivable(Exception):
    """A graph does not show how a value is made of samples."""


@dataclasses.dataclass
class Derivation:
    """The operations between known tensors and a result.

    Args:
        result: The computed tensor.
        sources: By their ids, the known tensors.
        operations: The operations between, in the order of their computation,
            and the captures.
        outside: By the ids of an inner graph's captures, the tensors outside.
    """

    result: tf.Tensor
    sources: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)
    operations: list[tf.Operation] = dataclasses.field(default_factory=list)
    outside: dict[int, tf.Tensor] = dataclasses.field(default_factory=dict)

    def recomputed(
        self,
        known: dict[int, tf.Tensor],
        gradient: rewriting.Gradient | None = None,
    ) -> tf.Tensor:
        """Returns the result for other values of the sources, by their ids.

        Computed values are added to `known`.
        """

        def copy(operation: tf.Operation, inputs: list[tf.Tensor]) -> Any:
            captured = self.outside.get(id(operation.outputs[0]))
            if captured is not None:
                return [known[id(captured)]]
            return rewriting.copied(operation, inputs, gradient)

        rewriting.copy_region(self.operations, known, copy)
        return known[id(self.result)]


def derivation_of(
    result: tf.Tensor,
    kinds: KindInference,
    known: Collection[int] = (),
    made: Collection[int] = (),
) -> Derivation:
    """Follows a result back to tensors whose global values can be had.

    The values of others are `known` by their ids. Tensors of the ids in `made`
    are computed once more in any case. It raises `NotDerivable` if it cannot.
    """
    found = Derivation(result)
    entered: set[tf.Operation] = set()

    def needs(tensor: tf.Tensor) -> Iterable[tf.Tensor]:
        if id(tensor) in known:
            return ()
        if id(tensor) in made and kinds.marked(tensor) is not None:
            raise NotDerivable(tensor.op.name)
        if id(tensor) not in made and _is_known(tensor, kinds):
            _assert_small(tensor, kinds.of(tensor))
            found.sources[id(tensor)] = tensor
            return ()
        outside = kinds.outside(tensor)
        if outside is not None:
            found.outside[id(tensor)] = outside
            return [outside]
        _assert_repeatable(tensor, kinds.of(tensor))
        entered.add(tensor.op)
        if len(entered) > MAX_OPERATIONS:
            raise NotDerivable(tensor.op.name)
        return tensor.op.inputs

    in_order = walks.by_need([result], needs)
    given = {*known, *found.sources}
    computed = [each.op for each in in_order if id(each) not in given]
    found.operations = [*dict.fromkeys(computed)]
    return found


def _assert_small(tensor: tf.Tensor, kind: Kind) -> None:
    """Raises for tensors too large, or not of one size, to be exchanged."""
    if kind.role is Role.ROWS and (
        tensor.shape.rank is None or of_a_sample(tensor) > MAX_ENTRIES
    ):
        raise NotDerivable(tensor.op.name)


def _assert_repeatable(tensor: tf.Tensor, kind: Kind) -> None:
    operation = tensor.op
    if (
        kind.role is Role.OPAQUE
        or operation.type == "Placeholder"
        or not effects.is_repeatable(operation)
    ):
        raise NotDerivable(operation.name)


def _needs_others(tensor: tf.Tensor, kinds: KindInference) -> bool:
    """Whether computing it needs other samples, as for a shape of their tensor.

    The shape is known, but the tensor itself may be impossible to compute
    from the samples of one replica, as the best 3 of 2.
    """

    def behind(each: tf.Tensor) -> Iterable[tf.Tensor]:
        is_of_shape = kinds.of(each).role in _OF_SHAPES
        is_found = is_of_shape and kinds.marked(each) is None
        return each.op.inputs if is_found else ()

    walked = walks.walked([tensor], behind)
    return any(kinds.of(each).needs_all_samples for each in walked)


def _is_known(tensor: tf.Tensor, kinds: KindInference) -> bool:
    if tensor.dtype == tf.variant:  # a list, whose elements are known before
        return False
    kind = kinds.of(tensor)
    if tensor.dtype.is_complex and kind.role is not Role.EQUAL:
        return False  # of which its parts are known, and can be exchanged
    if kind.role is Role.ROWS:
        return not kind.depends_on_other_samples
    if kind.role is Role.RANDOM and not tensor.shape.is_fully_defined():
        return False  # which cannot be sent
    return kind.role in _KNOWN and not _needs_others(tensor, kinds)
