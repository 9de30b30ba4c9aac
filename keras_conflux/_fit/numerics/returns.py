"""The results of a step: numbers and outputs of the global batch."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import kind_by_trial
from keras_conflux._batch_analysis import rows as kind_of_rows
from keras_conflux._cluster.processes import process_count
from keras_conflux._common import rows
from keras_conflux._common import trees
from keras_conflux._communication import dtypes
from keras_conflux._compat import keras_variables
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.gathered_rows import gathered
from keras_conflux._fit.numerics.global_values import global_values
from keras_conflux._fit.numerics.global_values import own_rows
from keras_conflux._fit.numerics.warnings import UnclearLosses
from keras_conflux._fit.numerics.warnings import warn_of_input
from keras_conflux._fit.numerics.writes import Writes
from keras_conflux._graphs import walks
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.steps import Step


class _Result(NamedTuple):
    """The result of a metric in a step."""

    value: Any
    compute: Callable[[], Any]
    """Computes it from the counts of all replicas after the step."""
    is_last: Callable[[], bool]
    """Whether the metric has not changed since."""


class Returns(Exit):
    """The results of a step, of which replicas return a leaf each.

    They become one leaf: "first" where they are equal, "rows" where each has
    entries for its samples, and "mean".
    """

    _merge_by: list[str]

    def merged(
        self, outputs: list[trees.Tree], fractions: list, sizes: list
    ) -> trees.Tree:
        """Returns the result of one device, outside of all replicas.

        It takes the replicas' results, their samples over the global batch's,
        and how many samples each has, or `None` if it surely has some.
        """
        each = [keras.tree.flatten(one) for one in outputs]
        leaves = [
            _merged(leaves, role, fractions, sizes)
            for role, *leaves in zip(self._merge_by, *each, strict=True)
        ]
        return keras.tree.pack_sequence_as(outputs[0], leaves)


class Logs(Returns):
    """The results of `train_step` and `test_step`, for callbacks."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._metrics: dict[int, _Noting] | None = None
        self._results: list[_Result] = []
        self._computed: dict[int, Callable[[], Any]] = {}
        self.unknown_inputs: list[tuple[keras.metrics.Metric, Any]] = []
        """Metrics with numbers that nobody can compute, as losses may be."""

    @contextlib.contextmanager
    def noting_results(self) -> Iterator[None]:
        """Notes the results of the model's metrics, with the metrics.

        So a step may return one under another name than the metric's.
        """
        self._metrics = {}
        for metric in self.step.model.metrics:
            self.note_metric(metric)
        try:
            yield
        finally:
            for each in self._metrics.values():
                each.end()
            self._metrics = None

    def note_metric(self, metric: keras.metrics.Metric) -> None:
        """Notes a metric, which the step may have made, when it is updated."""
        known = self._metrics
        if known is None or id(metric) in known:
            return
        if not any(metric is each for each in self.step.model.metrics):
            return
        found = vars(metric).setdefault("result", _Noting(metric))
        if isinstance(found, _Noting):
            known[id(metric)] = found
            found.begin()

    def note_result(
        self, value: Any, make: Callable[[], Any], metric: keras.metrics.Metric
    ) -> None:
        """Notes the result of a metric, and the function that computes it."""
        writes = Writes.of(self.step)
        times = writes.times(metric.variables)

        def is_last() -> bool:
            return writes.times(metric.variables) == times

        if not isinstance(value, dict):
            self._results.append(_Result(value, make, is_last))
            return
        self._results.extend(
            _Result(each, lambda key=key: make()[key], is_last)
            for key, each in value.items()
        )

    def end(self, output: trees.Tree) -> trees.Tree:
        """Computes the results of a step from the samples of all replicas.

        See `Exit`.
        """
        self._computed = {
            position: compute
            for position, leaf in enumerate(keras.tree.flatten(output))
            for value, compute, is_last in self._results
            if leaf is value and is_last()
        }
        for metric, value in self.unknown_inputs:
            warn_of_input(self.step, metric, value)
        leaves = []
        self._merge_by = []
        for position, (path, leaf) in enumerate(trees.with_paths(output)):
            role = "first"
            if leaf is not None and position not in self._computed:
                leaf: Any = keras_variables.as_tensor(leaf)
                role, leaf = _role_and_value(leaf, path, self.step)
            is_apart = process_count() > 1 or self.step.turns is not None
            if leaf is not None and role != "first" and is_apart:
                role, leaf = "first", _everywhere(role, leaf, self.step)
            self._merge_by.append(role)
            leaves.append(leaf)
        return keras.tree.pack_sequence_as(output, leaves)

    def merged(
        self, outputs: list[trees.Tree], fractions: list, sizes: list
    ) -> trees.Tree:
        """Returns the logs of the global batch. See `Returns`.

        Results of a model's metrics come from all replicas' counts.
        """
        result = super().merged(outputs, fractions, sizes)
        leaves = keras.tree.flatten(result)
        for position, compute in self._computed.items():
            # It may be a variable.
            leaves[position] = keras.ops.convert_to_tensor(compute())
        return keras.tree.pack_sequence_as(result, leaves)


