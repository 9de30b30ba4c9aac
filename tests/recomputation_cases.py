"""Models whose layers have state, draw, add losses or loop, and their training.

`trained` makes one in a `keras.RematScope`, or in none.
"""

import keras
import numpy as np
from conftest import DEVICES
from conftest import ON_GPU
from keras import layers
from keras import ops

import keras_conflux as kc

MODES = {
    "full": {},
    "activations": {},
    "larger_than": {"output_size_threshold": 1},
    "list_of_layers": {"layer_names": [f"layer_{i}" for i in range(9)]},
}


class AddsLoss(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(
            16,
            activation="tanh",
            activity_regularizer=keras.regularizers.L2(0.1),
        )

    def call(self, x):
        y = self.dense(x)
        self.add_loss(0.1 * ops.mean(ops.square(y - x)))
        return y


class Block(layers.Layer):
    """Passes no `training` on: Keras' call context does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = layers.Dense(16)
        self.drop = layers.Dropout(0.3, seed=5)
        self.norm = layers.BatchNormalization(momentum=0.8)

    def call(self, x):
        return self.norm(self.drop(self.dense(x)))


class Counts(layers.Layer):
    """Its result depends on how often it was called, and on what it kept.

    Args:
        reads_back: Whether it uses what it has kept in the same call.
    """

    def __init__(self, reads_back=False, **kwargs):
        super().__init__(**kwargs)
        self.reads_back = reads_back

    def build(self, shape):
        self.count = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )
        self.kept = self.add_weight(
            shape=(shape[-1],), initializer="zeros", trainable=False
        )
        self.seen = keras.metrics.Mean(name="seen")

    def call(self, x, training=None):
        self.count.assign_add(1.0)
        y = x * (1 + 0.1 * self.count) + self.kept
        self.kept.assign(0.5 * self.kept + 0.5 * ops.mean(x, 0))
        if self.reads_back:
            y += self.kept
        self.seen.update_state(y)
        return y


def sequential(*middle, shape=(16,)):
    return keras.Sequential([layers.Input(shape), *middle, layers.Dense(4)])


def mlp():
    return sequential(
        layers.Dense(16, activation="relu", name="layer_0"),
        layers.Dropout(0.4, seed=1, name="layer_1"),
        layers.Dense(16, activation="tanh", name="layer_2"),
        layers.Dropout(0.4, name="layer_3"),
    )


def batch_norm():
    return sequential(
        layers.Dense(16, name="layer_0"),
        layers.BatchNormalization(momentum=0.7, name="layer_1"),
        layers.ReLU(name="layer_2"),
    )


def attention():
    x = layers.Input((6, 8))
    attend = layers.MultiHeadAttention(
        2, 4, dropout=0.3, seed=3, name="layer_0"
    )
    y = layers.LayerNormalization(name="layer_1")(x + attend(x, x))
    y = layers.Dense(8, activation="gelu", name="layer_2")(y)
    return keras.Model(x, layers.Dense(4)(layers.Flatten()(y)))


def lstm():
    return sequential(
        layers.LSTM(
            8, dropout=0.3, recurrent_dropout=0.2, seed=2, name="layer_0"
        ),
        shape=(6, 8),
    )


def masked():
    x = layers.Input((6,), dtype="int32")
    y = layers.Embedding(20, 8, mask_zero=True, name="layer_0")(x)
    # cuDNN takes masks only of samples that are padded at their end.
    y = layers.LSTM(
        8,
        dropout=0.2,
        seed=4,
        return_sequences=True,
        use_cudnn=False,
        name="layer_1",
    )(y)
    y = layers.GlobalAveragePooling1D(name="layer_2")(y)
    return keras.Model(x, layers.Dense(4)(y))


def spectral():
    dense = layers.Dense(16, activation="relu")
    return sequential(layers.SpectralNormalization(dense, name="layer_0"))


def add_loss():
    return sequential(AddsLoss(name="layer_0"), AddsLoss(name="layer_1"))


def activity():
    return sequential(
        layers.Dense(
            16,
            activation="relu",
            activity_regularizer=keras.regularizers.L1(0.01),
            kernel_regularizer=keras.regularizers.L2(0.01),
            name="layer_0",
        )
    )


def block():
    return sequential(Block(name="layer_0"), Block(name="layer_1"))


def counts():
    return sequential(layers.Dense(16, name="layer_0"), Counts(name="layer_1"))


def reads_back():
    """On replicas, its layer would mix samples."""
    return sequential(
        layers.Dense(16, name="layer_0"),
        Counts(reads_back=True, name="layer_1"),
    )


def shared():
    x = layers.Input((16,))
    norm = layers.BatchNormalization(momentum=0.5, name="layer_0")
    a = norm(x, training=False)
    b = norm(x * 2 + 1, training=True)
    y = layers.Concatenate(name="layer_1")([a, b])
    return keras.Model(x, layers.Dense(4)(y))


def mixed():
    return sequential(
        Block(dtype="mixed_bfloat16", name="layer_0"),
        layers.Dense(
            16, dtype="mixed_bfloat16", activation="gelu", name="layer_1"
        ),
    )


CASES = (
    mlp,
    batch_norm,
    attention,
    lstm,
    masked,
    spectral,
    add_loss,
    activity,
    block,
    counts,
    shared,
    mixed,
)


def trained(
    case, mode, devices=None, synchronized=False, batch_size=16, **options
):
    """Returns everything that a training leaves, by name.

    Args:
        case: One of `CASES`.
        mode: One of `MODES`, or `None` to keep activations.
        devices: How many replicas, or `None` for a model of one device.
        synchronized: Whether replicas normalize by all samples.
        batch_size: Of which there are two and a half in an epoch, or three
            where all of them are to be equal.
        **options: Of the training: `optimizer`, `jit_compile`, and others
            which `compile` takes.
    """
    keras.backend.clear_session()
    keras.utils.set_random_seed(0)
    with keras.RematScope(mode, **MODES.get(mode, {})):
        model = case()
    # GPUs run the first short batch as a graph, and compile later ones, whose
    # dropout has other numbers.
    is_uneven = batch_size == 16 and not ON_GPU
    samples = 40 if is_uneven else 3 * batch_size
    shape = (samples, *model.inputs[0].shape[1:])
    rng = np.random.default_rng(0)
    x = rng.normal(size=shape).astype("float32")
    if model.inputs[0].dtype == "int32":
        x = rng.integers(0, 20, shape).astype("int32")
    y = rng.integers(0, 4, len(x))
    settings = {
        "optimizer": keras.optimizers.SGD(0.1, momentum=0.9),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
        **options,
    }
    model.compile(**settings)
    if synchronized:
        kc.synchronize_batch_norm(model)
    if devices:
        kc.replicate(model, DEVICES[:devices])
    history = model.fit(
        x, y, batch_size, epochs=2, shuffle=False, verbose=0
    ).history
    variables = [*model.variables, *model.optimizer.variables]
    found = {
        f"{place} {each.path}": each.numpy()
        for place, each in enumerate(variables)
    }
    found.update({f"history {key}": np.array(history[key]) for key in history})
    found["next draw"] = np.array(keras.random.uniform((3,)))
    return found


def assert_equal(found, wanted, atol=2e-6):
    """Compares two trainings, in which layers may have other names."""
    assert len(found) == len(wanted)
    for (name, a), b in zip(found.items(), wanted.values(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=atol, err_msg=name)
