"""Weights of which each device holds a part, as the layers of a step read them.

A weight is gathered when a layer first reads it, together with its neighbours,
in the dtype in which the layer computes. The gradient of a gathering sums the
gradients of all replicas and leaves each its part of the sum, so a tape returns
parts. Readers of a weight in the backward pass are pointed at a second
gathering, so that no weight lives from the forward pass until then.

When a gathering may begin is told by data: one entry of a tensor that the step
computes at that time travels along, because XLA drops all other orders.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.contexts import having
from keras_conflux._communication.tree_collectives import GATHERED_TOGETHER
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_xla
from keras_conflux._extensions.sharding import order_of_tracing
from keras_conflux._extensions.sharding import sharded_updates
from keras_conflux._extensions.sharding.layout import Layout
from keras_conflux._graphs import rewriting
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import has_samples
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives

AHEAD = 1
"""How many units earlier than they are read weights may be gathered."""

WORTH_A_WARNING = 1 / 32
"""The fraction of a device's memory above which whole weights warn."""

UNITS_AT_LEAST = 8
"""About how many units the weights of a small model make."""


def value(original: Callable, variable: keras.Variable) -> Any:
    """Returns the value of a variable, gathered in the step of a replica.

    An optimizer that applies gradients gets its accumulators in parts.
    """
    backing = keras_variables.backing(variable)
    if (
        not state.is_in_parts(backing)
        or not in_replica()
        or keras_optimizers.stateless_scope() is not None
    ):
        return original(variable)
    updates = sharded_updates.ShardedUpdates.running()
    if updates is not None:
        part = updates.accumulated(variable)
        return original(variable) if part is None else part
    step = steps.current_fit_step()
    if step is None or tf.executing_eagerly() or step.is_updating:
        return original(variable)
    return GatheredWeights.of(step).read(variable)


def assign(original: Callable, variable: Any, value: Any) -> Any:
    """Writes a variable, which is gathered anew when it is read again."""
    step = steps.current_fit_step()
    if step is not None:
        GatheredWeights.of(step).forget(variable)
    return original(variable, value)


def apply(
    original: Callable, optimizer: Any, grads: list[Any], variables: list[Any]
) -> None:
    """Updates weights, which are gathered anew when they are read again."""
    sharded_updates.apply_filtered(original, optimizer, grads, variables)
    _forget_all()


def begin_tape(original: Callable, tape: tf.GradientTape) -> None:
    """Begins to record, also how weights are gathered that are known."""
    original(tape)
    _forget_all()


def _forget_all() -> None:
    step = steps.current_fit_step()
    if step is not None:
        GatheredWeights.of(step).forget_all()


