"""What layers return is rows of samples, however they are computed."""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_models
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined
from keras_conflux._fit.global_batch.kinds import rows
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext


def call(original: Callable, layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Says that a layer's outputs are rows of a replica's own samples.

    A layer may mix samples, as unsynchronized normalization does, or run a loop
    that no rule understands. Computing it once more from the samples of all
    replicas would be a second network. A matrix that compares each sample with
    each stays what it is, and so does what a layer computes from rows that are
    not those of one device.
    """
    outputs = original(layer, *args, **kwargs)
    context = step_context.current_fit_step()
    if context is None or tf.executing_eagerly():
        return outputs
    kind = _kind_of_rows((args, kwargs), context)
    if kind is not None:
        for output in _tensors_in(outputs):
            found = context.kinds.of(output)
            if _may_be_rows(output, found):
                _warn_if_mixed(layer, found, context)
                regular = kind.regular and found.regular
                marked = dataclasses.replace(kind, regular=regular)
                context.kinds.mark(output, marked)
    return outputs


def _warn_if_mixed(layer: Any, kind: Kind, context: StepContext) -> None:
    """Says of a layer of the user's that replicas mix their own samples only.

    Layers of Keras that do so are documented.
    """
    # Rows that are chosen by their place, as by `x[::2]`, are not regular.
    mixes = (kind.mixed and kind.regular) or kind.divided
    if (
        kind.role is not Role.ROWS
        or not mixes
        or keras_models.is_of_keras(layer)
    ):
        return
    # A layer that a step makes has another name in each trace.
    found = context.mixing_layers
    found.setdefault(id(layer), layer)
    place = [*found].index(id(layer))
    context.warn_once(
        f"layer {place}: {type(layer).__name__}",
        f"what the layer {layer.name!r} computes of a sample depends on other "
        "samples of the batch, and on a replica, on those of its own part. One "
        "device would use the whole batch. Give the layer what all replicas "
        "have, with `keras_conflux.allgather` or `keras_conflux.allreduce`.",
    )


def _tensors_in(values: Any) -> list[tf.Tensor]:
    leaves = keras.tree.flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def _kind_of_rows(inputs: Any, context: StepContext) -> Kind | None:
    """Returns the kind of what a layer makes of each sample of its inputs.

    Returns:
        `None` if the inputs are not rows of one device.
    """
    kinds = [context.kinds.of(tensor) for tensor in _tensors_in(inputs)]
    of_rows = [kind for kind in kinds if kind.role is Role.ROWS]
    if not of_rows:
        return rows(0)
    kind = combined(of_rows, 0)
    return None if kind.is_entangled else kind


def _may_be_rows(output: tf.Tensor, kind: Kind) -> bool:
    if not output.shape.rank:
        return False
    if kind.role is Role.ROWS and kind.axis == 0:
        return kind.is_entangled
    if output.shape[0] is not None:
        return False
    if kind.role is Role.ROWS:
        return kind.axis is None
    compares = output.shape.as_list().count(None) > 1 and output.shape.rank < 3
    return kind.role in (Role.OPAQUE, Role.DERIVED) and not compares
