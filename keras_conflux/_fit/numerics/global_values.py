"""Computes the values of one device from the values of the replicas.

No tape has recorded what is computed once more, nor the results of
`tf.gradients` for it, so `slopes_of` lets tapes see these.
"""

import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import COUNTED
from keras_conflux._batch_analysis import DERIVED
from keras_conflux._batch_analysis import Derivation
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import derivation_of
from keras_conflux._batch_analysis import mixed_rows
from keras_conflux._batch_analysis import rows
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.gathered_rows import gathered
from keras_conflux._fit.numerics.gathered_rows import own_part
from keras_conflux._graphs import bodies
from keras_conflux._graphs import rewriting
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step


def global_values(tensors: list[tf.Tensor], step: Step) -> list[tf.Tensor]:
    """Returns one device's values for tensors of a replica.

    It raises `NotDerivable` if one of them cannot be computed.
    """
    results = _computed(tensors, step.kinds.whole, step)
    step.kinds.mark_equal(results)
    return results


def _computed(
    tensors: list[tf.Tensor], known: dict[int, tf.Tensor], step: Step
) -> list[tf.Tensor]:
    """Returns one device's values. Some are known, by the ids of tensors."""
    derivations = [derivation_of(x, step.kinds, known) for x in tensors]
    sources = {k: x for each in derivations for k, x in each.sources.items()}
    known = known | reduced_by_role(sources, step)
    return [recomputed(each, known, step) for each in derivations]


def recomputed(
    found: Derivation, known: dict[int, tf.Tensor], step: Step
) -> tf.Tensor:
    """Returns a result of global values, which can be differentiated by them.

    `known` has the global values of sources by their ids, and gets all results.
    """
    gradient = functools.partial(_own_gradient, known=known, step=step)
    return found.recomputed(known, gradient)


def _own_gradient(
    operation: tf.Operation,
    upstream: list[tf.Tensor],
    known: dict[int, tf.Tensor],
    step: Step,
) -> list[tf.Tensor | None]:
    """Returns the derivatives that a program defines, of the global batch.

    The program computes them with tensors of the replica, for stand-ins of the
    upstream derivatives, which it may mix like samples, and the result again.
    """
    if operation.graph is not tf.compat.v1.get_default_graph():
        raise NotDerivable(operation.name)
    stand_ins = [_stand_in(each, step) for each in operation.outputs]
    found = rewriting.own_gradient(operation, stand_ins)
    if found is None:
        raise NotDerivable(operation.name)
    given = known | dict(zip(map(id, stand_ins), upstream, strict=True))
    slopes = _computed([x for x in found if x is not None], given, step)
    return [None if x is None else slopes.pop(0) for x in found]


