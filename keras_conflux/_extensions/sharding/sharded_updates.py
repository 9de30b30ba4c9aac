"""Optimizers update parts of variables, one on each device.

Keras' optimizers run unchanged. One that updates each entry by itself updates a
replica's part of a weight, by its part of the gradient and of the state. One
that updates whole tensors, such as Muon, updates the gathered whole on every
replica, which keeps its part of the result.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.contexts import having
from keras_conflux._communication import dtypes
from keras_conflux._compat import keras_models
from keras_conflux._compat import keras_optimizers
from keras_conflux._compat import keras_variables
from keras_conflux._extensions.sharding import cutting
from keras_conflux._extensions.sharding import narrow_gradients
from keras_conflux._extensions.sharding.layout import Layout
from keras_conflux._fit.numerics import given_tensors
from keras_conflux._fit.numerics import gradients
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._replication import state
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import has_samples
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step


class ShardedUpdates(steps.Part):
    """The updates of an optimizer in a step, part by part."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.have_added_rows = False
        """Whether rows of sparse gradients have been added up."""
        self._optimizer: Any = None
        """The one that applies gradients now."""
        self._layouts: list[Layout | None] = []

    @classmethod
    def running(cls) -> "ShardedUpdates | None":
        """Returns the step's updates, while an optimizer applies gradients."""
        step = steps.current()
        if step is None or not in_replica():
            return None
        found = cls.of(step)
        return None if found._optimizer is None else found

    @contextlib.contextmanager
    def of_variables(
        self, optimizer: Any, variables: Sequence[Any]
    ) -> Iterator[None]:
        """Notes the variables to which an optimizer applies gradients."""
        self._layouts = layouts_of(variables)
        strategy: Any = tf.distribute.get_strategy()
        refused = cutting.refusal(optimizer, strategy.shard)
        if refused and any(self._layouts):
            raise NotImplementedError(refused)
        with having(self, _optimizer=optimizer):
            yield

    @property
    def by_parts(self) -> bool:
        """Whether replicas update parts, and not wholes of which they keep."""
        return cutting.updates_parts(self._optimizer)

    def to_parts(self, grads: list[Any]) -> list[Any]:
        """Cuts gradients that are whole, and of all samples."""
        if (
            self.have_added_rows
            and not _is_linear(self._optimizer)
            and not replica_collectives().on_gpu
        ):
            self.step.warn_once(
                "rows",
                "with `shard`, embedding rows that repeat in a batch are added "
                "up before an optimizer squares or clips them, unlike on one "
                "CPU device.",
            )
        rank = rank_as_tensor()
        return [
            layout.own_part(g, rank) if layout else g
            for g, layout in zip(grads, self._layouts, strict=True)
        ]

    def summed(self, grads: list[Any]) -> list[Any]:
        """Sums accumulated gradients, and leaves parts where it can."""
        if not self.by_parts:
            return self._summed_whole(grads)
        add = replica_collectives().all_reduce
        return _in_parts(grads, self._layouts, lambda x, _: add("sum", x))

    def _summed_whole(self, grads: list[Any]) -> list[Any]:
        """Sums the replicas' summands, and joins cut gradients."""
        collectives = replica_collectives()
        cut = [
            layout if layout is not None and layout.is_part(g) else None
            for g, layout in zip(grads, self._layouts, strict=True)
        ]
        pairs = [*zip(grads, cut, strict=True)]
        rest = [g for g, layout in pairs if layout is None]
        sums = iter(collectives.all_reduce("sum", rest))
        parts = [g for g, layout in pairs if layout is not None]
        flats = iter(collectives.gathered(parts))
        return [x.whole(next(flats)) if x else next(sums) for x in cut]

    def accumulated(self, variable: keras.Variable) -> tf.Variable | None:
        """Returns a replica's part of an accumulator that lies in parts."""
        backing = keras_variables.backing(variable)
        known = keras_models.accumulators(self._optimizer)
        return backing.part if any(variable is x for x in known) else None

    def clip(self, original: Callable, grads: list[Any]) -> list[Any]:
        """Sums accumulated gradients, and clips gradients of parts."""
        known = Gradients.of(self.step)
        if known.are_accumulated:
            grads = self.summed(grads)
        with having(known, are_accumulated=False):
            return self._clipped(original, grads)

    def _clipped(self, original: Callable, grads: list[Any]) -> list[Any]:
        optimizer = self._optimizer
        if not self.by_parts:
            return original(optimizer, grads)
        if optimizer.clipnorm and optimizer.clipnorm > 0:
            squares = self._squares(grads)
            return [
                _clipped_by_norm(g, square, optimizer.clipnorm)
                for g, square in zip(grads, squares, strict=True)
            ]
        if optimizer.global_clipnorm and optimizer.global_clipnorm > 0:
            # As Keras computes it: NaN if the norm is not finite.
            norm = tf.sqrt(tf.reduce_sum(tf.stack(self._squares(grads))))
            limit = optimizer.global_clipnorm
            scale = limit * tf.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)
            return [g * tf.cast(scale, g.dtype) for g in grads]
        return original(optimizer, grads)

    def _squares(self, grads: list[Any]) -> list[tf.Tensor]:
        """Returns the sum of squares of each whole gradient."""
        square: Any = keras.ops.square  # of each occurrence of a row
        squares = [tf.reduce_sum(square(g)) for g in grads]
        where = [i for i, layout in enumerate(self._layouts) if layout]
        if where:
            own = tf.stack([tf.cast(squares[i], tf.float64) for i in where])
            total = replica_collectives().all_reduce("sum", own)
            for i, square in zip(where, tf.unstack(total), strict=True):
                squares[i] = tf.cast(square, squares[i].dtype)
        return squares

    def update(
        self,
        original: Callable,
        grads: list[Any],
        variables: list[Any],
        learning_rate: Any,
    ) -> None:
        """Updates variables, each replica its parts, and gathers weights."""
        optimizer = self._optimizer
        together = keras_optimizers.updated_together(optimizer)
        shared = given_tensors.SharedUpdate(optimizer, learning_rate)
        rest: list[tuple[Any, Any]] = []
        cut: list[tuple[tf.Variable, Layout, tf.Tensor]] = []
        layouts = layouts_of(variables)
        for g, variable, layout in zip(grads, variables, layouts, strict=True):
            if layout is None:
                rest.append((g, variable))
                continue
            backing = keras_variables.backing(variable)
            kept = together[keras_optimizers.index_of(optimizer, backing)]
            values = [self._read(x, layout) for x in kept]
            for each, value in shared.of(g, kept, values):
                is_cut = state.is_in_parts(each)
                if self.by_parts and not is_cut:
                    cut.append((state.own_copy(each), layout, value))
                elif is_cut and not self.by_parts:
                    keras_variables.backing(each).assign(value)
                else:
                    given_tensors.overwrite(state.own_copy(each), value)
        given_tensors.update_rest(original, optimizer, rest, learning_rate)
        _write_whole(cut)

    def average(self, original: Callable, variables: list[Any]) -> None:
        """Moves averages of weights, each replica its parts of them."""
        if not self._optimizer.use_ema:
            original(self._optimizer, variables)
            return
        averages = keras_optimizers.averages(self._optimizer)
        for variable, mean in zip(variables, averages, strict=True):
            if mean is not None:
                self._move_average(mean, variable)

    def _move_average(self, mean: keras.Variable, variable: Any) -> None:
        """Moves an average towards a weight, as Keras computes it."""
        own = state.own_copy(mean)
        value = state.own_copy(variable).read_value()
        if state.is_in_parts(mean):
            layout = keras_variables.backing(mean).layout
            value = layout.own_part(value, rank_as_tensor())
        has_begun = tf.not_equal(self._optimizer.iterations, 0)
        kept = tf.cast(has_begun, own.dtype) * self._optimizer.ema_momentum
        given_tensors.overwrite(own, kept * own + (1 - kept) * value)

    def _read(self, variable: keras.Variable, layout: Layout) -> tf.Tensor:
        backing = keras_variables.backing(variable)
        if not self.by_parts:
            return tf.convert_to_tensor(backing)
        if state.is_in_parts(backing):
            return backing.part.value()
        whole = tf.convert_to_tensor(backing)
        return layout.part_of(whole, rank_as_tensor())


