"""Causes of a data set's other batches each time, by name."""

import types
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import seed_is_drawn
from keras_conflux._compat import tensorflow_internals
from keras_conflux._extensions.resume import data_state
from keras_conflux._extensions.resume.compat import pipelines
from keras_conflux._graphs.effects import Effect
from keras_conflux._graphs.effects import of_type


def causes(
    dataset: Any, source: Any = None, anew: bool = False, is_cut: bool = False
) -> list[str]:
    """Returns why batches cannot be drawn a second time, a phrase for each.

    Data without an end is drawn from once, unless iterators begin it `anew`.
    """
    found = dict.fromkeys(_of_dataset(dataset))
    if pipelines.begins_shuffles_later(dataset) and (
        anew or dataset.cardinality() != tf.data.INFINITE_CARDINALITY
    ):
        found[
            "it is shuffled before it is repeated, concatenated or cached "
            "(shuffle it after that, or repeat it without end for one `fit`, "
            "with `steps_per_epoch`)"
        ] = None
    if isinstance(source, keras.utils.PyDataset) and source.workers > (
        0 if source.use_multiprocessing else 1
    ):
        found[
            f"its {source.workers} worker(s) shuffle it, unless `fit` is given "
            "shuffle=False, and draw random numbers in any order, or in other "
            "processes, if they draw any"
        ] = None
    if data_state.draws_by_itself(dataset, source):
        found[
            "its Python code has a random generator, or a data set that "
            "shuffles, that is no attribute of a `PyDataset`, such as a global "
            "(draw from `np.random`)"
        ] = None
    if isinstance(source, keras.utils.PyDataset) and is_cut:
        hooks = {type(source).on_epoch_begin, type(source).on_epoch_end}
        plain = keras.utils.PyDataset
        if hooks - {plain.on_epoch_begin, plain.on_epoch_end}:
            found[
                "its `on_epoch_begin` or `on_epoch_end` runs while batches are "
                "drawn ahead (leave `steps_per_epoch` out)"
            ] = None
    if isinstance(source, types.GeneratorType):
        found[
            "it is a generator, which goes on where former calls, which draw "
            "ahead, have left it (give each call of `fit` one of its own)"
        ] = None
    return list(found)


def _of_dataset(dataset: Any) -> Iterator[str]:
    if not isinstance(dataset, tf.data.Dataset):
        return
    if dataset.options().deterministic is False:
        yield "its option `deterministic` is False"
    if any(
        Effect.WRITES in of_type(operation.type)
        for each in pipelines.caches_below(dataset)
        for below in pipelines.datasets_below(each)
        for operation in pipelines.operations_of_dataset(below)
    ):
        yield (
            "it keeps by `cache` values computed with variables that go on, "
            "such as of a `SeedGenerator` (call `cache` before that `map`, or "
            "give it a file)"
        )
    if any(map(data_state.may_draw, pipelines.caches_below(dataset))):
        yield (
            "it keeps by `cache` what Python code has made, which uses random "
            "numbers (call `cache` before that code, or give it a file)"
        )
    for each in pipelines.datasets_below(dataset):
        seeds = pipelines.seeds_of_dataset(each)
        if seeds is not None and (seed_is_drawn() or not any(seeds)):
            yield "it shuffles without a seed"
        if pipelines.is_out_of_order(each):
            yield "it maps with `deterministic=False`"
        for operation in pipelines.operations_of_dataset(each):
            if _has_no_seed(operation):
                yield f"it uses `{operation.type}` without a seed"
            if operation.type.startswith(("LookupTableI", "LookupTableRemove")):
                yield f"it changes a table by `{operation.type}`"
        if pipelines.has_unknown_parts(each):
            yield (
                "it draws from another data set, whose parts cannot be found "
                "(make that data set inside of the function, and shuffle no "
                "`choice_dataset`)"
            )
        if pipelines.is_parallel(each):
            yield from _of_parallel_calls(each)


def _of_parallel_calls(dataset: Any) -> Iterator[str]:
    if tensorflow_internals.is_deterministic():
        return
    for operation in pipelines.operations_of_dataset(dataset):
        if _draws_in_turn(operation):
            yield (
                f"it uses `{operation.type}` in parallel calls, which get its "
                "numbers in any order (leave `num_parallel_calls` out, or use "
                "stateless operations)"
            )
        if pipelines.is_python(operation):
            yield (
                "it calls Python code in parallel, which draws random numbers "
                "in any order, if it draws any (leave `num_parallel_calls` out)"
            )


_WRITES_SEEDS = ("AssignVariableOp", "RngReadAndSkip")


def _draws_in_turn(operation: tf.Operation) -> bool:
    names = {attribute.name for attribute in operation.op_def.attr}
    draws = {"seed", "seed2"} <= names or operation.type in _WRITES_SEEDS
    return operation.op_def.is_stateful and draws


def _has_no_seed(operation: tf.Operation) -> bool:
    names = {attribute.name for attribute in operation.op_def.attr}
    if {"seed", "seed2"} <= names:
        seeds = operation.get_attr("seed"), operation.get_attr("seed2")
        return seed_is_drawn() or not any(seeds)
    if operation.type == "ShuffleDatasetV3":
        seeds = map(tf.get_static_value, operation.inputs[2:4])
        # None is not known.
        return seed_is_drawn() or all(seed == 0 for seed in seeds)
    return False
