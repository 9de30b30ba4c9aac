"""The kinds of the results of operations that take ragged tensors apart.

A ragged tensor of samples is two tensors: the values of all samples, one after
another, and the places where each sample's begin.
"""

import dataclasses
from collections.abc import Iterable

import tensorflow as tf

from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import ROW_SPLITS
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.rule import Rule


def kind_of_filled(values: Kind, beginnings: Iterable[Kind]) -> Kind | None:
    """Returns the kind of samples that are filled up alike on all replicas.

    Args:
        values: The kind of the values of a ragged tensor.
        beginnings: The kinds of row beginnings in them, for each ragged axis.

    Returns:
        `None` if it is no ragged tensor of samples.
    """
    is_of_samples = (
        values.role is Role.ROWS
        and values.axis == 0
        and not values.is_out_of_order
        and set(beginnings) == {ROW_SPLITS}
    )
    return values.with_entries(Entries.ONE) if is_of_samples else None


def _to_tensor(operation: tf.Operation, inputs: list[Kind]) -> Kind | None:
    """Follows `ragged.to_tensor(default, shape)`.

    Where the shape is left open, rows are as long as the longest sample of the
    shard, which one device would fill up to the longest of the batch.
    """
    _, values, _, *beginnings = inputs
    size, *others = operation.outputs[0].shape.as_list() or [None, None]
    if size is not None or None in others:
        return None
    return kind_of_filled(values, beginnings)


def _split_strings(
    operation: tf.Operation, inputs: list[Kind]
) -> list[Kind] | None:
    """Follows the words of each string, in a sparse tensor."""
    del operation
    if inputs[0].axis or inputs[0].entries is not Entries.ONE:
        return None
    words = inputs[0].with_entries(Entries.VARYING)
    return [dataclasses.replace(words, are_positions=True), words, DERIVED]


RULES: dict[str, tuple[Rule, ...]] = {
    "RaggedTensorToTensor": (
        Rule(_to_tensor, Form.EQUAL, Form.ROWS, Form.EQUAL, Form.OPAQUE, ...),
    ),
    "StringSplitV2": (Rule(_split_strings, Form.ROWS, Form.EQUAL),),
}
