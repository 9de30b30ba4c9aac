"""The memory of a training step besides variables, as XLA compiles it.

Variables are arguments, so it does not matter where they are. Nothing runs.
"""

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_conflux._common import trees
from keras_conflux._extensions.memory import compat
from keras_conflux._replication import state
from keras_conflux._replication.replica_context import outside_of_strategies

_USED = 0.9
"""How much of a device's memory a step may take. The allocator needs pieces
that are whole, and batches are moved while a step runs."""


def turns_that_fit(
    activations: int, gradients: int, variables: int, limit: int
) -> int | None:
    """Returns the least power of two of microbatches that fit, if any do."""
    room = int(_USED * limit) - variables
    if activations <= room:
        return 1
    if room <= gradients:
        return None
    return 1 << (-(-activations // (room - gradients)) - 1).bit_length()


def bytes_of_step(
    model: keras.Model, batch: trees.Tree, devices: int, device: str
) -> int | None:
    """Returns the bytes of a step on each device, without its variables."""
    specs = trees.map_leaves(lambda leaf: _spec(leaf, devices), batch)
    trained = model.trainable_variables
    ids = {id(variable) for variable in trained}
    others = [v for v in state.variables_of(model) if id(v) not in ids]
    variables = [*trained, *others]
    leaves = trees.present(specs)

    def gradients(*given: tf.Tensor) -> list[Any]:
        values, data = given[: len(variables)], given[len(variables) :]
        batch = trees.refill(specs, list(data))
        x, y, weight = keras.utils.unpack_x_y_sample_weight(batch)
        mapping = zip(variables, values, strict=True)
        with (
            keras.StatelessScope(mapping, initialize_variables=False),
            compat.with_loss_of_its_own(model),
            tf.GradientTape() as tape,
        ):
            tape.watch(values[: len(trained)])
            found = model(x, training=True)
            loss: Any = model.compute_loss(x, y, found, weight)
        found = tape.gradient(loss, values[: len(trained)])
        return [tf.convert_to_tensor(g) for g in found if g is not None]

    signature = [tf.TensorSpec(v.shape, v.dtype) for v in variables] + leaves

    found = outside_of_strategies(
        lambda: compat.bytes_of_program(gradients, signature, device)
    )
    return None if found is None else found + sum(map(trees.bytes_of, leaves))


def _spec(leaf: Any, devices: int) -> tf.TensorSpec:
    """Returns the spec of a device's part of a leaf."""
    shape = tuple(leaf.shape)
    rows = -(-shape[0] // devices)
    dtype = tf.as_dtype(leaf.dtype)
    if isinstance(leaf, np.ndarray) and dtype == tf.float64:
        dtype = tf.as_dtype(keras.config.floatx())  # as in `fit`
    return tf.TensorSpec([rows, *shape[1:]], dtype)
