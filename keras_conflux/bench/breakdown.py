"""Where the time of a step goes, by leaving parts of it out."""

import time
from typing import Any
from unittest import mock

import keras
import tensorflow as tf

from keras_conflux.communicator import Communicator
from keras_conflux.engine.batches import Splitter
from keras_conflux.engine.epoch import Chunk
from keras_conflux.engine.step import compiles

STEPS = 16
REPEATS = 5


def of_program(model: keras.Model, data: Any) -> dict[str, float]:
    """Times the program that a replicated model's `fit` calls.

    Args:
        model: Trained before, so that everything is built.
        data: A global batch.

    Returns:
        Milliseconds a step: `program_ms`, on batches that lie on the devices
        already, so what `fit` takes longer is the input; `call_ms`, the part
        of it that a call takes however many steps it has; `alone_ms`, the rest
        where replicas exchange nothing, so what is missing is communication
        that nothing hid.
    """
    call, step = _seconds(model, data)
    with mock.patch.object(Communicator, "all_reduce", _nothing):
        _, alone = _seconds(model, data)
    model.make_train_function(force=True)
    return {
        "program_ms": (step + call / STEPS) * 1e3,
        "call_ms": call / STEPS * 1e3,
        "alone_ms": alone * 1e3,
    }


def _nothing(_: Any, tensor: tf.Tensor, index: int, op: str) -> tf.Tensor:
    del index, op
    return tf.identity(tensor)


def _seconds(model: keras.Model, data: Any) -> tuple[float, float]:
    """Returns what a call takes, and what each of its steps."""
    model.make_train_function(force=True)
    strategy = model.distribute_strategy
    split = Splitter(strategy, stacks=compiles(model, strategy))
    few, many = _fastest(
        model.train_function,
        [Chunk(split([data] * n), STEPS) for n in (STEPS // 2, STEPS)],
    )
    step = (many - few) / (STEPS // 2)
    return max(many - step * STEPS, 0.0), step


def _fastest(function: Any, chunks: list[Chunk]) -> list[float]:
    taken: list[list[float]] = [[] for _ in chunks]
    for _ in range(REPEATS + 1):  # the first one compiles
        for seconds, chunk in zip(taken, chunks, strict=True):
            began = time.perf_counter()
            keras.tree.map_structure(float, function(chunk))
            seconds.append(time.perf_counter() - began)
    return [min(seconds[1:]) for seconds in taken]
