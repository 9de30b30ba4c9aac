"""Collectives on trees, as one replica calls them while it is traced.

All of them rest on the all-reduce of one tensor. What it moves is at most
twice what a special op would, and there is one path to trust.
"""

from typing import Any

import keras
import tensorflow as tf

from keras_conflux import trees
from keras_conflux.buckets import map_buckets
from keras_conflux.communicator import Communicator
from keras_conflux.errors import ReplicaMismatchError
from keras_conflux.trees import Tree

OPS = ("sum", "mean", "product", "min", "max")
_SPELLINGS = {"+": "sum", "avg": "mean", "*": "product", "prod": "product"}
_DTYPES = (
    tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64,
)  # fmt: skip
# What can only be copied travels in a wider dtype that can be added.
_CARRIERS = dict.fromkeys(
    (tf.bool, tf.int8, tf.uint8, tf.int16, tf.uint16), tf.int32
)


def standardize_op(op: str) -> str:
    """Returns the name in `OPS` that `op` spells."""
    name = _SPELLINGS.get(str(op).lower(), str(op).lower())
    if name not in OPS:
        raise ValueError(
            f"Unknown op {op!r}. Expected one of "
            f"{', '.join(map(repr, OPS))} (or '+', '*', 'avg')."
        )
    return name


class TreeReducer:
    """What one replica does with trees, among those of its strategy.

    Args:
        communicator: The channel of the strategy.
        index: The replica that calls.
    """

    def __init__(self, communicator: Communicator, index: int) -> None:
        self._communicator = communicator
        self._index = index

    @property
    def count(self) -> int:
        """How many replicas there are."""
        return self._communicator.size

    @property
    def on_gpu(self) -> bool:
        """Whether the replicas are on GPUs."""
        return self._communicator.on_gpu

    def all_reduce(
        self, op: str, tree: Tree, weight: tf.Tensor | None = None
    ) -> Tree:
        """Returns the reduction of the replicas' trees, equal on all.

        Args:
            op: One of `OPS`.
            tree: This replica's tree of numeric leaves.
            weight: For `"mean"`, a scalar that says how much this replica
                counts. With 0, nothing of its tree counts, NaN included.
        """
        leaves = self._leaves(f"allreduce({op!r})", tree, _DTYPES)
        if weight is not None:
            weight = tf.cast(weight, tf.float32)
            total = self._reduce("sum", weight)
            weight = tf.math.divide_no_nan(weight, total)
        return self._reduce_leaves(op, tree, leaves, weight)

    def weighted_sum(self, tree: Tree, weight: tf.Tensor) -> Tree:
        """Sums trees times weights. Of weight 0, NaN counts nothing either."""
        leaves = self._leaves("allreduce('mean')", tree, _DTYPES)
        return self._reduce_leaves("mean", tree, leaves, weight)

    def weighted(self, tree: Tree, weight: tf.Tensor) -> Tree:
        """Returns the tree times a weight, without reducing it."""

        def times(leaf: Any) -> Any:
            if not _is_sparse(leaf):
                return _weighted(leaf, weight)
            values = _weighted(leaf.values, weight)
            return tf.IndexedSlices(values, leaf.indices, leaf.dense_shape)

        return trees.map_leaves(times, tree)

    def broadcast(self, tree: Tree, root: int) -> Tree:
        """Returns the tree of replica `root`."""
        leaves = self._leaves("broadcast", tree, (*_DTYPES, *_CARRIERS))
        mine = [
            leaf if self._index == root else _nothing_like(leaf)
            for leaf in map(_carried, leaves)
        ]
        copies = self._reduce_each("sum", mine)
        return trees.refill(
            tree,
            [
                tf.cast(c, leaf.dtype)
                for c, leaf in zip(copies, leaves, strict=True)
            ],
        )

    def all_gather(self, tree: Tree, axis: int) -> Tree:
        """Joins the replicas' leaves along `axis`, where sizes may differ."""
        leaves = self._leaves(
            "allgather", tree, (*_DTYPES, *_CARRIERS), compare=False
        )
        return trees.refill(tree, [self._gather(leaf, axis) for leaf in leaves])

    def _leaves(
        self, verb: str, tree: Tree, dtypes: Any, compare: bool = True
    ) -> list[Any]:
        leaves = []
        for path, leaf in trees.with_paths(tree):
            if leaf is None:
                continue
            leaves.append(_as_tensor(verb, path, leaf, dtypes))
        signature = trees.refill(tree, leaves)
        if compare:
            self._communicator.assert_same_call(
                self._index, (verb, signature), _check_call
            )
            self._assert_equal_shapes(verb, leaves, trees.paths(tree))
        return leaves

    def _reduce_leaves(
        self, op: str, tree: Tree, leaves: list[Any], weight: Any
    ) -> Tree:
        if any(map(_is_sparse, leaves)) and op not in ("sum", "mean"):
            raise ValueError(
                f"allreduce({op!r}) does not work on tf.IndexedSlices, only "
                "'sum' and 'mean' do. Make them dense with "
                "`tf.convert_to_tensor`."
            )
        dense = [leaf for leaf in leaves if not _is_sparse(leaf)]
        count = (
            self._communicator.size if op == "mean" and weight is None else 1
        )
        reduced = iter(self._reduce_each(op, dense, weight, count))
        results = [
            self._sparse_sum(leaf, weight, count)
            if _is_sparse(leaf)
            else next(reduced)
            for leaf in leaves
        ]
        return trees.refill(tree, results)

    def _reduce_each(
        self, op: str, dense: list[Any], weight: Any = None, count: int = 1
    ) -> list[Any]:
        kind = "sum" if op == "mean" else op

        # Weights and counts act on whole buckets: a few kernels, not a few
        # for each of some hundred gradients.
        def reduce(flat: tf.Tensor) -> tf.Tensor:
            total = self._reduce(kind, _weighted(flat, weight))
            return _divided(total, count, op)

        if self.count == 1:
            return [reduce(leaf) for leaf in dense]
        # XLA runs collectives in the order in which the program's results
        # need them: by itself it would reduce the first variables' gradients
        # first, which are the last to be known.
        return map_buckets(
            reduce, dense, in_order=self._communicator.is_inside_xla
        )

    def _reduce(self, op: str, tensor: tf.Tensor) -> tf.Tensor:
        """A differentiable all-reduce of one tensor."""

        @tf.custom_gradient
        def reduce(x: tf.Tensor) -> Any:
            y = self._communicator.all_reduce(x, self._index, op)

            def gradient(dy: tf.Tensor) -> tf.Tensor:
                # What all replicas' results owe to this replica's value.
                total = self._reduce("sum", dy)
                if op == "sum":
                    return total
                if op == "product":
                    return total * self._product_of_others(x)
                chosen = tf.cast(tf.equal(x, y), x.dtype)
                return total * chosen / self._reduce("sum", chosen)

            return y, gradient

        return reduce(tensor)

    def _product_of_others(self, x: tf.Tensor) -> tf.Tensor:
        # Not y / x: a factor may be zero.
        factors = self._gather(tf.expand_dims(x, 0), 0)
        others = [
            factors[index]
            for index in range(self._communicator.size)
            if index != self._index
        ]
        product = tf.ones_like(x)
        for factor in others:
            product *= factor
        return product

    def _gather(self, leaf: tf.Tensor, axis: int) -> tf.Tensor:
        if leaf.shape.rank == 0:
            leaf = tf.expand_dims(leaf, 0)
        size = self._communicator.size
        if size == 1:
            return tf.identity(leaf)
        length = tf.shape(leaf)[axis]
        lengths = self._reduce("sum", tf.one_hot(self._index, size, length, 0))
        before = tf.reduce_sum(lengths[: self._index])
        after = tf.reduce_sum(lengths[self._index + 1 :])
        rank = leaf.shape.rank
        padding = tf.pad(
            [[before, after]], [[axis % rank, rank - 1 - axis % rank], [0, 0]]
        )
        carried = _carried(leaf)
        placed = tf.pad(carried, padding, constant_values=_nothing(carried))
        return tf.cast(self._reduce("sum", placed), leaf.dtype)

    def _sparse_sum(
        self, leaf: tf.IndexedSlices, weight: Any, count: int
    ) -> tf.IndexedSlices:
        values = _weighted(leaf.values, weight)
        return tf.IndexedSlices(
            values=_divided(self._gather(values, 0), count, "mean"),
            indices=self._gather(leaf.indices, 0),
            dense_shape=leaf.dense_shape,
        )

    def _assert_equal_shapes(
        self, verb: str, leaves: list[Any], paths: list[str]
    ) -> None:
        """Compares sizes that are known only when the step runs.

        Tensors of different sizes would leave the collective waiting. The
        sizes themselves are always of one shape, so they are compared first;
        all replicas see the same outcome and raise together.
        """
        unknown = [
            leaf
            for leaf in leaves
            if not _is_sparse(leaf) and not leaf.shape.is_fully_defined()
        ]
        if not unknown or self._communicator.size == 1:
            return
        sizes = tf.stack([tf.size(leaf, tf.int64) for leaf in unknown])
        extremes = self._reduce("max", tf.concat([sizes, -sizes], 0))
        largest, smallest = tf.split(extremes, 2)
        same = tf.debugging.assert_equal(
            largest,
            -smallest,
            message=f"{verb}: sizes differ between replicas, in one of "
            f"{', '.join(paths)}. Use `allgather` for uneven sizes.",
        )
        if same is not None:
            for position, leaf in enumerate(leaves):
                if _is_sparse(leaf):
                    continue
                with tf.control_dependencies([same]):
                    leaves[position] = tf.identity(leaf)