def _stand_in(output: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns a tensor like one, of values that differ from one device's."""
    made = tf.zeros_like(output)
    kind = step.kinds.of(output)
    is_rows = kind.role is Role.ROWS
    step.kinds.mark(made, mixed_rows([kind], kind.axis) if is_rows else DERIVED)
    return made


def own_rows(tensor: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns this replica's rows of one device's tensor.

    Gradients pass to the contributions of all replicas' samples. It raises
    `NotDerivable` if it cannot be computed, or is made in a loop, which
    gradients do not pass, and refuses tangents.
    """
    found = derivation_of(tensor, step.kinds)
    is_complex = tensor.dtype.is_complex  # by which no gradient would pass
    loops = any(
        bodies.is_or_runs(operation, lambda each: each.type in bodies.LOOPS)
        for operation in found.operations
    )
    if is_complex or loops:
        raise NotDerivable(tensor.name)
    if tensorflow_tracing.has_tangents([*found.sources.values()]):
        raise NotImplementedError(
            f"{step.name}: a `tf.autodiff.ForwardAccumulator` follows "
            f"{tensor.name}, which mixes samples of all replicas. Follow it "
            "with two GradientTapes, the outer one around the gradient by "
            "`output_gradients`, or follow weights through operations that "
            "keep samples apart."
        )
    known = reduced_by_role(found.sources, step)
    whole = recomputed(found, known, step)
    step.kinds.mark_equal([whole])
    own = own_part(whole, tensor, step)
    if tensor.dtype.is_floating:
        own = _passing_gradients(own, found, known, step)
        OwnRows.of(step).note(tensor, own)
    entries = step.kinds.of(tensor).entries
    step.kinds.mark(own, rows(0).with_entries(entries))
    return own


class OwnRows(Part):
    """Tensors in a step that replace the ones whose samples are mixed."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._of: dict[int, tuple[tf.Tensor, list[tf.Tensor]]] = {}

    def note(self, tensor: tf.Tensor, own: tf.Tensor) -> None:
        """Notes the replacement of a tensor. There may be several."""
        self._of.setdefault(id(tensor), (tensor, []))[1].append(own)

    def of_tensor(self, tensor: Any) -> list[tf.Tensor]:
        """Returns the replacements of a tensor."""
        return self._of.get(id(tensor), (tensor, []))[1]


def _passing_gradients(
    value: tf.Tensor, found: Derivation, known: dict[int, tf.Tensor], step: Step
) -> tf.Tensor:
    """Returns a result from which a tape goes on to the replica's sources.

    It is computed of the sources' global values, outside of any tape.
    """
    floating = {
        key: source
        for key, source in found.sources.items()
        if source.dtype.is_floating
        and step.kinds.of(source).role in _DIFFERENTIABLE
    }

    @tf.custom_gradient
    def passed(mixed: tf.Tensor, *sources: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> list[tf.Tensor | None]:
            values = [known[key] for key in floating]
            slopes = slopes_of([value], values, [upstream])
            slopes = _own_slopes([*floating.values()], slopes, step)
            # None: rows that a replica alone has mixed may have no derivative.
            return [None, *slopes]

        del sources
        return tf.identity(value), gradient

    # A tape that watches the mixed tensor has to watch this.
    return passed(found.result, *floating.values())


_DIFFERENTIABLE = (Role.EQUAL, Role.TOTAL, Role.COUNT, Role.MEAN, Role.ROWS)


def _own_slopes(
    sources: list[tf.Tensor], slopes: list[tf.Tensor | None], step: Step
) -> list[tf.Tensor | None]:
    """Returns derivatives by a replica's contributions to global values."""
    fraction = step.batch_fraction
    # A stand-in for missing samples has derivatives of its own.
    slopes = [
        None if x is None else tf.where(fraction > 0, x, tf.zeros_like(x))
        for x in slopes
    ]
    total = replica_collectives().all_reduce("sum", slopes)
    found: list[tf.Tensor | None] = []
    for source, slope, of_all in zip(sources, slopes, total, strict=True):
        if slope is None or step.kinds.of(source).role is Role.EQUAL:
            found.append(slope)  # gradients by equal tensors are summed later
            continue
        own = own_slope(source, of_all, step)
        found.append(tf.where(fraction > 0, own, tf.zeros_like(own)))
    return found


def own_slope(source: tf.Tensor, slope: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns a derivative by a replica's contribution."""
    role = step.kinds.of(source).role
    if role is Role.ROWS:
        return gathered([source], step)[0].own(slope)
    if role in (Role.TOTAL, Role.COUNT):
        return slope
    return slope * tf.cast(step.batch_fraction, slope.dtype)


def reduced_by_role(
    sources: dict[int, tf.Tensor], step: Step
) -> dict[int, tf.Tensor]:
    """Returns the global values of tensors whose kinds are known, by id.

    Tensors that are reduced in the same way are reduced in one call.
    """
    fraction = step.batch_fraction
    collectives = replica_collectives()
    kinds = {key: step.kinds.of(x) for key, x in sources.items()}
    values: dict[int, tf.Tensor] = {}

    def put(role: Role, reduce: Callable) -> None:
        keys = [key for key, kind in kinds.items() if kind.role is role]
        if not keys:
            return
        reduced = reduce([sources[key] for key in keys])
        values.update(zip(keys, reduced, strict=True))

    def summand(x: tf.Tensor) -> tf.Tensor:
        if step.kinds.of(x) != COUNTED:
            return tf.where(fraction > 0, x, tf.zeros_like(x))
        if step.turns is None:
            return x
        # All turns of a replica read the counts of the replica.
        return tf.where(step.turns.is_first_here, x, tf.zeros_like(x))

    def total(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        return collectives.all_reduce("sum", [*map(summand, tensors)])

    def gather(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        numbers = [
            _encoded(each, step) if each.dtype == tf.string else each
            for each in tensors
        ]
        return [
            _decoded(rows.all) if each.dtype == tf.string else rows.all
            for each, rows in zip(tensors, gathered(numbers, step), strict=True)
        ]

    def counts(tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if step.in_xla:  # shards are even, and XLA has to know shapes
            return [tensor * collectives.count for tensor in tensors]
        return total(tensors)

    put(Role.EQUAL, list)
    put(Role.RANDOM, lambda drawn: collectives.broadcast(drawn, 0))
    put(Role.TOTAL, total)
    put(Role.COUNT, counts)
    put(Role.MEAN, lambda means: collectives.weighted_sum(means, fraction))
    put(Role.ROWS, gather)
    for key, kind in kinds.items():
        if kind.role is Role.SHAPE:
            at = tf.range(tf.size(sources[key])) == kind.axis
            values[key] = tf.where(at, counts([sources[key]])[0], sources[key])
    return values


def _encoded(strings: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns the bytes and the length of each string, along a new last axis.

    All replicas call it together, as the longest string of all sets the size.
    """
    lengths = tf.strings.length(strings)
    longest = tf.maximum(tf.reduce_max(lengths), 1)
    width = replica_collectives().all_reduce("max", [longest])[0]
    codes = tf.io.decode_raw(strings, tf.uint8, fixed_length=width)
    codes = tf.cast(codes, lengths.dtype)
    codes = tf.concat([codes, lengths[..., tf.newaxis]], -1)
    step.kinds.mark(codes, step.kinds.of(strings))
    return codes


def _decoded(codes: tf.Tensor) -> tf.Tensor:
    """Returns the strings that were encoded."""
    characters = tf.constant([bytes([code]) for code in range(256)])
    width = tf.shape(codes)[-1] - 1
    bytes_of_each, lengths = tf.split(codes, [width, 1], -1)
    lengths = tf.squeeze(lengths, -1)
    padded = tf.strings.reduce_join(tf.gather(characters, bytes_of_each), -1)
    return tf.strings.substr(padded, tf.zeros_like(lengths), lengths)


def slopes_of(
    results: Sequence[tf.Tensor],
    sources: Sequence[tf.Tensor],
    upstream: Sequence[tf.Tensor] | None = None,
    others: Sequence[tf.Tensor] = (),
) -> list[tf.Tensor | None]:
    """Returns derivatives, which a tape can differentiate further.

    All are floating tensors. `upstream` are the derivatives by the results,
    ones by default. The results may be made of `others` besides. The derivative
    by a source of which no result is made is `None`.
    """
    if upstream is None:
        upstream = [tf.ones_like(each) for each in results]
    # Each of the sources is held, also where one is computed of another.
    found = tf.gradients(
        [*results], [*sources], [*upstream], stop_gradients=[*sources]
    )
    given = [tf.convert_to_tensor(x) for x in found if x is not None]
    seen = iter(_recorded(given, [*sources, *others, *upstream]))
    return [None if each is None else next(seen) for each in found]


def _recorded(
    results: list[tf.Tensor], sources: list[tf.Tensor]
) -> list[tf.Tensor]:
    @tf.custom_gradient
    def passed(*_: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> list[tf.Tensor | None]:
            return slopes_of(results, sources, upstream)

        return [tf.identity(each) for each in results], gradient

    return list(passed(*sources)) if results else []
