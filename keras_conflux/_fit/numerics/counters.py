"""The sums of metrics, to which each replica adds the part of its samples.

The copies of such a variable add up to its value. While steps run, each replica
counts its own samples. Between executions each process has the whole sum, in
the copy of its first replica, so that a metric reads, is saved and is reset as
in one process.
"""

import contextlib
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.global_batch.derivation import NotDerivable
from keras_conflux._fit.global_batch.kinds import COUNTED
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._replication import state
from keras_conflux._replication.steps import Part
from keras_conflux._replication.steps import Step
from keras_conflux._replication.strategy import rank_as_tensor
from keras_conflux._replication.strategy import replica_collectives
from keras_conflux._replication.strategy import replica_index
from keras_conflux._replication.strategy import replica_rank

SUMS = ("Add", "AddV2", "Sub")
"""Operations that add a change to what a variable was."""


def is_counter(variable: keras.Variable) -> bool:
    """Whether the copies of a variable add up to its value."""
    has_copies = replica_collectives().count > 1  # here or elsewhere
    return has_copies and not state.is_mirrored(variable)


def own_share(variable: keras.Variable, value: Any, step: Step) -> tf.Tensor:
    """Returns this replica's share of what a metric's variable is set to.

    The copies add up to the value. What a stand-in for samples would add is
    left out.
    """
    value = keras_variables.as_tensor(value, variable.dtype)
    of_keras = _CountersOfKeras.of(step).has(variable)
    value, without_samples = _share(value, step, of_keras)
    if step.may_be_empty:
        if without_samples is None:
            without_samples = variable.value
        value = tf.where(step.batch_fraction > 0, value, without_samples)
    step.kinds.mark(value, COUNTED)
    return value


def _share(value: tf.Tensor, step: Step, is_sum: bool) -> tuple[tf.Tensor, Any]:
    """Returns parts that add up to what one device would set.

    Args:
        value: What a replica would set.
        step: The replica's.
        is_sum: Whether what is added is known to be a sum over samples, if
            the graph does not show it.

    Returns:
        The part of a replica, and of one that has no samples, if it is known.
    """
    terms = list(value.op.inputs) if value.op.type in SUMS else [value]
    kinds = [step.kinds.of(term) for term in terms]
    kept = [kind == COUNTED for kind in kinds]
    if all(kept):
        return value, value
    if kept == [True, False]:
        if is_sum and kinds[1].role is Role.DERIVED:
            return value, terms[0]
        change = _share_of_change(terms[1], kinds[1], step)
        if change is not terms[1]:
            adds = value.op.type != "Sub"
            value = terms[0] + change if adds else terms[0] - change
        return value, terms[0]
    if any(kept):
        return value, None
    kind = step.kinds.of(value)
    part = _share_of_change(value, kind, step)
    is_sum = kind.role in (Role.TOTAL, Role.COUNT) or part is not value
    return part, tf.zeros_like(part) if is_sum else None


def _share_of_change(change: tf.Tensor, kind: Kind, step: Step) -> tf.Tensor:
    if kind.role is Role.DERIVED:
        # As a root of a mean, or a largest value: the first copy has all of
        # it, as it has what is equal on all.
        with contextlib.suppress(NotDerivable):
            change, kind = global_values([change], step)[0], EQUAL
    if kind == EQUAL:
        return _if_first(change, step)
    if kind.role is Role.MEAN and change.dtype.is_floating:
        return change * tf.cast(step.batch_fraction, change.dtype)
    return change


def _if_first(value: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns a value on the replica of the first samples, zeros elsewhere."""
    with tensorflow_tracing.of_rank():
        here = has_first(step)
        return tf.identity(value) if here is True else tf.where(here, value, 0)


def has_first(step: Step) -> Any:
    """Whether a replica has the first samples of the global batch.

    Where processes bring their own parts, replica 0 may have none.
    """
    if process_count() == 1 or not step.may_be_empty:
        return rank_as_tensor() == 0
    return (step.batch_fraction > 0) & (step.place().before == 0)


class _CountersOfKeras(Part):
    """Tells to which variables metrics of Keras add sums over samples."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._known: dict[int, bool] = {}

    def has(self, variable: keras.Variable) -> bool:
        """Whether a variable is one of these."""
        if id(variable) not in self._known:  # a step may make metrics
            self._known = self._read()
        return self._known.setdefault(id(variable), False)

    def _read(self) -> dict[int, bool]:
        found: dict[int, bool] = {}
        for owner in state.stateful_objects(self.step.model):
            if isinstance(owner, keras.metrics.Metric):
                module = type(owner).update_state.__module__
                of_keras = module.startswith("keras.")
                # Keras holds those of one's own in a metric of its own.
                for key in map(id, owner.variables):
                    found[key] = of_keras and found.get(key, True)
        return found


def handles_of_sums(model: keras.Model) -> list[Any]:
    """Returns the handles of this replica's copies that add up to a value."""
    return [
        tensorflow_internals.handle_of(state.copies(v)[replica_index()])
        for v in state.sums_of(model)
    ]


def zero_all_but_first(model: keras.Model) -> None:
    """Leaves the sums with the first replica of all processes.

    Traced in a replica, before its steps.
    """
    copies = _copies(model)
    if not copies or replica_rank() == 0:
        return

    # In a graph of its own: to the step, what it reads is a sum over samples.
    @tf.function(autograph=False)
    def begin() -> None:
        for copy in copies:
            copy.assign(tf.zeros_like(copy))

    begin()


def all_reduce_sums(model: keras.Model) -> None:
    """Gives all processes the sums of all. Traced after a replica's steps."""
    copies = _copies(model)
    if not copies:
        return
    values = [copy.read_value() for copy in copies]
    sums = replica_collectives().all_reduce("sum", values)
    is_first = replica_index() == 0
    for copy, total in zip(copies, sums, strict=True):
        copy.assign(total if is_first else tf.zeros_like(total))


def _copies(model: keras.Model) -> list[tf.Variable]:
    """Returns this replica's copies, if there are other processes."""
    if process_count() == 1:
        return []
    return [state.copies(v)[replica_index()] for v in state.sums_of(model)]
