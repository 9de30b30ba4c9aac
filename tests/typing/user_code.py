"""What a type checker says of a user's program; see tests/test_typing.py.

A line that ends in `# error` is one that it rejects.
"""

from collections.abc import Sequence
from typing import Any
from typing import assert_type

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

import keras_conflux as kc

tensor = tf.constant(1.0)
tensors = kc.Replicas([tensor, tensor], devices=2)
assert_type(tensors, kc.Replicas[tf.Tensor])
assert_type(tensors[0], tf.Tensor)
assert_type(tensors["GPU:0"], tf.Tensor)
assert_type(tensors[:1], list[tf.Tensor])
assert_type(list(tensors), list[tf.Tensor])
tensors[1.5]  # error

model = keras.Sequential()
assert_type(kc.replicate(), kc.ReplicatedStrategy)
assert_type(kc.replicate(model), keras.Sequential)
assert_type(kc.unreplicate(model), keras.Sequential)
assert_type(kc.replicate(lambda: "made"), str)
assert_type(kc.replicate([tensor]), kc.Replicas[list[tf.Tensor]])


@kc.withdevices
def step(x: tf.Tensor, y: tf.Tensor, *, scale: float = 1.0) -> tf.Tensor:
    return x + y * scale


@kc.withdevices(devices=2, jit_compile=True)
def compiled(x: tf.Tensor) -> tf.Tensor:
    return x


@kc.skip_out_of_memory
def forward(x: tf.Tensor) -> tf.Tensor:
    return x


@kc.skip_out_of_memory(devices=2)
def forward_on_two(x: tf.Tensor) -> tf.Tensor:
    return x


class Trainer:
    @kc.withdevices
    def step(self, x: tf.Tensor) -> tf.Tensor:
        return x


assert_type(step(tensor, tensor), kc.Replicas[tf.Tensor])
assert_type(step(tensors, tensors), kc.Replicas[tf.Tensor])
assert_type(step(tensor, tensors, scale=2.0), kc.Replicas[tf.Tensor])
assert_type(step(*kc.split((tensor, tensor))), kc.Replicas[tf.Tensor])
assert_type(compiled(tensors)[0], tf.Tensor)
assert_type(forward(tensors), kc.Replicas[tf.Tensor] | None)
assert_type(forward_on_two(tensor), kc.Replicas[tf.Tensor] | None)
assert_type(forward.skipped, int)
assert_type(Trainer().step(tensor), kc.Replicas[tf.Tensor])
assert_type(Trainer().step(tensors), kc.Replicas[tf.Tensor])
step(tensor)  # error
step(tensor, tensor, rate=2.0)  # error
step(tensor, "a word")  # error
compiled(tensor, tensor)  # error
forward()  # error
Trainer().step("a word")  # error
kc.replicate(model, device=2)  # error

Parts = kc.Replicas[tf.Tensor]
array = np.ones((4, 2))
assert_type(kc.split(array), Parts)
assert_type(kc.split((array, tensor)), tuple[Parts, Parts])
for x, y in kc.distribute([(array, array)]):
    assert_type(step(x, y), Parts)
assert_type(len(kc.distribute([array])), int)
assert_type(kc.allreduce("mean", tensor, weight=2), tf.Tensor)
assert_type(kc.allreduce("sum", [tensor]), list[tf.Tensor])
assert_type(kc.allreduce("sum", 1.0), tf.Tensor)
assert_type(kc.allreduce("max", tensors), Parts)
assert_type(kc.allreduce("+", tensor, tensor), Parts)
assert_type(kc.allreduce("mean", model), None)
gradients: list[Any] = [tensor]
assert_type(kc.allreduce("mean", gradients), list[Any])
assert_type(kc.broadcast(tensor, root=1), tf.Tensor)
assert_type(kc.allgather(tensor, tensor, axis=1), Parts)
kc.allreduce("average", tensor)  # error
kc.reduce(tensor, "sum")  # error
assert_type(kc.statistics(model), list[kc.Statistics])
assert_type(kc.statistics(tensors), kc.Replicas[list[kc.Statistics]])
assert_type(kc.shard(array), np.ndarray[tuple[int, int], np.dtype[np.float64]])
assert_type(kc.shard(["a.txt", "b.txt"]), Sequence[str])
assert_type(kc.to_cpu(tensor), npt.NDArray[Any])
assert_type(kc.replicate([model, model]), list[keras.Sequential])
assert_type(kc.devices_of(model), tuple[kc.Device, ...])
loaded = kc.load(model, "runs")
print(loaded.step)  # error
if loaded is not None:
    assert_type(loaded.step, int)
