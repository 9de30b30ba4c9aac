"""The functions that Keras' loops call once for one or several batches."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux import feed
from keras_conflux import program
from keras_conflux import trees
from keras_conflux.engine import statistics
from keras_conflux.strategy import ReplicatedStrategy
from keras_conflux.strategy import replica_index
from keras_conflux.trees import Tree


def make_function(
    model: keras.Model, strategy: ReplicatedStrategy, step: Callable
) -> Callable[[Any], dict]:
    """Makes Keras' `train_function` or `test_function`.

    Args:
        model: A replicated model.
        strategy: What replicates it.
        step: `model.train_step` or `model.test_step`.

    Returns:
        A function of an iterator over global batches that takes
        `model.steps_per_execution` of them and returns the logs.
    """
    one_step = _on_global_batch(model, strategy, step)
    several = model.steps_per_execution
    if not model.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True)

    @tf.autograph.experimental.do_not_convert
    def several_steps(batch: Tree, iterator: Any) -> dict:
        def more(step: Any, following: Any, logs: dict) -> Any:
            return tf.logical_and(step < several, following.has_value())

        def advance(step: Any, following: Any, logs: dict) -> Any:
            logs = one_step(following.get_value())
            following = tf.cond(
                step + 1 < several,
                iterator.get_next_as_optional,
                lambda: following,
            )
            return step + 1, following, logs

        first = (
            tf.constant(1),
            iterator.get_next_as_optional(),
            one_step(batch),
        )
        return tf.while_loop(more, advance, first)[2]

    if not model.run_eagerly:
        several_steps = tf.function(several_steps, reduce_retracing=True)

    def function(iterator: Any) -> dict:
        try:
            # Drawn before the step, for an end of data inside it would stop
            # some replicas before others.
            batch = _without_optionals(next(iterator))
            in_graph = isinstance(iterator, tf.data.Iterator)
            if several == 1:
                return one_step(batch)
            if in_graph and not model.run_eagerly:
                return several_steps(batch, iterator)
            logs = one_step(batch)
            for _, batch in zip(range(several - 1), iterator, strict=False):
                logs = one_step(_without_optionals(batch))
            return logs
        except (StopIteration, tf.errors.OutOfRangeError):
            raise
        except BaseException:
            strategy.communicator.recover()
            raise

    return function


def make_predict_function(
    model: keras.Model, strategy: ReplicatedStrategy
) -> Callable[[list[Tree]], Tree]:
    """Makes Keras' `predict_function`, of a list of global batches."""
    count = len(strategy.devices)

    @tf.autograph.experimental.do_not_convert
    def one_step(batch: Tree) -> Tree:
        parts, sizes = _parts(batch, strategy)
        outputs: dict[int, Tree] = {}

        def one_replica() -> None:
            index = replica_index()
            running = program.Program(model.name, share=_shares(sizes)[index])
            with program.running(running):
                outputs[index] = model.predict_step(parts[index])

        strategy.run(tf.autograph.experimental.do_not_convert(one_replica))
        # What a replica without samples predicted of its stand-in is dropped.
        kept = [
            trees.map_leaves(lambda leaf, n=sizes[i]: leaf[:n], outputs[i])
            for i in range(count)
        ]
        return _joined(kept)

    if not model.run_eagerly:
        one_step = tf.function(one_step, reduce_retracing=True)

    def function(batches: list[Tree]) -> Tree:
        return _joined([one_step(_without_optionals(b)) for b in batches])

    return function


def _on_global_batch(
    model: keras.Model, strategy: ReplicatedStrategy, step: Callable
) -> Callable[[Tree], dict]:
    count = len(strategy.devices)

    @tf.autograph.experimental.do_not_convert
    def one_step(batch: Tree) -> dict:
        parts, sizes = _parts(batch, strategy)
        shares = _shares(sizes)
        outputs: dict[int, dict] = {}
        programs: dict[int, program.Program] = {}

        def one_replica() -> None:
            index = replica_index()
            programs[index] = program.Program(model.name, share=shares[index])
            with program.running(programs[index]):
                before = _metric_state(model, sizes[index])
                outputs[index] = step(parts[index])
                _restore(before, sizes[index])
                statistics.average(model, programs[index])

        strategy.run(tf.autograph.experimental.do_not_convert(one_replica))
        logs = [outputs[index] for index in range(count)]
        return _global_logs(model, logs, shares, programs[0])

    return one_step


