"""Makes replicas fill ragged rows to the length that one device would."""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import kind_of_filled
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.global_values import global_values
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import replica_collectives


def to_tensor(
    original: Callable,
    samples: tf.RaggedTensor,
    default_value: Any = None,
    name: str | None = None,
    shape: Any = None,
) -> tf.Tensor:
    """Makes a ragged tensor dense, as long as one device would."""
    step = steps.current_fit_step()
    wanted = _given_sizes(samples, shape)
    if step is None or wanted is None or None not in wanted:
        return original(samples, default_value, name, shape)
    if not _may_exchange("`RaggedTensor.to_tensor()`", "shape", step):
        return original(samples, default_value, name, shape)
    kind = kind_of_filled(
        step.kinds.of(samples.flat_values),
        map(step.kinds.of, samples.nested_row_splits),
    )
    bounds = samples.bounding_shape()[1:]
    longest = tf.unstack(_longest(bounds, step, of_rows=kind is not None))
    sizes = [
        own if size is None else size
        for size, own in zip(wanted, longest, strict=True)
    ]
    filled = original(samples, default_value, name, [-1, *sizes])
    filled.set_shape([samples.shape[0], *wanted])
    if kind is not None:
        step.kinds.mark(filled, kind)
    return filled


def sequence_mask(
    original: Callable,
    lengths: Any,
    maxlen: Any = None,
    dtype: Any = tf.bool,
    name: str | None = None,
) -> tf.Tensor:
    """Masks as many steps as the longest sample of the global batch has."""
    step = steps.current_fit_step()
    if (
        step is not None
        and maxlen is None
        and _may_exchange("`tf.sequence_mask`", "maxlen", step)
    ):
        lengths = tf.convert_to_tensor(lengths)
        longest = tf.reduce_max(tf.concat([[0], tf.reshape(lengths, [-1])], 0))
        role = step.kinds.of(lengths).role
        of_rows = role in (Role.ROWS, Role.OPAQUE, Role.EQUAL)
        maxlen = _longest(longest, step, of_rows)
    return original(lengths, maxlen, dtype, name)


def _given_sizes(
    samples: tf.RaggedTensor, shape: Any
) -> Sequence[int | None] | None:
    """Returns the sizes of all axes but the first, if a graph can know them."""
    own = samples.shape
    if tf.is_tensor(shape) or own.rank is None:
        return None
    if isinstance(shape, list | tuple) and any(map(tf.is_tensor, shape)):
        return None
    if isinstance(shape, list | tuple):
        shape = [None if size == -1 else size for size in shape]
    given = tf.TensorShape(shape)
    if given.rank is None:
        given = tf.TensorShape([None] * own.rank)
    elif given.rank != own.rank:
        return None  # TensorFlow says so
    return [
        size if size is not None else present
        for size, present in zip(given[1:], own[1:], strict=True)
    ]


def _may_exchange(what: str, argument: str, step: steps.Step) -> bool:
    """Whether replicas meet here, which they may not in a branch or loop."""
    if replica_collectives().count == 1:
        return False
    if not tensorflow_tracing.in_branch_or_loop():
        return True
    step.warn_once(
        f"lengths {what}",
        f"{what} in a branch or a loop takes the length of the longest sample "
        "of a replica's shard, which one device takes of the whole batch. Give "
        f"it `{argument}=`, or call it outside.",
    )
    return False


def _longest(lengths: tf.Tensor, step: steps.Step, of_rows: bool) -> tf.Tensor:
    """Returns the greatest length of one device, without stand-ins.

    It is of samples, or of a tensor that one device makes of all of them.
    """
    if not of_rows:
        with contextlib.suppress(NotDerivable):
            return global_values([lengths], step)[0]
    present = tf.cast(step.batch_fraction > 0, tf.int64)
    own = tf.cast(lengths, tf.int64) * present
    longest = replica_collectives().all_reduce("max", [own])[0]
    step.kinds.mark_equal([longest])
    return tf.cast(longest, lengths.dtype)
