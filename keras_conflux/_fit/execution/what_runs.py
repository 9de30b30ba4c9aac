"""Tells, once a model, on which devices it runs, and how."""

import itertools
import os
import weakref
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.notices import tell
from keras_conflux._devices.device import list_devices
from keras_conflux._devices.driver import cure
from keras_conflux._devices.driver import unseen
from keras_conflux._devices.driver import visible_gpus
from keras_conflux._fit.input.execution_plan import ExecutionPlan
from keras_conflux._replication.strategy import ReplicatedStrategy

_told: Any = weakref.WeakKeyDictionary()
"""The strategy that has been told of, by model."""
_has_told_of_driver = False


def tell_what_runs(
    model: keras.Model, plan: ExecutionPlan, sizes: Sequence[int]
) -> None:
    """Tells it where the model has not run on these devices before.

    Of several processes, the first one does.

    Args:
        model: The model that runs.
        plan: The plan of its executions.
        sizes: The number of each replica's samples in the first batch.
    """
    if _told.get(model) is plan.strategy or process_index() > 0:
        return
    _told[model] = plan.strategy
    how = "XLA" if plan.compiled else "without XLA"
    on_gpu = plan.strategy.communicator.on_gpu
    if model.jit_compile is True and not plan.compiled and not on_gpu:
        how = "without XLA, which is for one CPU device or GPUs"
    turns = plan.turns
    if plan.compiled and any(n % turns or n != sizes[0] for n in sizes):
        how = "without XLA where batches are uneven"
    if plan.eager:
        how = f"eagerly on {plan.strategy.devices[0]} alone"
        sizes = [sum(sizes)]
    parts = f", each in {turns} parts" * (turns > 1)
    tell(f"{_devices(plan.strategy)}, {how}, {_batches(sizes)}{parts}")
    if not on_gpu:
        _tell_of_driver()


def _devices(strategy: ReplicatedStrategy) -> str:
    used = len(strategy.devices)
    kind = strategy.devices[0].kind
    there = sum(device.kind == kind for device in list_devices())
    noun = "GPU" if kind == "GPU" else "CPU device"
    count = strategy.communicator.size
    processes = process_count()
    text = f"{count} {noun}{'s' * (count > 1)}"
    if processes > 1:
        text += f" in {processes} processes"
    if used == there:
        return text
    all_of_them = 'for all: kc.replicate(model, devices="all")'
    if processes == 1:
        return f"{used} of {there} {noun}s ({all_of_them})"
    return f"{text}, {used} of {there} in this one ({all_of_them})"


def _batches(sizes: Sequence[int]) -> str:
    total = sum(sizes)
    if len(sizes) == 1:
        return f"batches of {total}"
    parts = [
        f"{len([*group])} x {size}" for size, group in itertools.groupby(sizes)
    ]
    return f"batches of {total} = {' + '.join(parts)}"


def _tell_of_driver() -> None:
    """Tells, once, of GPUs that TensorFlow does not see, with the cure."""
    global _has_told_of_driver
    seen = len(tf.config.list_physical_devices("GPU"))
    if _has_told_of_driver or seen:
        return
    _has_told_of_driver = True
    wrong = unseen(len(visible_gpus(os.environ)), seen)
    if wrong:
        tell(f"{wrong}. Type: {cure(tf.test.is_built_with_cuda())}")
