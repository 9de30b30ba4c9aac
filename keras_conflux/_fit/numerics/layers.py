"""The outputs of layers for a replica's own samples, and for all samples."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import CODE
from keras_conflux._batch_analysis import DRAWING
from keras_conflux._batch_analysis import Entries
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import OwnGradients
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import combined
from keras_conflux._batch_analysis import kind_by_trial
from keras_conflux._batch_analysis import rows
from keras_conflux._batch_analysis import rows_by_trial
from keras_conflux._batch_analysis import uses
from keras_conflux._common.contexts import having
from keras_conflux._compat import keras_models
from keras_conflux._fit.numerics import warnings
from keras_conflux._fit.numerics.global_values import own_rows
from keras_conflux._fit.numerics.gradients import Gradients
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._replication import batch_norm
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import has_samples
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step


def call(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Marks a layer's outputs as rows of a replica's own samples.

    A layer may mix samples, as softmax over a batch does, or run a loop that
    no rule understands. A matrix that compares each sample with each does not
    change, and no more do outputs for rows that differ from one device's.

    Tensors that a step has mixed before it calls a model are exchanged, so that
    the model gets the replica's rows of one device's inputs.
    """
    step = steps.current_fit_step()
    if step is None:
        return original(layer, *args, **kwargs)
    layers = Layers.of(step)
    is_outermost = not layers.is_in_one
    with having(layers, is_in_one=True):
        if is_outermost and not step.kinds.is_blind:
            if not Gradients.of(step).are_computed:
                known = [*layers.own_gradients.outputs.values()]
                layers.try_gradients(_tensors_in((args, kwargs)), known, None)
            args, kwargs = _exchanged((args, kwargs), step)
        outputs = original(layer, *args, **kwargs)
    kind = _kind_of_rows((args, kwargs), layer, step)
    inputs = _tensors_in((args, kwargs))
    if not step.kinds.is_blind:
        layers.try_gradients(_tensors_in(outputs), inputs, layer)
    if kind is None:
        return outputs

    def of_one_device(output: Any) -> Any:
        is_tensor = isinstance(output, tf.Tensor)
        if is_tensor and _may_be_rows(output, step.kinds.of(output)):
            return _marked(output, kind, layer, inputs, step)
        return output

    return keras.tree.map_structure(of_one_device, outputs)


