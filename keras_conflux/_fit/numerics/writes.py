"""The writes of a step to variables become the writes of one device.

Tensors of graphs inside of the step's cannot be used at its end. So replicas
exchange their values at the place of the write, if all of them come there.
"""

import collections
import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._common.contexts import having
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics import late_writes
from keras_conflux._fit.numerics.choices import Choices
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.exit import TraceAgain
from keras_conflux._fit.numerics.exit import TraceFindings
from keras_conflux._fit.numerics.global_values import global_values
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.strategy import is_replicated

_Values = list[tf.Tensor]


def assign(original: Callable, variable: Any, value: Any) -> Any:
    """Writes to a variable, which a step of `fit` notes."""
    writes, step = _recording(), steps.current()
    if writes is not None:
        value = writes.to_write(variable, value)
    elif step is not None and step.is_updating:
        Writes.of(step).note_copies(variable)  # or is noted, as a constraint's
    elif step is not None and late_writes.is_counter(variable):
        value = late_writes.of_rows(variable, value, step)
    return original(variable, value)


def add(original: Callable, variable: Any, value: Any) -> Any:
    """Adds to a variable, whose former value a step of `fit` notes."""
    writes = _recording()
    if writes is not None:
        value = writes.to_add(variable, value)
    return original(variable, value)


def _recording() -> "Writes | None":
    """Returns a step's writes. An optimizer's values are equal already."""
    step = steps.current_fit_step()
    if step is None or tf.executing_eagerly():
        return None  # in `tf.init_scope`, it is written once, and not by steps
    return None if step.is_updating else Writes.of(step)


def not_recording() -> contextlib.AbstractContextManager[None]:
    """Marks a seed generator's write of its state in this replica."""
    step = steps.current()
    if step is None:
        return contextlib.nullcontext()
    return having(Writes.of(step), _is_of_package=True)