@dataclasses.dataclass(eq=False)
class _Unit:
    """Weights that are gathered together, and travel in one dtype."""

    variables: list[keras.Variable]
    dtype: tf.DType
    parts: Sequence[tf.Tensor] = ()
    whole: Sequence[tf.Tensor] = ()

    def gather(self, step: steps.Step, after: Sequence[tf.Tensor]) -> None:
        """Gathers them, once some tensors are known."""

        @tf.custom_gradient
        def gathered(*parts: tf.Tensor) -> Any:
            found = self._whole_weights(parts, after)

            def gradient(*upstream: Any) -> list[tf.Tensor | None]:
                where = GatheredWeights.of(step).asked_of(self.variables)
                cut = [
                    (upstream[i], _layout(self.variables[i]), parts[i].dtype)
                    for i in where
                ]
                reduced = sharded_updates.as_parts(cut, has_samples())
                sums = dict(zip(where, reduced, strict=True))
                return [sums.get(i) for i in range(len(parts))]

            return found, gradient

        self.parts = [state.own_copy(each).value() for each in self.variables]
        # Eagerly, a list of one comes back as its element.
        self.whole = tf.nest.flatten(gathered(*self.parts))
        step.kinds.mark_equal(self.whole)

    def gather_again(self, after: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers them a second time, once some tensors are known."""
        parts = self.parts
        is_cast = any(part.dtype != self.dtype for part in parts)
        if is_cast and after and steps.in_xla():
            # XLA would keep the cast of the first gathering.
            parts = rewriting.once_known(parts, after)
        return self._whole_weights(parts, after, again=True)

    def _whole_weights(
        self, parts: Sequence[Any], after: Sequence[Any], again: bool = False
    ) -> list[tf.Tensor]:
        cast = [tf.cast(part, self.dtype) for part in parts]
        flats = replica_collectives().gathered(cast, after, again)
        return [
            _layout(variable).whole(flat)
            for variable, flat in zip(self.variables, flats, strict=True)
        ]


class GatheredWeights(steps.Part):
    """The weights that a step has gathered."""

    def __init__(self, step: steps.Step) -> None:
        super().__init__(step)
        self._units: list[_Unit] = []
        self._planned: dict[int, _Unit] | None = None
        self._whole: dict[tuple[int, tf.DType], tf.Tensor] = {}
        self._begins: list[tf.Tensor | None] = []
        self._asked: set[int] | None = None
        samples = step.kinds.samples
        self._timeline = order_of_tracing.Timeline(step.graph, samples)

    def read(self, variable: keras.Variable) -> tf.Tensor:
        """Returns a whole weight, in the dtype in which it is read."""
        key = id(variable), tf.as_dtype(variable.dtype)
        if key not in self._whole:
            self._gather(variable, key[1])
        return self._whole[key]

    def asked_of(self, variables: Sequence[keras.Variable]) -> list[int]:
        """Returns the positions of those that a tape is asked for, if known.

        A tape also passes by weights that are not trained.
        """
        return [
            i
            for i, variable in enumerate(variables)
            if self._asked is None
            or id(keras_variables.backing(variable)) in self._asked
            or id(state.own_copy(variable)) in self._asked
        ]

    def forget(self, variable: keras.Variable) -> None:
        """Forgets a weight that has been written."""
        for key in [key for key in self._whole if key[0] == id(variable)]:
            del self._whole[key]

    def forget_all(self) -> None:
        """Forgets all, which are gathered anew when they are read again."""
        if self._whole:
            self._whole.clear()
            self._planned = None

    def _gather(self, variable: keras.Variable, dtype: tf.DType) -> None:
        unit = self._plan().pop(id(variable), None)
        if unit is None or unit.dtype != dtype or unit in self._units:
            unit = _Unit([variable], dtype)
        self._units.append(unit)
        self._begins.append(self._timeline.latest())
        begin = self._begins[max(0, len(self._begins) - 1 - AHEAD)]
        # Branches and functions capture the step's gathered weights.
        with self.step.graph.as_default():
            unit.gather(self.step, [] if begin is None else [begin])
        self._timeline.skip()
        for each, whole in zip(unit.variables, unit.whole, strict=True):
            self._whole[id(each), dtype] = whole

    def _plan(self) -> dict[int, _Unit]:
        """Groups neighbours that layers read in one dtype, by their ids."""
        if self._planned is None:
            model = self.step.model
            known = keras_models.dtypes_of_reading(model)
            found = filter(state.is_in_parts, state.variables_of(model))
            variables = [each for each in found if id(each) in known]
            units = _units(variables, known)
            pairs = ((x, unit) for unit in units for x in unit.variables)
            self._planned = {id(variable): unit for variable, unit in pairs}
        return self._planned

    @contextlib.contextmanager
    def differentiating(
        self, sources: list[Any], found: list[Any]
    ) -> Iterator[None]:
        """Gathers weights again for the backward pass, traced here.

        It fills `found` with a tape's gradients by the sources.
        """
        graph = self.step.graph
        begin = len(graph.get_operations())
        with having(self, _asked={id(state.backing(x)) for x in sources}):
            yield
        self._refuse_old_values(sources, found)
        collectives = replica_collectives()
        is_inside = tf.compat.v1.get_default_graph() is graph
        if not self._units or not is_inside:
            return
        if not collectives.can_gather_again:
            self._warn_of_whole_weights()
        else:
            before = len(graph.get_operations())
            with graph.as_default():
                self._gather_again(begin, found)
            # They are traced last, and run early.
            if steps.in_xla():
                rewriting.run_independently(graph.get_operations()[before:])

    def _refuse_old_values(self, sources: list[Any], found: list[Any]) -> None:
        """Raises where a tape knows no value that it is asked by.

        Layers read weights anew when a tape has begun.
        """
        values = {
            id(whole): variable
            for unit in self._units
            for variable, whole in zip(unit.variables, unit.whole, strict=True)
        }
        for source, g in zip(sources, found, strict=True):
            if g is None and id(source) in values:
                name = state.name_of(values[id(source)])
                raise NotImplementedError(
                    f"A gradient by {name}, of which each device has a part, "
                    "was asked for by a value that was read before the tape "
                    "began. Ask for it by the variable."
                )

    def _warn_of_whole_weights(self) -> None:
        """Warns of weights that stay whole until the backward pass is over."""
        strategy: Any = tf.distribute.get_strategy()
        limit = tensorflow_internals.memory_of(strategy.devices[0])
        whole = sum(map(trees.bytes_of, self._whole.values()))
        if whole < WORTH_A_WARNING * limit:
            return
        if steps.in_xla():
            cure = "Install TensorFlow 2.21, whose XLA can gather them again."
        elif self.step.model.jit_compile:
            cure = (
                "XLA compiles batches of one size that the devices divide "
                "evenly. Leave others out, as by `drop_remainder=True`."
            )
        else:
            cure = "Compile the model with `jit_compile=True`."
        self.step.warn_once(
            "whole weights",
            "weights in parts are gathered once a step here, so a device "
            f"holds {whole / 1e9:.2g} GB of whole weights until the backward "
            f"pass is over. {cure}",
        )

    def _gather_again(self, begin: int, grads: list[Any]) -> None:
        """Lets operations traced since read weights that are gathered there."""
        order = order_of_tracing.positions(self.step.graph)
        known = [g for g in grads if isinstance(g, tf.Tensor) and g.op in order]
        telling = [g for g in known if order_of_tracing.may_tell(g)]
        found: list[tuple[tf.Operation, _Unit, order_of_tracing.Reads]] = []
        for unit in self._units:
            reads = order_of_tracing.reads_since(unit.whole, order, begin)
            if reads:
                readers = (operation for operation, _ in reads)
                first = min(readers, key=order.__getitem__)
                found.append((first, unit, reads))
        found.sort(key=lambda each: order[each[0]])
        begins = [self._timeline.before(first, order) for first, _, _ in found]
        places = [order[first] for first, _, _ in found]
        for n, (_, unit, reads) in enumerate(found):
            latest = begins[max(0, n - AHEAD)]
            known = [] if latest is None else [latest]
            # Gradients that wait to be summed are as large as weights, and
            # gradients of small weights keep their summands.
            if n > AHEAD:
                since = places[n - AHEAD - 3] if n > AHEAD + 2 else begin
                until = places[n - AHEAD - 1]
                told = [g for g in telling if since <= order[g.op] < until]
                if told and steps.in_xla():
                    told = tensorflow_xla.barriers(told)  # known together
                known += told
            whole = unit.gather_again(known)
            self.step.kinds.mark_equal(whole)
            others = dict(zip(map(id, unit.whole), whole, strict=True))
            order_of_tracing.read_others(reads, others)


def _layout(variable: keras.Variable) -> Layout:
    return keras_variables.backing(variable).layout


def _units(
    variables: Sequence[keras.Variable], known: dict[int, str]
) -> list[_Unit]:
    """Groups neighbours that are read in one dtype.

    Two or three units are whole at a time, so one is a small part of a model.
    """
    sizes = [_layout(variable).size for variable in variables]
    limit = min(GATHERED_TOGETHER, sum(sizes) // UNITS_AT_LEAST)
    found: list[_Unit] = []
    room = 0
    for variable, size in zip(variables, sizes, strict=True):
        dtype = tf.as_dtype(known[id(variable)])
        if not found or size > room or found[-1].dtype != dtype:
            found.append(_Unit([], dtype))
            room = limit
        found[-1].variables.append(variable)
        room -= size
    return found
