"""Collectives on trees, as one replica calls them while it is traced.

All of them rest on the all-reduce of one tensor. It moves at most twice the
bytes of a special op, and there is one path to trust.
"""

import dataclasses
import functools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.trees import Tree
from keras_conflux._common.trees import length
from keras_conflux._communication import dtypes
from keras_conflux._communication.buckets import map_buckets
from keras_conflux._communication.buckets import neighbours
from keras_conflux._communication.communicator import Communicator
from keras_conflux._communication.communicator import OneReplica
from keras_conflux._communication.transports.ops import MAX
from keras_conflux._communication.transports.ops import MEAN
from keras_conflux._communication.transports.ops import SUM
from keras_conflux._communication.transports.ops import Op
from keras_conflux._communication.transports.ops import find_op
from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._graphs import walks


@dataclasses.dataclass(frozen=True)
class ReplicaCollectives:
    """The collectives on trees, as one replica of a strategy calls them."""

    _communicator: Communicator | OneReplica
    _index: int
    _in_xla: bool = False
    _rank_as_tensor: Callable[[], Any] = lambda: 0
    _has_samples: Callable[[], Any] = lambda: None

    @property
    def _rank(self) -> int:
        return self._communicator.rank_as_constant(self._index)

    @property
    def count(self) -> int:
        """The number of replicas of all processes."""
        return self._communicator.size

    @property
    def on_gpu(self) -> bool:
        """Whether the replicas are on GPUs."""
        return self._communicator.on_gpu

    def all_reduce(
        self, op: str | Op, tree: Tree, weight: tf.Tensor | None = None
    ) -> Tree:
        """Returns the reduction of the replicas' trees, equal on all.

        For `MEAN`, a replica may have a weight. With 0, its NaN does not count.
        """
        op = find_op(op)
        verb = f"allreduce({op.name!r})"
        leaves = self._leaves(verb, tree, dtypes.REDUCIBLE)
        if weight is not None:
            weight = tf.cast(weight, tf.float64)
            total = self._reduce(SUM, weight)
            weight = tf.math.divide_no_nan(weight, total)
        return self._reduce_leaves(op, tree, leaves, weight)

    def weighted_sum(self, tree: Tree, weight: tf.Tensor | None) -> Tree:
        """Sums trees times weights. Of weight 0, NaN counts nothing either."""
        if weight is None:
            return self.all_reduce(SUM, tree)
        leaves = self._leaves("allreduce('mean')", tree, dtypes.REDUCIBLE)
        return self._reduce_leaves(MEAN, tree, leaves, weight)

    def broadcast(self, tree: Tree, root: int) -> Tree:
        """Returns the tree of replica `root` of all."""
        with tensorflow_tracing.of_rank():
            is_root = self._rank == root
        return self.broadcast_of(tree, is_root)

    def broadcast_of(self, tree: Tree, is_root: Any) -> Tree:
        """Returns the tree of the one replica that is the root."""
        leaves = self._leaves("broadcast", tree, dtypes.COPYABLE)
        if any(map(dtypes.is_sparse, leaves)):
            raise TypeError(
                "broadcast takes no tf.IndexedSlices, whose rows may differ in "
                "number. Make them dense with `tf.convert_to_tensor`."
            )
        mine = []
        for leaf in map(dtypes.as_summable, leaves):
            nothing = tf.fill(tf.shape(leaf), SUM.neutral(leaf.dtype))
            with tensorflow_tracing.of_rank():
                if tf.is_tensor(is_root):
                    chosen = tf.where(is_root, leaf, nothing)
                else:
                    chosen = tf.identity(leaf if is_root else nothing)
            mine.append(chosen)
        copies = self._reduce_each(SUM, mine)
        pairs = zip(copies, leaves, strict=True)
        return trees.refill(tree, [tf.cast(x, y.dtype) for x, y in pairs])

    def scattered(
        self,
        flats: Sequence[tf.Tensor],
        sums_in: Sequence[tf.DType] | None = None,
    ) -> list[tf.Tensor]:
        """Returns the replica's parts of the sums of all replicas' tensors.

        They can be differentiated. They have one axis, which the number of
        replicas divides. Each is added up in its own dtype by default.
        """
        dtypes_of_sums = sums_in or [flat.dtype for flat in flats]

        @tf.custom_gradient
        def scatter(*flats: tf.Tensor) -> Any:
            def gradient(*upstream: tf.Tensor) -> list[tf.Tensor]:
                whole = self.joined(upstream)
                return [
                    tf.cast(each, flat.dtype)
                    for each, flat in zip(whole, flats, strict=True)
                ]

            return self._scattered(flats, dtypes_of_sums), gradient

        return _list(scatter, flats)

    def _scattered(
        self, flats: Sequence[tf.Tensor], sums_in: Sequence[tf.DType]
    ) -> list[tf.Tensor]:
        self._assert_same_call("reduce-scatter", flats)
        rank = functools.cache(self._rank_as_tensor)
        # The gradients of the last layers are known first.
        parts = [
            self._communicator.reduce_scatter(
                flat, dtype, self._index, rank, self._in_xla
            )
            for flat, dtype in zip(flats[::-1], sums_in[::-1], strict=True)
        ]
        return parts[::-1]

    def joined(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Gathers parts as `gathered` does, and can be differentiated."""

        @tf.custom_gradient
        def join(*parts: tf.Tensor) -> Any:
            return self.gathered([*parts]), lambda *up: self.scattered(up)

        return _list(join, parts)

    @property
    def can_gather_again(self) -> bool:
        """Whether tensors traced last can be gathered early."""
        return self._communicator.can_gather_again(self._in_xla)

    def gathered(
        self,
        parts: list[tf.Tensor],
        after: Sequence[tf.Tensor] = (),
        again: bool = False,
    ) -> list[tf.Tensor]:
        """Joins parts. See `Communicator.all_gather`."""
        self._assert_same_call("all-gather of parts", parts)
        own = self._index, self._rank_as_tensor, self._in_xla
        whole: list[tf.Tensor] = []
        for group in neighbours(
            parts, lambda part: length(part) * self.count, GATHERED_TOGETHER
        ):
            whole += self._communicator.all_gather(group, *own, after, again)
        return whole

    def all_gather(
        self,
        tree: Tree,
        axis: int,
        is_even: Callable[[tf.Tensor], bool] = lambda _: False,
    ) -> Tree:
        """Joins the replicas' leaves along `axis`, where sizes may differ.

        XLA has to know where the rows of each replica begin, so it refuses
        sizes that differ. `is_even` tells whether all replicas have as many.
        """
        leaves = self.gatherable(tree, axis)
        open_ = [_open_along(leaf, axis) for leaf in leaves]
        self._assert_same_call("allgather", trees.refill(tree, open_))
        evenly = self._in_xla and self.count > 1
        if evenly:
            self._assert_even(leaves, axis, is_even)
        joined = [self._gather(leaf, axis, evenly) for leaf in leaves]
        return trees.refill(tree, joined)

    def gatherable(self, tree: Tree, axis: int) -> list[tf.Tensor]:
        """Returns the leaves as tensors that `all_gather` joins, or raises."""
        leaves = self._tensors("allgather", tree, dtypes.COPYABLE)
        for leaf in leaves:
            _assert_has_axis(leaf, axis)
        return leaves

    def _assert_even(
        self,
        leaves: list[tf.Tensor],
        axis: int,
        is_even: Callable[[tf.Tensor], bool],
    ) -> None:
        sizes = [
            _EQUAL if is_even(x) or x.shape.rank == 0 else x.shape[axis]
            for x in leaves
        ]
        # The traces of other processes are not seen here.
        is_blind = self._communicator.spans_processes
        for leaf, size in zip(leaves, sizes, strict=True):
            if size is None or (is_blind and size != _EQUAL):
                raise _uneven(f"Received a tensor of shape {leaf.shape}.")
        self._communicator.assert_same_call(self._index, sizes, _check_sizes)

    def _leaves(self, verb: str, tree: Tree, allowed: Any) -> list[Any]:
        leaves = self._tensors(verb, tree, allowed)
        self._assert_same_call(verb, trees.refill(tree, leaves))
        self._assert_equal_shapes(verb, leaves, trees.paths(tree))
        return leaves

    def _tensors(self, verb: str, tree: Tree, allowed: Any) -> list[Any]:
        return [
            dtypes.as_tensor(verb, path, leaf, allowed)
            for path, leaf in trees.with_paths(tree)
            if leaf is not None
        ]

    def _assert_same_call(self, verb: str, signature: Tree) -> None:
        self._communicator.assert_same_call(
            self._index, (verb, signature), _check_call
        )

    def _reduce_leaves(
        self, op: Op, tree: Tree, leaves: list[Any], weight: Any
    ) -> Tree:
        if any(map(dtypes.is_sparse, leaves)) and not op.is_linear:
            raise ValueError(
                f"allreduce({op.name!r}) does not work on tf.IndexedSlices, "
                "only 'sum' and 'mean' do. Make them dense with "
                "`tf.convert_to_tensor`."
            )
        dense = [leaf for leaf in leaves if not dtypes.is_sparse(leaf)]
        count = self.count if weight is None else 1
        reduced = iter(self._reduce_each(op, dense, weight, count))
        results = [
            self._reduce_sparse(op, leaf, weight, count)
            if dtypes.is_sparse(leaf)
            else next(reduced)
            for leaf in leaves
        ]
        return trees.refill(tree, results)

    def _reduce_each(
        self, op: Op, dense: list[Any], weight: Any = None, count: int = 1
    ) -> list[Any]:
        # Weights and counts act on whole buckets: a few kernels, not a few
        # for each of some hundred gradients.
        def reduce(flat: tf.Tensor) -> tf.Tensor:
            reduced = self._reduce(op.reduce_as, dtypes.weighted(flat, weight))
            return op.finish(reduced, count)

        if self.count == 1 or not self._communicator.joins_buckets:
            return [reduce(leaf) for leaf in dense]
        # XLA runs collectives in the order in which the program's results
        # need them: by itself it would reduce the first variables' gradients
        # first, which are the last to be known.
        return map_buckets(reduce, dense, in_order=self._in_xla)

    def _reduce(self, op: Op, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the reduction of one tensor, which can be differentiated."""
        if tensorflow_tracing.has_tangents([tensor]):
            raise NotImplementedError(
                "A `ForwardAccumulator` follows no collective. Reduce what it "
                'returns: `allreduce("mean", acc.jvp(y), weight=len(x))`.'
            )

        @tf.custom_gradient
        def reduce(x: tf.Tensor) -> Any:
            y = self._communicator.all_reduce(x, self._index, op, self._in_xla)

            def gradient(dy: tf.Tensor) -> tf.Tensor:
                present = self._has_samples()
                if present is not None:  # a stand-in for samples owes nothing
                    dy = tf.where(present, dy, tf.zeros_like(dy))
                return op.gradient(self.total(dy), x, y, self)

            return y, gradient

        return reduce(tensor)

    def total(self, tensor: tf.Tensor) -> tf.Tensor:
        """Returns the sum of a tensor of all replicas."""
        return self._reduce(SUM, tensor)

    def of_others(self, tensor: tf.Tensor) -> list[tf.Tensor]:
        """Returns the tensors of the other replicas."""
        stacked = self._gather(tf.expand_dims(tensor, 0), 0, is_even=True)
        with tensorflow_tracing.of_rank():
            return [
                stacked[(self._rank + further) % self.count]
                for further in range(1, self.count)
            ]

    def _gather(
        self, leaf: tf.Tensor, axis: int, is_even: bool = False
    ) -> tf.Tensor:
        if leaf.shape.rank == 0:
            leaf = tf.expand_dims(leaf, 0)
        if self.count == 1:
            return tf.identity(leaf)
        place = self._placed_evenly if is_even else self._placed
        placed = place(dtypes.as_summable(leaf), axis % leaf.shape.rank)
        return tf.cast(self._reduce(SUM, placed), leaf.dtype)

    def _placed(self, leaf: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns zeros with the own rows in their place."""
        size, rank = self.count, leaf.shape.rank
        length = tf.shape(leaf)[axis]
        with tensorflow_tracing.of_rank():
            own = tf.one_hot(self._rank, size, length, 0)
        lengths = self._reduce(SUM, own)
        with tensorflow_tracing.of_rank():
            before = tf.reduce_sum(lengths[: self._rank])
            after = tf.reduce_sum(lengths[self._rank + 1 :])
        padding = tf.pad([[before, after]], [[axis, rank - 1 - axis], [0, 0]])
        zero = SUM.neutral(leaf.dtype)
        return tf.pad(leaf, padding, constant_values=zero)

    def _placed_evenly(self, leaf: tf.Tensor, axis: int) -> tf.Tensor:
        """Returns the same for rows of one number, at places that XLA knows."""
        size, rank = self.count, leaf.shape.rank
        with tensorflow_tracing.of_rank():
            is_here = tf.range(size) == self._rank
        is_here = tf.reshape(is_here, [size] + [1] * (rank - axis))
        zero = SUM.neutral(leaf.dtype)
        placed = tf.where(is_here, tf.expand_dims(leaf, axis), zero)
        shape = tf.shape(leaf)
        joined = [shape[:axis], [size * shape[axis]], shape[axis + 1 :]]
        return tf.reshape(placed, tf.concat(joined, 0))

    def _reduce_sparse(
        self, op: Op, leaf: tf.IndexedSlices, weight: Any, count: int
    ) -> tf.IndexedSlices:
        values = self._gather(dtypes.weighted(leaf.values, weight), 0)
        indices = self._gather(leaf.indices, 0)
        may_be_equal = tf.is_symbolic_tensor(leaf.indices) and not self._in_xla
        if may_be_equal and walks.is_constant(leaf.indices, "Shape"):
            values, indices = self._once(values, indices, leaf.indices)
        values = op.finish(values, count)
        return tf.IndexedSlices(values, indices, leaf.dense_shape)

    def _once(self, values: tf.Tensor, indices: tf.Tensor, own: Any) -> Any:
        """Adds up rows that all replicas look up, as those of positions.

        One device looks them up once, and its optimizer sees their sums.
        """
        of_all = tf.tile(own, [self.count])
        size = tf.minimum(tf.size(indices), tf.size(of_all))
        differ = (tf.size(indices) != tf.size(of_all)) | tf.reduce_any(
            indices[:size] != of_all[:size]
        )
        shape = tf.concat([[self.count, -1], tf.shape(values)[1:]], 0)
        return tf.cond(
            self._reduce(MAX, tf.cast(differ, tf.int32)) > 0,
            lambda: (values, indices),
            lambda: (tf.reduce_sum(tf.reshape(values, shape), 0), own),
        )

    def _assert_equal_shapes(
        self, verb: str, leaves: list[Any], paths: list[str]
    ) -> None:
        """Compares sizes that are known only when the step runs.

        Tensors of different sizes would leave the collective waiting. The sizes
        are always of one shape, and all replicas raise together.
        """
        unknown = [
            leaf
            for leaf in leaves
            if not dtypes.is_sparse(leaf) and not leaf.shape.is_fully_defined()
        ]
        if not unknown or self.count == 1:
            return
        sizes = tf.stack([tf.size(leaf, tf.int64) for leaf in unknown])
        bounds = self._reduce(MAX, tf.concat([sizes, -sizes], 0))
        largest, smallest = tf.split(bounds, 2)
        same = tf.debugging.assert_equal(
            largest,
            -smallest,
            message=f"{verb}: sizes differ between replicas, in one of "
            f"{', '.join(paths)}. Use `allgather` for uneven sizes.",
        )
        with tf.control_dependencies([same]):
            for position, leaf in enumerate(leaves):
                if not dtypes.is_sparse(leaf):
                    leaves[position] = tf.identity(leaf)


GATHERED_TOGETHER = 1 << 25
"""About how many entries one collective joins."""


def _list(function: Callable, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns a list, of which an eager gradient gives one element bare."""
    return tf.nest.flatten(function(*tensors)) if tensors else []


def _open_along(leaf: Any, axis: int) -> Any:
    """Returns the description of a leaf whose size along an axis may differ."""
    if dtypes.is_sparse(leaf) or not leaf.shape.rank:
        return leaf
    shape = leaf.shape.as_list()
    shape[axis] = None
    return tf.TensorSpec(shape, leaf.dtype)


_EQUAL = "equal"
"""A size that is not known while tracing, but equal on all replicas."""


def _assert_has_axis(leaf: Any, axis: int) -> None:
    rank = leaf.shape.rank
    if rank == 0:  # numbers are joined as rows
        rank = 1
    if rank is not None and axis not in range(-rank, rank):
        raise ValueError(
            f"allgather: a tensor of shape {leaf.shape} has no axis {axis!r}."
        )


def _check_sizes(first: list[Any], other: list[Any], index: int) -> None:
    for one, another in zip(first, other, strict=True):
        if one != another:
            raise _uneven(
                f"Replica 0 has a size of {one} along the axis, replica "
                f"{index} one of {another}."
            )


def _uneven(received: str) -> tf.errors.UnimplementedError:
    return error_texts.cannot_compile(
        "allgather in an XLA program joins tensors whose sizes are equal "
        f"and known. {received} Use `jit_compile=False`."
    )


def _check_call(
    first: tuple[str, Tree], other: tuple[str, Tree], index: int
) -> None:
    if first[0] != other[0]:
        raise ReplicaMismatchError(
            f"Replica 0 calls {first[0]} where replica {index} calls "
            f"{other[0]}. All replicas must make the same calls in the same "
            "order. If Python's random numbers choose, as in the layer "
            "`AugMix` of Keras, call it in `dataset.map`."
        )
    trees.assert_alike({0: first[1], index: other[1]}, first[0])
