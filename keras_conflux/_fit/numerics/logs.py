"""What callbacks and `History` are told: the numbers of the global batch."""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._common.trees import Tree
from keras_conflux._replication.step_context import StepContext


def metric_state(model: keras.Model, size: Any) -> list[tuple]:
    """Remembers the metrics of a replica that may have no samples.

    Args:
        model: Whose metrics.
        size: How many samples, or `None` if there surely are some.
    """
    if size is None:
        return []
    return [(v, v.value + 0) for v in model.metrics_variables]


def restore(before: list[tuple], size: Any, context: StepContext) -> None:
    """Puts the metrics of a replica without samples back."""
    for variable, old in before:
        if id(variable) in context.assigned:
            variable.assign(tf.where(size > 0, variable.value, old))


@contextlib.contextmanager
def noting_results(model: keras.Model) -> Iterator[list[tuple[Any, Any]]]:
    """Notes what the results of the model's metrics are, with the metrics.

    So a step may return one under another name than the metric's.
    """
    noted: list[tuple[Any, Any]] = []
    metrics = [m for m in model.metrics if "result" not in vars(m)]

    def noting(metric: keras.metrics.Metric) -> Callable:
        original = metric.result

        def result() -> Any:
            value = original()
            noted.append((value, metric))
            return value

        return result

    for metric in metrics:
        vars(metric)["result"] = noting(metric)
    try:
        yield noted
    finally:
        for metric in metrics:
            vars(metric).pop("result", None)


def metrics_by_name(output: Tree, noted: list[tuple[Any, Any]]) -> dict:
    """Returns by name the metrics whose results are among a step's outputs."""
    if not isinstance(output, dict):
        return {}
    return {
        name: metric
        for name, leaf in output.items()
        for value, metric in noted
        if leaf is value
    }


def of_global_batch(
    model: keras.Model,
    logs: list[dict],
    fractions: list[tf.Tensor],
    context: StepContext,
) -> dict:
    """Returns the logs of the global batch.

    What a metric of the model gives is computed from all replicas' counts;
    anything else that a `train_step` returns is averaged, weighted by the
    replicas' fractions of the batch.
    """
    merged: Any = keras.tree.map_structure(
        lambda *leaves: weighted_mean(leaves, fractions), *logs
    )
    if isinstance(merged, dict):
        results = _metric_results(model, context)
        for name, metric in context.named.items():
            if name not in results or name != metric.name:
                results[name] = metric.result()
        merged.update(
            (name, value) for name, value in results.items() if name in merged
        )
    return merged


def _metric_results(model: keras.Model, context: StepContext) -> dict:
    results: dict[str, Any] = {}
    for metric in model.metrics:
        if not any(id(v) in context.assigned for v in metric.variables):
            continue
        result = metric.result()
        results.update(
            result if isinstance(result, dict) else {metric.name: result}
        )
    return results


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
