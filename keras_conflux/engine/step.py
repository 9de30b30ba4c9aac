"""The functions that Keras' loops call once for one or several batches."""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux import feed
from keras_conflux import program
from keras_conflux import synchronization
from keras_conflux import trees
from keras_conflux.engine import logs
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

    @tf.autograph.experimental.do_not_convert
    def several_steps(batch: Tree, iterator: Any) -> dict:
        def more(step: Any, following: Any, _: dict) -> Any:
            return tf.logical_and(step < several, following.has_value())

        def advance(step: Any, following: Any, _: dict) -> Any:
            latest = one_step(_without_optionals(following.get_value()))
            following = tf.cond(
                step + 1 < several,
                iterator.get_next_as_optional,
                lambda: following,
            )
            return step + 1, following, latest

        following = iterator.get_next_as_optional()
        first = (tf.constant(1), following, one_step(batch))
        return tf.while_loop(more, advance, first)[2]

    compiled = _Traced(one_step, model.run_eagerly)
    compiled_several = _Traced(several_steps, model.run_eagerly)

    def steps(iterator: Any) -> dict:
        # Drawn before the step, for an end of data inside it would stop some
        # replicas before others.
        batch = _without_optionals(next(iterator))
        if not isinstance(iterator, tf.data.Iterator):
            spec = None
        else:
            spec = iterator.element_spec
            if several > 1 and not model.run_eagerly:
                return compiled_several(batch, spec, iterator)
        latest = compiled(batch, spec)
        for _, batch in zip(range(several - 1), iterator, strict=False):
            latest = compiled(_without_optionals(batch), spec)
        return latest

    def function(iterator: Any) -> dict:
        with strategy.communicator.lock:
            try:
                return steps(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                raise
            except BaseException:
                # Replicas have stopped at different places.
                strategy.communicator.recover()
                synchronization.synchronize(model)
                raise

    return function


class _Traced:
    """A function of a batch, traced for what an iterator says it yields.

    Traced for the shapes of a batch instead, it would be traced again for the
    last one, and what depends on static shapes would differ from one device.
    """

    def __init__(self, function: Callable, eager: bool) -> None:
        self._eager = eager
        self._function = function
        self._compiled: dict[Any, Callable] = {}

    def __call__(self, batch: Tree, spec: Tree, *iterator: Any) -> Any:
        if self._eager:
            return self._function(batch, *iterator)
        leaves = trees.flatten(batch)
        present = [leaf for leaf in leaves if leaf is not None]
        places = tuple(leaf is not None for leaf in leaves)
        specs = None
        if spec is not None:
            pairs = zip(trees.flatten(spec), places, strict=True)
            specs = tuple(spec for spec, is_there in pairs if is_there)
        key = (str(trees.paths(batch)), places, specs)
        if key not in self._compiled:
            self._compiled[key] = self._compile(batch, specs, iterator)
        return self._compiled[key](present, *iterator)

    def _compile(self, batch: Tree, specs: Any, iterator: Any) -> Callable:
        structure = trees.map_leaves(lambda _: 0, batch)
        options: dict[str, Any] = {"reduce_retracing": True}
        if specs is not None:
            options = {"input_signature": [list(specs)]}
            for each in iterator:
                options["input_signature"].append(
                    tf.data.IteratorSpec(each.element_spec)
                )

        @tf.autograph.experimental.do_not_convert
        def packed(present: list[Any], *iterator: Any) -> Any:
            leaves = iter(present)
            batch = trees.map_leaves(lambda _: next(leaves), structure)
            return self._function(batch, *iterator)

        return tf.function(packed, **options)


def make_predict_function(
    model: keras.Model, strategy: ReplicatedStrategy
) -> Callable[[list[Tree]], Tree]:
    """Makes Keras' `predict_function`, of a list of global batches."""
    count = len(strategy.devices)

    @tf.autograph.experimental.do_not_convert
    def one_step(batch: Tree) -> Tree:
        parts, sizes = _parts(batch, strategy)
        shares = _shares(sizes)
        outputs: dict[int, Tree] = {}

        def one_replica() -> None:
            index = replica_index()
            running = program.Program(model.name, share=shares[index])
            with program.running(running):
                outputs[index] = model.predict_step(parts[index])

        strategy.run(tf.autograph.experimental.do_not_convert(one_replica))
        # What a replica without samples predicted of its stand-in is dropped.
        kept = [
            trees.map_leaves(lambda leaf, n=sizes[i]: leaf[:n], outputs[i])
            for i in range(count)
        ]
        return _joined(kept)

    compiled = _Traced(one_step, model.run_eagerly)

    def function(batches: list[Tree]) -> Tree:
        with strategy.communicator.lock:
            return _joined(
                [compiled(_without_optionals(b), None) for b in batches]
            )

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
                before = logs.metric_state(model, sizes[index])
                outputs[index] = step(parts[index])
                logs.restore(before, sizes[index])
                statistics.reduce_states(model, programs[index])

        strategy.run(tf.autograph.experimental.do_not_convert(one_replica))
        each = [outputs[index] for index in range(count)]
        return logs.of_global_batch(model, each, shares, programs[0])

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