class Writes(Exit):
    """The writes to variables in a step, but for an optimizer's.

    These are weights or others, such as a learning rate or a metric's counts.
    """

    def __init__(self, step: steps.Step) -> None:
        super().__init__(step)
        self._all: dict[int, keras.Variable] = {}
        self._times: collections.Counter[int] = collections.Counter()
        self._by_program: dict[int, keras.Variable] = {}
        self._is_of_package = False
        self._before: dict[int, Any] = {}
        self._own_statistics: set[int] = set()
        self._untracked: dict[int, keras.Variable] = {}

    def assert_tracked(self) -> None:
        """Raises `TraceAgain` if the step has written single copies."""
        if self._untracked:
            raise TraceAgain(TraceFindings(untracked=self._untracked))

    def variables(self) -> list[keras.Variable]:
        """Returns all that the step has written."""
        return [*self._all.values()]

    @property
    def count(self) -> int:
        """How often the step has written any variable until here."""
        return self._times.total()

    def times(self, variables: Iterable[Any]) -> int:
        """Returns how often the step has written variables until here."""
        return sum(self._times[id(variable)] for variable in variables)

    def keep_own_statistics(self, variables: Iterable[Any]) -> None:
        """Keeps the mean of statistics that are a replica's own samples'."""
        self._own_statistics.update(map(id, variables))

    def to_write(self, variable: keras.Variable, value: Any) -> Any:
        """Notes a write of a variable, and returns the value to write.

        The summand of a stand-in for samples to a metric is left out.
        """
        together = Choices.of(self.step).come_together()
        self._note(variable, value)
        self.step.kinds.notice(tf.compat.v1.get_default_graph())
        if late_writes.is_counter(variable):
            return late_writes.own_share(variable, value, self.step, together)
        if self._is_of_package:
            return value
        is_own = id(variable) in self._own_statistics
        if self.step.turns is None:
            is_alone = replica_collectives().count == 1
            if is_own or is_alone or not together:
                return value
        elif is_own:  # it is written once, after all turns
            value = keras_variables.as_tensor(value, variable.dtype)
            fraction = self.step.batch_fraction
            value = replica_collectives().weighted_sum(value, fraction)
            self.step.kinds.mark_equal([value])
        return _exchanged(variable, value, self.step)

    def _note(self, variable: keras.Variable, value: Any) -> None:
        self._all.setdefault(id(variable), variable)
        self._times[id(variable)] += 1
        if not self._is_of_package:
            self._by_program.setdefault(id(variable), variable)
        if (
            self.note_copies(variable)
            and not self._is_of_package
            and state.is_mirrored(variable)
            and self.step.known_sizes
            and not self.step.kinds.depends_on_samples(value)
        ):
            self.counted = (
                f"sets the variable {state.name_of(variable)!r} to a constant, "
                "or adds one"
            )

    def note_copies(self, variable: keras.Variable) -> bool:
        """Notes it if replicas have no copies. Returns whether they have."""
        backing = keras_variables.backing(variable)
        if backing is None or replica_collectives().count == 1:
            return False
        if not is_replicated(backing):
            self._untracked[id(variable)] = variable
        return is_replicated(backing)

    def to_add(self, variable: keras.Variable, value: Any) -> Any:
        """Notes the value of a variable before the step first added to it.

        Only where the graph of the step does not show the summand, as in graphs
        inside of it. There, a value computed from the batch, such as a sample
        count, is summed over the replicas, and a value computed from the
        variable itself, such as `v -= 0.1 * (v - mean)`, is averaged.
        """
        here = tf.compat.v1.get_default_graph() is self.step.graph
        is_shown = here and not self.step.kinds.is_blind
        if id(variable) in self._all or is_shown:
            return value
        if isinstance(value, keras.Variable | tf.Variable):
            value = keras_variables.as_tensor(value)  # as it is now
        moves = variable.trainable or late_writes.is_made_of(value, variable)
        is_open = tf.is_tensor(value) and tf.get_static_value(value) is None
        if not moves and is_open:
            # Not in the graph of a branch, whose tensors are known there only.
            with self.step.graph.as_default():
                self._before[id(variable)] = variable.value + 0
        return value

    def end(self, output: Tree) -> Tree:
        """Makes the values that a step has written equal on all replicas.

        A value that no sample has touched is equal already. Others are computed
        as one device would compute them, or are averaged. See `Exit`.
        """
        self._is_of_package = True
        if replica_collectives().count > 1:
            self._make_global()
        return output

    def _make_global(self) -> None:
        replicated = [
            variable
            for variable in self._by_program.values()
            if is_replicated(keras_variables.backing(variable))
        ]
        for counter in filter(late_writes.is_counter, replicated):
            if not self._all_come(self._values(counter)[0], repeated=True):
                _warn_of_inner_write(self.step, counter)
        unclear: list[keras.Variable] = []
        for weight in itertools.filterfalse(late_writes.is_counter, replicated):
            values, traced_here = self._values(weight)
            if self._are_equal(values, traced_here):
                continue
            own = id(weight) in self._own_statistics
            if values and traced_here and not own:
                try:
                    weight.assign(global_values(values[-1:], self.step)[0])
                    continue
                except NotDerivable:
                    _warn_of_weight(self.step, weight)
            elif not self.step.kinds.is_blind and not (
                values and self._averages_well(weight, values)
            ):
                _warn_of_inner_write(self.step, weight)
            unclear.append(weight)
        self._reduce_by_change(unclear)

    def _values(self, weight: keras.Variable) -> tuple[_Values, bool]:
        """Returns the values written to this replica's copy of a weight."""
        if self.step.kinds.is_blind:
            return [], False
        return self.step.kinds.written(state.own_copy(weight).handle)

    def _are_equal(self, values: _Values, traced_here: bool) -> bool:
        """Whether all replicas surely write the same, wherever they do."""
        if traced_here:
            values = values[-1:]
        are_equal = {*map(self.step.kinds.of, values)} == {EQUAL}
        return are_equal and self._all_come(values, repeated=True)

    def _all_come(self, values: _Values, repeated: bool = False) -> bool:
        """Whether all replicas come to where values are made, or none."""
        choices = Choices.of(self.step)
        return all(choices.is_everywhere(x.graph, repeated) for x in values)

    def _averages_well(self, weight: keras.Variable, values: _Values) -> bool:
        """Whether a mean of values that inner graphs write is one device's."""
        if id(weight) in self._own_statistics:
            return True
        is_float = keras.backend.is_float_dtype(weight.dtype)
        if id(weight) in self._before or not is_float:
            return False
        roles = {self.step.kinds.of(value).role for value in values}
        are_means = roles <= {Role.EQUAL, Role.MEAN}
        return are_means and self._all_come(values)

    def _reduce_by_change(self, weights: list[keras.Variable]) -> None:
        """Sums added values, averages set values.

        Set integers are taken from the replica of the first samples.
        """
        fraction = self.step.batch_fraction
        added = [w for w in weights if id(w) in self._before]
        replaced = [w for w in weights if id(w) not in self._before]
        is_float = keras.backend.is_float_dtype
        floats = [w for w in replaced if is_float(w.dtype)]
        others = [w for w in replaced if not is_float(w.dtype)]
        before = [self._before[id(weight)] for weight in added]
        changes = [
            tf.where(fraction > 0, weight.value - old, 0)
            for weight, old in zip(added, before, strict=True)
        ]
        this = replica_collectives()
        totals = map(tf.add, before, this.all_reduce("sum", changes))
        means = this.weighted_sum([w.value for w in floats], fraction)
        with tensorflow_tracing.of_rank():
            is_first = late_writes.has_first(self.step)
        firsts = this.broadcast_of([w.value for w in others], is_first)
        found = [*totals, *means, *firsts]
        weights = [*added, *floats, *others]
        for weight, value in zip(weights, found, strict=True):
            weight.assign(value)


def _exchanged(variable: keras.Variable, value: Any, step: steps.Step) -> Any:
    """Returns the value that one device would write, if it is shown here."""
    value = keras_variables.as_tensor(value, variable.dtype)
    if step.kinds.of(value) == EQUAL:
        return value
    try:
        found = global_values([value], step)[0]
    except NotDerivable:
        return value
    # TensorFlow may not know the shape: the outer graph's axis is no constant.
    found = tf.ensure_shape(found, value.shape)
    step.kinds.mark_equal([found])
    return found


def _warn_of_weight(step: steps.Step, weight: keras.Variable) -> None:
    step.warn_once(
        f"weight {weight.path}",
        f"the graph does not show how {weight.path}, which the step sets, is "
        "computed from the samples. The replicas' values are "
        "averaged, and integers are those of replica 0. Compute it from "
        "`keras_conflux.allreduce` or `keras_conflux.allgather` of the "
        "replicas' values.",
    )


def _warn_of_inner_write(step: steps.Step, weight: keras.Variable) -> None:
    step.warn_once(
        f"weight {weight.path}",
        f"the step writes {weight.path} in a loop, or in a branch that each "
        "replica chooses by its own samples, or with a value that cannot be "
        "computed there from all samples. Additions are summed, assigned "
        "values are averaged, and assigned integers are replica 0's, which one "
        "device may set to another value. Write it once, outside, as in "
        "`v.assign(keras.ops.where(condition, new, v))`.",
    )