class Layers(steps.Part):
    """The layers that a step calls."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self.is_in_one = False
        """Whether one is being called."""
        self.own_gradients = OwnGradients(step.kinds)
        """The gradients defined by a program that mix samples."""
        self._mixing: dict[int, Any] = {}

    def try_gradients(
        self, outputs: list[tf.Tensor], inputs: list[tf.Tensor], layer: Any
    ) -> None:
        """Warns of own gradients of a user's layer or step that mix samples.

        One that calls layers is asked for the operations between them only.
        """
        for operation in self.own_gradients.between(outputs, inputs):
            if layer is not None and not _is_of_users(layer):
                continue
            try:
                with having(Gradients.of(self.step), are_computed=True):
                    is_mixed = self.own_gradients.mixes(operation, inputs)
                if is_mixed:
                    _warn_of_gradient(layer, operation, self.step, _MIXES)
            except NotDerivable:
                _warn_of_gradient(layer, operation, self.step, _IS_UNKNOWN)

    def place(self, layer: Any) -> int:
        """Returns the place of a layer that mixes among those that do.

        A layer that a step makes has another name in each trace.
        """
        self._mixing.setdefault(id(layer), layer)
        return [*self._mixing].index(id(layer))


def _exchanged(inputs: Any, step: Step) -> Any:
    """Returns a model's inputs, with one device's rows for mixed rows."""
    if tf.compat.v1.get_default_graph() is not step.graph:
        return inputs

    def exchanged(value: Any) -> Any:
        if not isinstance(value, tf.Tensor) or not value.shape.rank:
            return value
        kind = step.kinds.of(value)
        if value.shape[0] is not None or not kind.needs_all_samples:
            return value
        if not _is_mixed(kind):
            found = None
            with contextlib.suppress(NotDerivable):
                found = rows_by_trial(value, step.kinds)
        elif replica_collectives().count > 1:
            return _own(value, step)
        else:
            found = rows(0).with_entries(kind.entries)
        if found is not None:
            step.kinds.mark(value, found)
        return value

    return keras.tree.map_structure(exchanged, inputs)


def _own(value: tf.Tensor, step: Step) -> tf.Tensor:
    kind = step.kinds.of(value)
    if kind.role is not Role.ROWS or kind.entries is not Entries.ONE:
        return value  # there may be more or fewer rows than samples
    if tf.compat.v1.get_default_graph() is not step.graph:
        return value  # replicas may not all come here
    with contextlib.suppress(NotDerivable):
        own = own_rows(value, step)
        Layers.of(step).own_gradients.trust([own], own.op.inputs)
        return own
    return value


def _marked(
    out: tf.Tensor, kind: Kind, layer: Any, inputs: list[tf.Tensor], step: Step
) -> tf.Tensor:
    """Marks an output as rows, and returns the rows of one device.

    Where samples are mixed, they are computed once more from the samples of all
    replicas, or a warning tells of it. Random numbers that are drawn in loops
    and functions cannot be tried out: there the graph tells.
    """
    known = step.kinds.of(out)
    if known.role is Role.ROWS:
        kind = kind.with_entries(known.entries)
    is_of_users = _is_of_users(layer) or (
        known.role is Role.OPAQUE and uses(out, inputs, CODE)
    )  # as in an activation
    # A functional model has operations besides its layers, as of `keras.ops`.
    shown = known.role in (Role.ROWS, Role.DERIVED)
    may_mix = is_of_users or shown or isinstance(layer, keras.Model)
    if not step.kinds.is_blind and may_mix:
        # The inputs of a functional model's layers are known.
        given = inputs if is_of_users else ()
        try:
            found = rows_by_trial(out, step.kinds, given)
        except NotDerivable:
            # Layers of Keras keep samples apart if nothing shows otherwise.
            is_apart = not is_of_users or uses(out, inputs, DRAWING)
            is_mixed = known.depends_on_other_samples
            found = kind if is_apart and not is_mixed else None
        if found is None and out.shape.as_list() == [None, None]:
            return out  # it may be a matrix that compares each with each
        if found is not None and not _is_mixed(known):
            kind = kind.with_entries(found.entries)
        elif replica_collectives().count > 1:
            own = _own(out, step)
            if own is not out:
                keras_models.copy_mask(out, own)
                return own
            _warn_of_mixing(layer, step)
    step.kinds.mark(out, kind)
    return out


def _is_of_users(layer: Any) -> bool:
    runs_users_code = isinstance(layer, keras.layers.Lambda)
    return runs_users_code or not keras_models.is_of_keras(layer)


def _is_mixed(known: Kind) -> bool:
    """Whether rules find rows that depend on others, which trials may miss."""
    return known.role is Role.ROWS and known.axis == 0 and known.mixed


def _warn_of_mixing(layer: Any, step: Step) -> None:
    """Says of a layer that replicas mix their own samples only."""
    step.warn_once(
        f"layer {Layers.of(step).place(layer)}: {type(layer).__name__}",
        f"the output of the layer {layer.name!r} for a sample depends on other "
        "samples of the batch. A replica uses the samples of its own part, and "
        "one device would use the whole batch. Give the layer the values of "
        "all replicas, with `keras_conflux.allgather` or "
        "`keras_conflux.allreduce`, or move it into `dataset.map`.",
    )


def _warn_of_gradient(
    layer: Any, operation: tf.Operation, step: Step, how: str
) -> None:
    place = Layers.of(step).place(layer)
    who = "step" if layer is None else f"layer {layer.name!r}"
    step.warn_once(
        f"gradient of layer {place}: {type(layer).__name__}",
        f"the gradient that the {who} defines, as by "
        f"`tf.custom_gradient`, {how}",
        operation,
    )


_MIXES = (
    "mixes samples of the batch. A replica mixes the samples of its own part, "
    "and one device would mix the whole batch. Reduce the mixed values over "
    "all replicas with `keras_conflux.allreduce`."
)
_IS_UNKNOWN = (
    "cannot be followed: it has Python code, an operation without a rule, or a "
    "value that is no row of samples. If it mixes samples, a replica mixes "
    "only its own part. Compute it with operations of TensorFlow from rows of "
    "samples, and reduce mixed values over all replicas with "
    "`keras_conflux.allreduce`."
)


def _tensors_in(values: Any) -> list[tf.Tensor]:
    return [x for x in keras.tree.flatten(values) if isinstance(x, tf.Tensor)]


def _kind_of_rows(inputs: Any, layer: Any, step: Step) -> Kind | None:
    """Returns the kind of a layer's outputs for each sample of its inputs.

    It is `None` if the inputs are not rows of one device.
    """
    leaves = keras.tree.flatten(inputs)
    composite = tf.RaggedTensor | tf.SparseTensor
    has_composite = any(isinstance(x, composite) for x in leaves)
    kinds = [_shown(tensor, step) for tensor in _tensors_in(inputs)]
    if any(kind.role is Role.OPAQUE for kind in kinds):
        warnings.warn_of_unknown_values(
            step, "input of a layer", f"the input of the layer {layer.name!r}"
        )
    of_rows = [kind for kind in kinds if kind.role is Role.ROWS]
    others = {kind.role for kind in kinds} - {Role.ROWS}
    if others - {Role.EQUAL, Role.RANDOM, Role.OPAQUE}:
        return None
    if not of_rows:
        return rows(0) if has_composite or Role.OPAQUE in others else None
    kind = combined(of_rows, 0)
    return None if kind.depends_on_other_samples else kind


def _shown(tensor: tf.Tensor, step: Step) -> Kind:
    """Returns the kind of an input, as far as it is known in inner graphs."""
    if tf.compat.v1.get_default_graph() is not step.graph:
        return step.kinds.of(tensor)
    return kind_by_trial(tensor, step.kinds)


def _may_be_rows(output: tf.Tensor, kind: Kind) -> bool:
    """Whether an output may be rows that no rule has found."""
    if not output.shape.rank:
        return False
    if kind.role is Role.ROWS:
        return kind.depends_on_other_samples and kind.axis == 0
    return output.shape[0] is None and kind.role in (Role.OPAQUE, Role.DERIVED)


def merge_call(
    original: Callable, replica: Any, *args: Any, **kwargs: Any
) -> Any:
    """Marks the result of `merge_call`, which no replica's graph tells.

    The user computes it from all replicas. It is traced in the midst of the
    first replica's step, from all values, which each would read otherwise.
    """
    result = original(replica, *args, **kwargs)
    step = steps.current_fit_step()
    if step is not None:
        leaves = tf.nest.flatten(result, expand_composites=True)
        step.kinds.mark_merged(_tensors_in(leaves))
    return result


def synchronized_moments(
    original: Callable, x: tf.Tensor, axes: Any, keepdims: bool
) -> Any:
    """Mean and variance over the samples of all replicas, in one reduction."""
    if not in_replica():
        return original(x, axes, keepdims)
    parts = x, tf.square(x), tf.ones_like(x)
    total, squares, count = _sums_of_all(parts, axes)
    mean = tf.math.divide_no_nan(total, count)
    variance = tf.math.divide_no_nan(squares, count) - tf.square(mean)
    variance = tf.maximum(variance, 0)
    if not keepdims:
        mean, variance = tf.squeeze(mean, axes), tf.squeeze(variance, axes)
    return mean, variance


def masked_moments(
    original: Callable, layer: Any, inputs: tf.Tensor, mask: Any
) -> Any:
    """Moments of the unmasked entries, where Keras takes a replica's alone.

    The variance needs the mean first, as on one device.
    """
    if mask is None or not layer.synchronized or not in_replica():
        return original(layer, inputs, mask)
    axes = keras_models.reduction_axes(layer)
    kept = tf.cast(tf.expand_dims(mask, -1), tf.bool)
    kept &= tf.ones_like(inputs, tf.bool)
    parts = tf.where(kept, inputs, 0), tf.cast(kept, inputs.dtype)
    total, count = _sums_of_all(parts, axes)
    count += tf.cast(keras.config.epsilon(), count.dtype)
    mean = total / count
    deviations = tf.where(kept, tf.square(inputs - mean), 0)
    (squares,) = _sums_of_all([deviations], axes)
    return tf.squeeze(mean, axes), tf.squeeze(squares / count, axes)


def _sums_of_all(parts: Iterable[tf.Tensor], axes: Any) -> list[tf.Tensor]:
    """Returns sums over the samples of all replicas, axes of size 1 kept."""
    sums = [tf.reduce_sum(part, axes, keepdims=True) for part in parts]
    made = replica_collectives().weighted_sum(sums, has_samples())
    if (step := steps.current_fit_step()) is not None:
        Layers.of(step).own_gradients.trust(made, sums)
    return made


def call_batch_norm(
    original: Callable, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """Marks the result of the layer as one row per sample.

    Without `synchronized=True` each row depends on the other samples of the
    replica's shard. The user has chosen that.
    """
    batch_norm.log_if_unsynchronized(layer, *args[1:2], **kwargs)
    step = steps.current_fit_step()
    if step is not None:
        Writes.of(step).keep_own_statistics(layer.non_trainable_variables)
    outputs = original(layer, *args, **kwargs)
    if step is not None:
        kind = step.kinds.of(args[0] if args else kwargs["inputs"])
        step.kinds.mark(outputs, kind)
    return outputs
