"""Fine-tunes a model with LoRA that only all devices together have room for.

    python examples/lora.py [--devices 2] [--gigabytes 2] [--shard none]

The model is made as large as it has to be: a copy of its weights does not fit
on one device, and parts of them do. No device ever holds more of them.

Of each GPU, TensorFlow takes `--gigabytes`, or all that there is. With `--shard
none`, each gets a copy, and runs out of memory. Memory of CPU devices has no
limit, so 0.0005 GB are made up, and a copy fits all the same.
"""

import argparse
import math
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf

import keras_conflux as kc

WORDS, LENGTH = 256, 16


def build_model(width: int, depth: int) -> keras.Model:
    """A transformer that tells which of two kinds a text is of."""
    layers = keras.layers
    tokens = layers.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, width)(tokens)
    for block in range(depth):
        attention = layers.MultiHeadAttention(
            width // 64, 64, use_bias=False, name=f"attention_{block}"
        )
        h = layers.LayerNormalization()(x)
        x = x + attention(h, h)
        h = layers.LayerNormalization()(x)
        h = layers.Dense(4 * width, activation="gelu")(h)
        x = x + layers.Dense(width)(h)
    x = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))
    model = keras.Model(tokens, layers.Dense(2, name="kind")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.08 / math.sqrt(width)), loss)
    return model


def enable_lora(model: keras.Model, rank: int = 4) -> None:
    """Has attention learn products of two small matrices, and the last layer.

    The products are those of queries and values (Hu et al. 2021, arXiv
    2106.09685). All else is frozen: it has no gradient, and no state of an
    optimizer.
    """
    for layer in model.layers[:-1]:
        layer.trainable = isinstance(layer, keras.layers.MultiHeadAttention)
        if layer.trainable:
            layer.query_dense.enable_lora(rank)
            layer.value_dense.enable_lora(rank)
            layer.key_dense.trainable = False
            layer.output_dense.trainable = False


def too_large_for(memory: float) -> tuple[int, int]:
    """Returns width and depth of a model whose weights take a tenth more."""
    width = 64
    while True:
        one, two = (copy_of(width, depth) for depth in (1, 2))
        depth = 1 + math.ceil((1.1 * memory - one) / (two - one))
        if depth <= 32:
            return width, max(1, depth)
        width *= 2


def copy_of(width: int, depth: int) -> int:
    """Returns the bytes of a model's weights, which are not made for it."""
    with tf.Graph().as_default():
        model = build_model(width, depth)
    return kc.memory(model).weights


def build_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns texts that mostly have words of one half of the vocabulary."""
    rng = np.random.default_rng(0)
    kinds = rng.integers(2, size=256)
    is_other = rng.random((256, LENGTH)) < 0.3
    words = rng.integers(WORDS // 2, size=(256, LENGTH))
    return words + WORDS // 2 * (kinds[:, None] ^ is_other), kinds


def save(model: keras.Model, path: str) -> None:
    """Writes what was trained, for a model on any number of devices."""
    trained = {each.path: each.numpy() for each in model.trainable_variables}
    np.savez(path, **trained)


def load(model: keras.Model, path: str) -> None:
    """Reads what was trained into a model with `enable_lora`."""
    with np.load(path) as trained:
        for variable in model.trainable_variables:
            variable.assign(trained[variable.path])


def choose() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--devices", type=int)
    arguments.add_argument("--gigabytes", type=float)
    arguments.add_argument("--shard", choices=["weights", "none"])
    arguments.add_argument("--epochs", type=int, default=3)
    arguments.add_argument("--out", default="lora.npz")
    return arguments.parse_args()


def memory_of_gpus(gigabytes: float | None) -> int:
    """Returns the bytes that TensorFlow takes of each GPU, from now on."""
    if gigabytes:
        limit = tf.config.LogicalDeviceConfiguration(gigabytes * 1e9 / 2**20)
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.set_logical_device_configuration(gpu, [limit])
    tf.config.list_logical_devices()  # starts TensorFlow
    return kc.devices()[0].memory or 0


def main() -> None:
    options = choose()
    if tf.config.list_physical_devices("GPU"):
        keras.config.set_dtype_policy("mixed_bfloat16")
        devices = kc.devices(options.devices)
        memory = memory_of_gpus(options.gigabytes)
    else:
        devices = kc.devices(options.devices or 4)
        memory = (options.gigabytes or 0.0005) * 1e9
    width, depth = too_large_for(memory)
    print(f"each of {len(devices)} devices has {memory / 1e9:.3g} GB,", end=" ")
    print(f"too few for copies of depth {depth} and width {width}")

    keras.utils.set_random_seed(0)
    shard = None if options.shard == "none" else "weights"
    with kc.replicate(devices=devices, shard=shard).scope():
        model = build_model(width, depth)
        enable_lora(model)
        # Here `model.load_weights` would read what was trained before.
    found = kc.memory(model)
    print(found)
    part = found.variables / memory
    print(f"with shard={found.shard!r}, variables take {part:.0%} of a device")
    texts, kinds = build_data()
    model.fit(texts, kinds, batch_size=32, epochs=options.epochs, verbose=2)
    save(model, options.out)
    print(f"{options.out}: {os.path.getsize(options.out) / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
