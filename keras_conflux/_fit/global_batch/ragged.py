"""The kinds that operations give which take ragged tensors apart.

A ragged tensor of samples is two tensors: the values of all samples, one after
another, and the places where those of each sample begin.
"""

import dataclasses

import tensorflow as tf

from keras_conflux._fit.global_batch.defaults import Rule
from keras_conflux._fit.global_batch.defaults import of_any
from keras_conflux._fit.global_batch.kinds import BEGINNINGS
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Kind
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.kinds import combined


def _to_tensor(operation: tf.Operation, inputs: list[Kind]) -> Kind:
    """Follows `ragged.to_tensor(default, shape)`.

    Where the shape is left open, rows are as long as the longest sample of the
    shard, which one device would fill up to the longest of the batch.
    """
    shape, values, default, *partitions = inputs
    size, *others = operation.outputs[0].shape.as_list() or [None, None]
    is_of_samples = (
        shape == default == EQUAL
        and values.role is Role.ROWS
        and values.axis == 0
        and set(partitions) == {BEGINNINGS}
    )
    if not is_of_samples or size is not None or None in others:
        return of_any(operation, operation.outputs[0], inputs)
    return dataclasses.replace(combined([values], 0), regular=True)


RULES: dict[str, Rule] = {"RaggedTensorToTensor": _to_tensor}