def layouts_of(variables: Sequence[Any]) -> list[Layout | None]:
    """Returns the layouts of variables, `None` for ones updated whole."""
    strategy = tf.distribute.get_strategy()
    return [
        cutting.layout_for(variable, strategy)
        if isinstance(variable, keras.Variable)
        else None
        for variable in variables
    ]


def is_sharding() -> bool:
    """Whether the running replica keeps parts of some variables."""
    strategy: Any = tf.distribute.get_strategy()
    if not in_replica() or strategy.shard is None:
        return False
    return strategy.communicator.size > 1


def scattered(variables: Sequence[Any], step: Step, grads: Any) -> list[Any]:
    """Returns the sums of all replicas' weighted gradients, or their parts."""

    def of_wholes(whole: list[Any], where: list[int]) -> list[Any]:
        return gradients.summed(whole, [variables[i] for i in where], step)

    return _in_parts(grads, layouts_of(variables), of_wholes, has_samples())


def _in_parts(
    grads: list[Any],
    layouts: Sequence[Layout | None],
    of_wholes: Callable[[list[Any], list[int]], list[Any]],
    weight: tf.Tensor | None = None,
) -> list[Any]:
    """Sums a replica's gradients: `of_wholes` those that have no layout.

    Others get the weight, and become a part. A part is a sum already.
    """
    found = dict(enumerate(grads))
    whole = [i for i, layout in enumerate(layouts) if layout is None]
    sums = of_wholes([grads[i] for i in whole], whole)
    found.update(zip(whole, sums, strict=True))
    cut = {
        i: (g, layout, g.dtype)
        for i, (g, layout) in enumerate(zip(grads, layouts, strict=True))
        if layout is not None and g is not None and not layout.is_part(g)
    }
    found.update(zip(cut, as_parts(cut.values(), weight), strict=True))
    return [*found.values()]