class _Noting:
    """Stands for a metric's `result`, and notes its values.

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
        step = steps.current_fit_step()
        if step is not None:
            Logs.of(step).note_result(value, self._result, self._metric)
        return value


class Predictions(Returns):
    """The results of `predict_step`: the outputs for the global batch."""

    is_local = False
    """Whether a process keeps the outputs of its own part alone."""

    def end(self, output: trees.Tree) -> trees.Tree:
        """Gives each process the outputs that it wants. See `Exit`."""
        found = [
            ("first", leaf) if leaf is None else self._of_one_device(path, leaf)
            for path, leaf in trees.with_paths(output)
        ]
        self._merge_by = [role for role, _ in found]
        return keras.tree.pack_sequence_as(output, [leaf for _, leaf in found])

    def _of_one_device(self, path: str, leaf: Any) -> tuple[str, Any]:
        """Returns an output, and how it becomes one with other replicas'."""
        if isinstance(leaf, tf.Tensor) and not self.step.kinds.is_blind:
            kind = kind_by_trial(leaf, self.step.kinds)
            if not kind.are_joined:
                are_rows = kind.role is Role.ROWS and kind.axis == 0
                try:
                    if self.is_local and are_rows:
                        return "rows", own_rows(leaf, self.step)
                    return "first", global_values([leaf], self.step)[0]
                except NotDerivable:
                    _warn_of_return(self.step, path, leaf, "predictions")
        # One number, as of a metric, is a mean over samples.
        shape = tf.TensorShape(getattr(leaf, "shape", ()))
        role = "mean" if shape.rank == 0 else "rows"
        stays = self.is_local and role == "rows"
        if stays or process_count() == 1:
            return role, leaf
        return "first", self._everywhere(role, leaf)

    def _everywhere(self, role: str, leaf: Any) -> tf.Tensor:
        """Returns the outputs of all replicas for the global batch, in each."""
        if not isinstance(leaf, tf.Tensor):
            raise NotImplementedError(
                f"{self.step.name}: `predict` over several processes returns "
                f"dense tensors. Received: a {type(leaf).__name__}. Make it "
                "dense in `predict_step`."
            )
        if role == "rows":
            is_regular = not self.step.may_be_empty
            self.step.kinds.mark(leaf, kind_of_rows(0, regular=is_regular))
        return _everywhere(role, leaf, self.step)


def _everywhere(role: str, leaf: tf.Tensor, step: Step) -> tf.Tensor:
    """Returns, in each process, the values of all processes' replicas."""
    if role == "rows":
        return gathered([leaf], step)[0].all
    if not leaf.dtype.is_floating:
        leaf = tf.cast(leaf, keras.config.floatx())
    return replica_collectives().weighted_sum(leaf, step.batch_fraction)


def _role_and_value(
    leaf: tf.Tensor, path: str, step: Step
) -> tuple[str, tf.Tensor]:
    kind = kind_by_trial(leaf, step.kinds)
    if kind == EQUAL:
        return "first", leaf
    if kind.are_joined:
        return "rows", leaf
    if kind.role is Role.MEAN and leaf.dtype.is_floating:
        return "mean", leaf
    try:
        return "first", global_values([leaf], step)[0]
    except NotDerivable:
        _warn_of_return(step, path, leaf, "logs")
        has_rows = kind.role is Role.ROWS and kind.axis == 0
        return ("rows" if has_rows else "mean"), leaf


def _warn_of_return(step: Step, path: str, leaf: tf.Tensor, what: str) -> None:
    # A warning has told of unclear losses, and merged values are the user's.
    if step.kinds.is_blind or UnclearLosses.of(step).lead_to(leaf):
        return
    if walks.depends_on([leaf.op], [x.op for x in step.kinds.merged]):
        return
    step.warn_once(
        f"{what} {path}",
        f"the graph does not show how {path}, which the step returns, is "
        f"computed from the samples. The {what} have the mean of the "
        "replicas' values, or their rows joined. Compute it from "
        "`keras_conflux.allreduce` or `keras_conflux.allgather` of the "
        "replicas' values.",
    )


def _merged(leaves: list, role: str, fractions: list, sizes: list) -> Any:
    if role == "first":
        return leaves[0]
    if role == "mean":
        tensors = map(tf.convert_to_tensor, leaves)
        return tf.add_n([*map(dtypes.weighted, tensors, fractions)])
    return rows.joined([*map(_if_any, leaves, sizes)])


def _if_any(leaf: Any, size: tf.Tensor | None) -> Any:
    """Returns a replica's rows, if they are not of a stand-in for samples."""
    if size is None:
        return leaf
    length = tf.cast(rows.length_of(leaf), tf.int64)
    return rows.take(leaf, tf.zeros_like(length), tf.sign(size) * length)
