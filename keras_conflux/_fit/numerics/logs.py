"""What callbacks and `History` are told: the numbers of the global batch."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common import trees
from keras_conflux._common.trees import Tree
from keras_conflux._compat import keras_variables
from keras_conflux._data import rows
from keras_conflux._fit.global_batch import trial
from keras_conflux._fit.global_batch.derivation import CannotTell
from keras_conflux._fit.global_batch.gathered_rows import gathered
from keras_conflux._fit.global_batch.kinds import EQUAL
from keras_conflux._fit.global_batch.kinds import Role
from keras_conflux._fit.global_batch.values import global_values
from keras_conflux._fit.numerics.graph_ancestry import depends_on
from keras_conflux._replication import step_context
from keras_conflux._replication.step_context import StepContext
from keras_conflux._replication.strategy import replica_collectives

Noted = tuple[Any, Callable[[], Any]]
"""The result of a metric, and what computes it from all replicas' counts."""


@contextlib.contextmanager
def noting_results(
    model: keras.Model, context: StepContext
) -> Iterator[list[Noted]]:
    """Notes what the results of the model's metrics are, with the metrics.

    So a step may return one under another name than the metric's. A metric that
    the first step of a replica makes is noted when it is updated.
    """
    noting = {}

    def note(metric: keras.metrics.Metric) -> None:
        if id(metric) in noting or not any(metric is x for x in model.metrics):
            return
        found = vars(metric).setdefault("result", _Noting(metric))
        if isinstance(found, _Noting):
            noting[id(metric)] = found
            found.begin()

    for metric in model.metrics:
        note(metric)
    context.note_metric = note
    try:
        yield context.noted
    finally:
        context.note_metric = None
        for each in noting.values():
            each.end()


class _Noting:
    """Stands for a metric's `result`, and notes what it returns.

    Replicas that pause in `merge_call` share it, and each has its own notes.
    """

    def __init__(self, metric: keras.metrics.Metric) -> None:
        self._metric = metric
        self._result = metric.result
        self._replicas = 0

    def begin(self) -> None:
        self._replicas += 1

    def end(self) -> None:
        self._replicas -= 1
        if not self._replicas:
            vars(self._metric).pop("result", None)

    def __call__(self) -> Any:
        value = self._result()
        context = step_context.current_fit_step()
        if context is not None:
            context.noted.extend(self._parts(value))
        return value

    def _parts(self, value: Any) -> list[Noted]:
        if not isinstance(value, dict):
            return [(value, self._result)]
        return [
            (each, lambda key=key: self._result()[key])
            for key, each in value.items()
        ]


def results_by_position(
    output: Tree, noted: list[Noted]
) -> dict[int, Callable[[], Any]]:
    """Returns what computes the metrics that are among a step's outputs."""
    return {
        position: compute
        for position, leaf in enumerate(keras.tree.flatten(output))
        for value, compute in noted
        if leaf is value
    }


def made_global(output: Tree, context: StepContext) -> Tree:
    """Computes what a step returns from the samples of all replicas.

    Notes in the context how the replicas' leaves become one: "first" where
    they are equal, "rows" where each has entries for its samples, and "mean".
    """
    leaves = []
    context.roles = []
    for position, (path, leaf) in enumerate(trees.with_paths(output)):
        role = "first"
        if leaf is not None and position not in context.results:
            leaf: Any = keras_variables.as_tensor(leaf)
            role, leaf = _role_and_value(leaf, path, context)
        if leaf is not None and role != "first" and process_count() > 1:
            role, leaf = "first", _everywhere(role, leaf, context)
        context.roles.append(role)
        leaves.append(leaf)
    return keras.tree.pack_sequence_as(output, leaves)


def _everywhere(role: str, leaf: tf.Tensor, context: StepContext) -> tf.Tensor:
    """Returns, in each process, what the replicas of all have together."""
    if role == "rows":
        return gathered([leaf], context)[0].all
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, keras.config.floatx())
    fraction = context.batch_fraction
    return replica_collectives().weighted_sum(leaf, fraction)


def _role_and_value(
    leaf: tf.Tensor, path: str, context: StepContext
) -> tuple[str, tf.Tensor]:
    kind = trial.shown(leaf, context)
    if kind == EQUAL:
        return "first", leaf
    has_rows = kind.role is Role.ROWS and kind.axis == 0
    if has_rows and not kind.is_tangled:
        return "rows", leaf
    if kind.role is Role.MEAN and leaf.dtype.is_floating:
        return "mean", leaf
    try:
        return "first", global_values([leaf], context)[0]
    except CannotTell:
        _warn_of_log(context, path, leaf)
        return ("rows" if has_rows else "mean"), leaf


def _warn_of_log(context: StepContext, path: str, leaf: tf.Tensor) -> None:
    # Of unclear losses a warning has told, and what is merged is the user's.
    told = [*context.unclear_losses, *context.kinds.merged]
    if context.kinds.is_blind or depends_on([leaf.op], [x.op for x in told]):
        return
    context.warn_once(
        f"log {path}",
        f"the graph does not show how {path}, which the step returns, is "
        "computed from the samples. The logs have the mean of the replicas' "
        "values, or their rows joined. Compute it from "
        "`keras_conflux.allreduce` or `keras_conflux.allgather` of what the "
        "replicas have.",
    )


def of_global_batch(
    logs: list[Tree],
    fractions: list[tf.Tensor],
    sizes: list[Any],
    context: StepContext,
) -> Tree:
    """Returns the logs of the global batch.

    What a metric of the model gives is computed from all replicas' counts.
    """
    each = [keras.tree.flatten(one) for one in logs]
    merged = [
        _merged(leaves, role, fractions, sizes)
        for role, *leaves in zip(context.roles, *each, strict=True)
    ]
    for position, compute in context.results.items():
        # It may be a variable.
        merged[position] = keras.ops.convert_to_tensor(compute())
    return keras.tree.pack_sequence_as(logs[0], merged)


def _merged(leaves: list, role: str, fractions: list, sizes: list) -> Any:
    if role == "first":
        return leaves[0]
    if role == "rows":
        return joined_rows(leaves, sizes)
    return weighted_mean(tuple(leaves), fractions)


def joined_rows(leaves: Sequence[Any], sizes: list[Any]) -> Any:
    """Joins the replicas' rows, without those of stand-ins for samples.

    Args:
        leaves: One of each replica.
        sizes: How many samples each has, or `None` if it surely has some.
    """
    return rows.joined(
        [
            leaf if size is None else _if_any(leaf, size)
            for leaf, size in zip(leaves, sizes, strict=True)
        ]
    )


def _if_any(leaf: Any, size: tf.Tensor) -> Any:
    length = tf.cast(rows.length_of(leaf), tf.int64)
    return rows.take(leaf, tf.zeros_like(length), tf.sign(size) * length)


def weighted_mean(leaves: tuple[Any, ...], fractions: list[tf.Tensor]) -> Any:
    """Averages the replicas' values, each by its fraction of the samples."""
    if leaves[0] is None:
        return None
    tensors = [tf.convert_to_tensor(leaf) for leaf in leaves]
    if not tensors[0].dtype.is_floating:
        tensors = [tf.cast(tensor, keras.config.floatx()) for tensor in tensors]
    return tf.add_n(
        [
            tf.where(fraction > 0, tensor * tf.cast(fraction, tensor.dtype), 0)
            for tensor, fraction in zip(tensors, fractions, strict=True)
        ]
    )