def _parts(
    batch: Tree, strategy: ReplicatedStrategy
) -> tuple[list[Tree], list[Any]]:
    """Returns each replica's part of a batch, and its number of samples.

    A replica without samples gets one of the others' to run on.
    """
    count = len(strategy.devices)
    distributed = [
        leaf
        for leaf in trees.flatten(batch)
        if isinstance(leaf, tf.distribute.DistributedValues)
    ]
    if distributed:  # the user's own DistributedDataset has split it
        parts = [
            trees.map_leaves(
                lambda leaf, i=index: strategy.experimental_local_results(leaf)[
                    i
                ],
                batch,
            )
            for index in range(count)
        ]
        return parts, [feed.sample_count(part) for part in parts]
    total = feed.sample_count(batch)
    parts = [
        feed.part_of(batch, index, count, at_least_one=True)
        for index in range(count)
    ]
    limits = [feed.bounds(total, index, count) for index in range(count)]
    return parts, [end - begin for begin, end in limits]


def _shares(sizes: list[Any]) -> list[tf.Tensor]:
    floats = [tf.cast(size, tf.float32) for size in sizes]
    total = tf.add_n(floats)
    return [tf.math.divide_no_nan(size, total) for size in floats]


def _metric_state(model: keras.Model, size: Any) -> list[tuple]:
    """Remembers the metrics of a replica that may have no samples."""
    if isinstance(size, int) and size > 0:
        return []
    return [(v, v.value + 0) for v in model.metrics_variables]


def _restore(before: list[tuple], size: Any) -> None:
    for variable, old in before:
        variable.assign(tf.where(size > 0, variable.value, old))


def _global_logs(
    model: keras.Model,
    logs: list[dict],
    shares: list[tf.Tensor],
    running: program.Program,
) -> dict:
    """Returns the logs of the global batch.

    What a metric of the model gives is computed from all replicas' counts;
    anything else that a `train_step` returns is averaged by shares.
    """
    merged = keras.tree.map_structure(
        lambda *leaves: _weighted_mean(leaves, shares), *logs
    )
    if isinstance(merged, dict):
        merged.update(
            (name, value)
            for name, value in _metric_results(model, running).items()
            if name in merged
        )
    return merged


def _metric_results(model: keras.Model, running: program.Program) -> dict:
    results: dict[str, Any] = {}
    for metric in model.metrics:
        if not any(id(v) in running.assigned for v in metric.variables):
            continue
        result = metric.result()
        results.update(
            result if isinstance(result, dict) else {metric.name: result}
        )
    return results


def _weighted_mean(leaves: tuple[Any, ...], shares: list[tf.Tensor]) -> Any:
    if leaves[0] is None:
        return None
    tensors = [tf.convert_to_tensor(leaf) for leaf in leaves]
    if not tensors[0].dtype.is_floating:
        tensors = [tf.cast(tensor, keras.config.floatx()) for tensor in tensors]
    return tf.add_n(
        [
            tf.where(share > 0, tensor * tf.cast(share, tensor.dtype), 0)
            for tensor, share in zip(tensors, shares, strict=True)
        ]
    )


def _joined(parts: list[Tree]) -> Tree:
    if len(parts) == 1:
        return parts[0]
    return keras.tree.map_structure(lambda *leaves: _concat(leaves), *parts)


def _concat(leaves: tuple[Any, ...]) -> Any:
    if isinstance(leaves[0], tf.SparseTensor):
        return tf.sparse.concat(0, leaves)
    return tf.concat(leaves, 0)


def _without_optionals(batch: Tree) -> Tree:
    # Keras' adapters put an Optional where a batch has None.
    return keras.tree.map_structure(
        lambda leaf: (
            None if isinstance(leaf, tf.experimental.Optional) else leaf
        ),
        batch,
    )