def as_parts(
    cut: Iterable[tuple[Any, Layout, tf.DType]], weight: tf.Tensor | None
) -> list[tf.Tensor]:
    """Returns a replica's parts of sums of weighted gradients, in dtypes."""
    step = steps.current()
    flats, wide = [], []
    for g, layout, dtype in cut:
        if step is not None and isinstance(g, tf.IndexedSlices):
            ShardedUpdates.of(step).have_added_rows = True
        written = narrow_gradients.as_written(g, dtype)
        flats.append(layout.flat(dtypes.weighted(written, weight)))
        wide.append(dtype)
    return replica_collectives().scattered(flats, wide)


def scale_loss(original: Callable, optimizer: Any, loss: Any) -> Any:
    """Notes losses of whose gradients an optimizer needs parts only.

    They are scattered when summed, or at the update if it accumulates them.
    """
    result = original(optimizer, loss)
    step = steps.current_fit_step()
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if (
        step is not None
        and is_sharding()
        and cutting.updates_parts(inner)
        and not inner.gradient_accumulation_steps
    ):

        def summed(grads: list[Any], trained: list[Any] | None) -> list[Any]:
            trained = trained or keras_optimizers.trained_by(optimizer)
            return scattered(trained, step, gradients.shaped(grads, trained))

        Gradients.of(step).postpone(optimizer, result, summed)
    return result


def _while_running(method: Callable) -> Callable:
    """Returns what a method of optimizers does in replicas that keep parts."""

    def replacement(original: Callable, optimizer: Any, *args: Any) -> Any:
        updates = ShardedUpdates.running()
        if updates is None:
            return original(optimizer, *args)
        return method(updates, original, *args)

    return replacement


average = _while_running(ShardedUpdates.average)
clip = _while_running(ShardedUpdates.clip)
update_step = _while_running(ShardedUpdates.update)


def check_finite(original: Callable, optimizer: Any, grads: Any) -> Any:
    """Whether gradients are finite, of which replicas have parts."""
    finite = original(optimizer, grads)
    return gradients.hold_everywhere(finite) if is_sharding() else finite


def apply_filtered(
    original: Callable, optimizer: Any, grads: list[Any], variables: list[Any]
) -> None:
    """Applies gradients, of parts where an optimizer takes them."""
    step = steps.current()
    if step is None or not is_sharding():
        original(optimizer, grads, variables)
        return
    updates = ShardedUpdates.of(step)
    with updates.of_variables(optimizer, variables):
        if updates.by_parts and not Gradients.of(step).are_accumulated:
            grads = updates.to_parts(grads)
        original(optimizer, grads, variables)


def _write_whole(cut: list[tuple[tf.Variable, Layout, tf.Tensor]]) -> None:
    """Gathers whole variables of which each replica has updated a part."""
    flats = replica_collectives().gathered([part for _, _, part in cut])
    for (variable, layout, _), flat in zip(cut, flats, strict=True):
        given_tensors.overwrite(variable, layout.whole(flat))


def _is_linear(optimizer: Any) -> bool:
    """Whether gradients may be added up before an optimizer gets them."""
    clips = optimizer.clipnorm, optimizer.clipvalue, optimizer.global_clipnorm
    return isinstance(optimizer, keras.optimizers.SGD) and not any(clips)


def _clipped_by_norm(g: Any, square: tf.Tensor, limit: float) -> Any:
    # As `tf.clip_by_norm` computes it.
    is_positive = square > 0
    safe = tf.where(is_positive, square, tf.ones_like(square))
    norm = tf.where(is_positive, tf.sqrt(safe), square)
    return tf.convert_to_tensor(g) * limit / tf.maximum(norm, limit)
