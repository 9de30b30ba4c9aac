"""Notes on errors of memory: its use, and ways to save it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._compat import keras_models
from keras_conflux._extensions.memory import compat
from keras_conflux._extensions.memory import step as step_of
from keras_conflux._extensions.memory.model_memory import SHARDS
from keras_conflux._extensions.memory.model_memory import Memory
from keras_conflux._extensions.memory.model_memory import limit_of
from keras_conflux._extensions.memory.model_memory import memory
from keras_conflux._extensions.memory.model_memory import readable
from keras_conflux._extensions.memory.model_memory import strategy_of
from keras_conflux._replication import combinations
from keras_conflux._replication import model_options
from keras_conflux._replication import state
from keras_conflux._replication.strategy import distribution_strategy

_Row = tuple[str, str]
"""A way to save memory, and how much, or how."""


def explain(error: BaseException, model: Any, keeps_activations: bool) -> None:
    """Adds a note to an error of memory, of a step with a model or without."""
    if not isinstance(error, tf.errors.ResourceExhaustedError):
        return
    found = None
    if model is not None:
        with contextlib.suppress(ValueError):  # it is not built
            found = memory(model)
    step = compat.bytes_of_failed_program(error)
    rows: list[_Row] = [] if found is None else [*_shards(model, found)]
    if found is not None and keeps_activations:
        rows += _turns(model, found, step)
    if keeps_activations:
        does = "computes activations again, which a training keeps otherwise"
        rows.append(("keras.RematScope", _at_most(step) + does))
    half = None if step is None else step // 2
    does = (
        "in a training, `gradient_accumulation_steps` of the optimizer keeps "
        "the updates of the whole one"
    )
    rows.append(("half of the batch", _at_most(half) + does))
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:<{width}}  {does}" for name, does in rows]
    error.add_note("\n".join([_taken(model, found, step), *lines]))


def _taken(model: Any, found: Memory | None, step: int | None) -> str:
    if found is None:
        return (
            "A device had no memory for its program. "
            "`keras_conflux.memory(model, batch)` tells the memory of a model "
            "there, before it runs. Less memory is needed with:"
        )
    limit = limit_of(strategy_of(model))
    there = f" of {readable(limit)}" if limit else ""
    besides = "the rest is for a step"
    if step is not None:
        besides = f"a step needs {readable(step)} besides, says XLA"
    tells = "(model, batch)` tells both"
    if keras_models.has_own_step(model, "train_step"):
        tells = "(model)` tells the first"
    return (
        f"{model.name}: a device had no memory for its program. Variables "
        f"take {readable(found.variables)}{there} on each of "
        f"{found.devices}, {besides}. `keras_conflux.memory{tells} before "
        "training. Less is needed with one of these, where `...` stands for "
        "the present options of `replicate`:"
    )


def _shards(model: Any, found: Memory) -> Iterator[_Row]:
    """Yields a row for each choice of `shard` that saves something."""
    turns = model_options.microbatches_of(model)
    owners = [*state.stateful_objects(model)]
    is_distributed = distribution_strategy() is not None
    for shard in SHARDS:
        saved = found.variables - found.with_shard(shard).variables
        if saved <= 0 or combinations.refusal(shard, turns, owners):
            continue
        saves = f"{readable(saved)} of the variables on each device"
        if not is_distributed:
            yield f'replicate(..., shard="{shard}")', f"saves {saves}"
        elif shard == "weights":  # a distributed model is replicated already
            yield "keras.distribution.ModelParallel", f"saves at most {saves}"


def _turns(model: Any, found: Memory, step: int | None) -> Iterator[_Row]:
    """Yields a row for as many turns as fit, or twice as many as there are."""
    turns = model_options.microbatches_of(model)
    owners = [*state.stateful_objects(model)]
    if combinations.refusal(found.shard, 2 * turns, owners):
        return
    saved = None
    times = 2
    if step is not None:
        # Sums of gradients come with the first turns, and no activations later.
        gradients = sum(map(trees.bytes_of, model.trainable_variables))
        activations = step - gradients * (turns > 1)
        limit = limit_of(strategy_of(model))
        fitting = step_of.turns_that_fit(
            activations, gradients, found.variables, limit
        )
        times = max(2, fitting or 2)
        saved = activations - activations // times - gradients * (turns == 1)
    if saved is None or saved > 0:
        yield (
            f"replicate(..., microbatches={times * turns})",
            f"{_at_most(saved)}runs a batch in parts, one after another, with "
            "the same result",
        )


def _at_most(saved: int | None) -> str:
    return "" if saved is None else f"saves at most {readable(saved)}: "
