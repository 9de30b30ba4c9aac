"""The kinds that operations give which take ragged tensors apart.

A ragged tensor of samples is two tensors: the values of all samples, one after
another, and the places where those of each sample begin.
"""

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import BEGINNINGS
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined


def kind_of_filled(values: Kind, beginnings: Iterable[Kind]) -> Kind | None:
    """Returns the kind of samples that are filled up alike on all replicas.

    Args:
        values: Of the values of a ragged tensor.
        beginnings: Of where rows begin in them, for each ragged axis.

    Returns:
        `None` if it is no ragged tensor of samples.
    """
    is_of_samples = (
        values.role is Role.ROWS
        and values.axis == 0
        and set(beginnings) == {BEGINNINGS}
    )
    if not is_of_samples:
        return None
    return dataclasses.replace(combined([values], 0), regular=True)


def _to_tensor(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `ragged.to_tensor(default, shape)`.

    Where the shape is left open, rows are as long as the longest sample of the
    shard, which one device would fill up to the longest of the batch.
    """
    shape, values, default, *beginnings = inputs
    size, *others = operation.outputs[0].shape.as_list() or [None, None]
    filled = kind_of_filled(values, beginnings)
    is_as_long = shape == default == EQUAL and None not in others
    if filled is None or size is not None or not is_as_long:
        return of_any(operation, operation.outputs[0], inputs)
    return filled


RULES: dict[str, Rule] = {"RaggedTensorToTensor": _to_tensor}