def _check_call(
    first: tuple[str, Tree], other: tuple[str, Tree], index: int
) -> None:
    if first[0] != other[0]:
        raise ReplicaMismatchError(
            f"Replica 0 calls {first[0]} where replica {index} calls "
            f"{other[0]}. All replicas must make the same calls in the same "
            "order."
        )
    trees.assert_alike({0: first[1], index: other[1]}, first[0])


def _as_tensor(verb: str, path: str, leaf: Any, dtypes: Any) -> Any:
    if isinstance(leaf, keras.Variable):
        leaf = leaf.value
    if not isinstance(leaf, tf.IndexedSlices):
        try:
            leaf = tf.convert_to_tensor(leaf)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"{verb}: the leaf at {path} is a {type(leaf).__name__}, not "
                "something numeric. Leave it out of the tree, or put None."
            ) from error
    if leaf.dtype not in dtypes:
        names = ", ".join(dtype.name for dtype in dtypes)
        raise TypeError(
            f"{verb}: the leaf at {path} is {leaf.dtype.name}; this op takes "
            f"{names}. Cast it first."
        )
    return leaf


def _is_sparse(leaf: Any) -> bool:
    return isinstance(leaf, tf.IndexedSlices)


def _weighted(leaf: tf.Tensor, weight: tf.Tensor | None) -> tf.Tensor:
    if weight is None:
        return leaf
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, keras.config.floatx())
    # 0 * NaN is NaN, but a replica of weight 0 must not be heard.
    heard = tf.where(weight > 0, leaf, tf.zeros_like(leaf))
    return heard * tf.cast(weight, leaf.dtype)


def _divided(leaf: tf.Tensor, count: int, op: str) -> tf.Tensor:
    if op == "mean" and not leaf.dtype.is_floating:
        exact = tf.cast(leaf, tf.float64) / count
        return tf.cast(exact, keras.config.floatx())
    return leaf / tf.cast(count, leaf.dtype) if count > 1 else leaf


def _carried(leaf: tf.Tensor) -> tf.Tensor:
    return tf.cast(leaf, _CARRIERS.get(leaf.dtype, leaf.dtype))


def _nothing(leaf: tf.Tensor) -> tf.Tensor:
    # -0.0 is what leaves every float as it is when added, -0.0 included.
    return tf.constant(-0.0 if leaf.dtype.is_floating else 0, leaf.dtype)


def _nothing_like(leaf: tf.Tensor) -> tf.Tensor:
    return tf.fill(tf.shape(leaf), _nothing(leaf))
