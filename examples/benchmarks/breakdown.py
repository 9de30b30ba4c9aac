"""Where the time of a step goes, by leaving parts of it out."""

import functools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from keras_conflux._communication.communicator import Communicator
from keras_conflux._fit.input.batch_sharder import BatchSharder
from keras_conflux._fit.input.device_batches import StepGroup
from keras_conflux._fit.input.execution_plan import ExecutionPlan

STEPS = 16
REPEATS = 5


def of_program(model: keras.Model, data: Any) -> dict[str, float]:
    """Times the program that a replicated model's `fit` calls.

    Args:
        model: Trained before, so that everything is built.
        data: A global batch.

    Returns:
        Milliseconds: `step_ms`, what each further step of a call takes, on
        batches that lie on the devices already; `alone_ms`, the same where
        replicas exchange nothing, so what is missing is communication that
        nothing hid; `call_ms`, what a call takes besides its steps; `input_ms`,
        what a batch takes to be split and to travel while nothing runs.
    """
    call, step = _seconds(model, data)
    with mock.patch.object(Communicator, "all_reduce", _nothing):
        _, alone = _seconds(model, data)
    model.make_train_function(force=True)
    seconds = {
        "step_ms": step,
        "alone_ms": alone,
        "call_ms": call,
        "input_ms": _input_seconds(model, data),
    }
    return {name: round(s * 1e3, 3) for name, s in seconds.items()}


def _nothing(_: Any, tensor: tf.Tensor, *call: Any) -> tf.Tensor:
    del call
    return tf.identity(tensor)


def _seconds(model: keras.Model, data: Any) -> tuple[float, float]:
    """Returns what a call takes, and what each of its steps."""
    model.make_train_function(force=True)
    train: Any = model.train_function
    shard = _sharder(model)

    def run(group: StepGroup) -> None:
        keras.tree.map_structure(float, train(group))

    few, many = (
        _fastest(functools.partial(run, StepGroup(shard([data] * n), STEPS)))
        for n in (STEPS // 2, STEPS)
    )
    step = (many - few) / (STEPS // 2)
    return max(many - step * STEPS, 0.0), step


def _input_seconds(model: keras.Model, data: Any) -> float:
    shard = _sharder(model)

    def move() -> None:
        for batch in shard([data] * STEPS):
            for leaves in batch.shards:
                for leaf in leaves:
                    tf.reshape(leaf, [-1])[:1].numpy()  # waits

    return _fastest(move) / STEPS


def _sharder(model: keras.Model) -> BatchSharder:
    return ExecutionPlan.of(model, model.distribute_strategy).sharder()


def _fastest(function: Callable[[], Any]) -> float:
    seconds = []
    for _ in range(REPEATS + 1):  # the first one traces or compiles
        began = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
