"""Finds a replica's rows among the rows that one device draws."""

import dataclasses
import itertools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis import COUNT
from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Entries
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import counted_rows
from keras_conflux._batch_analysis import rows
from keras_conflux._common.rows import joined
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics.inner_graphs import Loops
from keras_conflux._fit.numerics.random_operations import Sampler
from keras_conflux._fit.numerics.random_operations import on_host
from keras_conflux._graphs import bodies
from keras_conflux._replication.steps import Place
from keras_conflux._replication.steps import Step


class OfConstant(NotDerivable):
    """A constant may be the number of a replica's samples."""


@dataclasses.dataclass(frozen=True)
class DrawnRows:
    """The rows of a replica's samples among those that one device draws."""

    kind: Kind
    """The kind of the rows."""
    axis: int
    """The axis along which they lie."""
    shape: tf.Tensor
    """The shape of the replica's draw."""
    sizes: Sequence[Any]
    """The sizes of that shape: an `int`, or a tensor of int32 each."""
    lengths: Sequence[Any]
    """How many rows there are in each block: uint64."""
    place: Place
    """Where the replica's samples are."""
    is_multiple: bool = False
    """Whether there are several blocks, as the shape is a multiple of the
    number of samples, and not the shape of joined tensors."""

    def by_sample(self) -> "DrawnRows":
        """Returns as many rows, of which each sample has several."""
        size = self.sizes[self.axis]
        with on_host():
            lengths = [tf.cast(size, tf.uint64)]
        kind = rows(self.axis).with_entries(Entries.SAME)
        return dataclasses.replace(
            self, kind=kind, lengths=lengths, is_multiple=False
        )

    @property
    def whole(self) -> list[Any]:
        """The shape of one device's draw."""
        total = tf.cast(self._ends(self.lengths)[-1], tf.int32)
        return [*self.sizes[: self.axis], total, *self.sizes[self.axis + 1 :]]

    def drawn(self, sampler: Sampler) -> tf.Tensor:
        """Draws them."""
        if self.axis == 0 and sampler.is_counted:
            shapes = self._shapes()
            drawn = sampler.rows(self._begins(), shapes, self.sizes[1:])
        else:
            drawn = self.taken(sampler.whole(self.whole))
        drawn.set_shape([n if isinstance(n, int) else None for n in self.sizes])
        return drawn

    def taken(self, drawn: tf.Tensor) -> tf.Tensor:
        """Takes them out of one device's draw."""
        parts = []
        blocks = self._begins(), self._ends(self.lengths), self._shapes()
        for begin, end, shape in zip(*blocks, strict=True):
            # One without samples runs on a copy of the last sample.
            last = tf.cast(end, tf.int32) - shape[self.axis]
            begin = tf.minimum(tf.cast(begin, tf.int32), last)
            begins = begin * np.eye(len(self.sizes), dtype="int32")[self.axis]
            parts.append(tf.slice(drawn, begins, shape))
        return joined(parts, self.axis)

    def spread(self, parameter: tf.Tensor) -> tf.Tensor:
        """Gives each row that one device draws a parameter.

        Other replicas' rows get any parameter that this one has.
        """
        if parameter.shape.rank != len(self.sizes):
            return parameter
        sizes = tf.unstack(tf.shape(parameter))
        sizes[self.axis] = self.sizes[self.axis]
        each = tf.broadcast_to(parameter, sizes)
        positions, first = [], 0
        for length in self.lengths:
            total = tf.cast(self._share(self.place.total, length), tf.int32)
            before = tf.cast(self._share(self.place.before, length), tf.int32)
            length = tf.cast(length, tf.int32)
            inside = tf.clip_by_value(tf.range(total) - before, 0, length - 1)
            positions.append(first + inside)
            first += length
        return tf.gather(each, joined(positions), axis=self.axis)

    def _shapes(self) -> list[tf.Tensor]:
        """Returns the shape of each block."""
        if len(self.lengths) == 1:
            return [self.shape]
        before, after = self.sizes[: self.axis], self.sizes[self.axis + 1 :]
        return [
            tf.stack([*before, tf.cast(length, tf.int32), *after])
            for length in self.lengths
        ]

    def _begins(self) -> list[Any]:
        """Returns where the rows of each block begin, on one device."""
        first, *others = (
            self._share(self.place.before, length) for length in self.lengths
        )
        ends = self._ends(self.lengths[:-1])
        return [first, *map(operator.add, ends, others)]

    def _ends(self, lengths: Sequence[Any]) -> list[Any]:
        """Returns where blocks end that begin with the first."""
        totals = [self._share(self.place.total, length) for length in lengths]
        return list(itertools.accumulate(totals))

    def _share(self, samples: Any, length: Any) -> Any:
        """Returns how many of a block's rows a number of samples has."""
        own = self.place.own
        with on_host():
            share = samples * length
            return share if isinstance(own, int) and own == 1 else share // own


def find(shape: Any, counts_on: bool, step: Step) -> DrawnRows | None:
    """Returns a replica's rows of numbers of a shape, a tensor or sizes.

    They are `None` if no sample has numbers of its own. `counts_on`: each turn
    of a loop has another seed. It raises `NotDerivable` if no graph shows it.
    """
    in_turns = Loops.of(step).over_samples or tensorflow_tracing.is_vectorized()
    if counts_on and in_turns:
        raise NotDerivable("a loop over samples")
    sizes = sizes_of(shape)
    kinds = [step.kinds.of(size) for size in sizes]
    if all(kind == EQUAL for kind in kinds):
        constants = {size for size in sizes if isinstance(size, int)}
        if constants & step.known_sizes:
            raise OfConstant("a constant")
        return None
    (axis, *others) = [i for i, kind in enumerate(kinds) if kind != EQUAL]
    if others or kinds[axis] != COUNT:
        raise NotDerivable(sizes[axis].op.name)
    shape = shape if tf.is_tensor(shape) else tf.stack(sizes)
    kind, lengths, is_multiple = counted_rows(sizes[axis], axis, step.kinds)
    with on_host():
        lengths = [tf.cast(length, tf.uint64) for length in lengths]
    shape, place = tf.cast(shape, tf.int32), step.place()
    return DrawnRows(kind, axis, shape, sizes, lengths, place, is_multiple)


def sizes_of(shape: Any) -> list[Any]:
    """Returns the sizes of a shape: an `int`, or a tensor of int32 each."""
    if not tf.is_tensor(shape):
        return [_known(size) for size in shape]
    if bodies.is_eager(shape) or shape.op.type != "Shape":
        return [_known(size) for size in tf.unstack(shape)]
    known = shape.op.inputs[0].shape.as_list()
    sizes = tf.unstack(shape) if None in known else known
    return [
        _known(size) if n is None else n
        for size, n in zip(sizes, known, strict=True)
    ]


def _known(size: Any) -> Any:
    """Returns a size as an `int`, if it is known, or as a tensor of int32."""
    known = tf.get_static_value(size) if tf.is_tensor(size) else size
    return tf.cast(size, tf.int32) if known is None else int(known)
