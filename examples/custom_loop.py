"""The digits of digits.py in a loop of one's own, with explicit reductions.

python examples/custom_loop.py [--epochs 12] [--devices 4]
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from digits import build_model
from digits import choose
from digits import load_data
from digits import serve

import keras_conflux as kc


def main() -> None:
    devices, epochs = choose(__doc__)
    (train_x, train_y), (test_x, test_y) = load_data()
    dataset = tf.data.Dataset.from_tensor_slices((train_x, train_y))
    dataset = dataset.shuffle(len(train_x), seed=0).batch(64)

    keras.utils.set_random_seed(0)
    model = kc.replicate(build_model(), devices)
    optimizer = kc.replicate(keras.optimizers.Adam(1e-3), devices)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()

    @kc.withdevices
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        # The last batch is split unevenly; weighted by samples, the mean is
        # the gradient of the whole batch.
        gradients = kc.allreduce("mean", gradients, weight=len(x))
        optimizer.apply(gradients, model.trainable_variables)
        # BatchNormalization has moved its averages by this device's samples.
        averages = model.non_trainable_weights
        kc.allreduce("mean", averages, weight=len(x))
        return kc.allreduce("mean", loss, weight=len(x))

    for epoch in range(epochs):
        losses = []
        for x, y in kc.distribute(dataset, devices):
            losses.append(float(step(x, y)[0]))  # all devices have it
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

    kc.assert_in_sync(model)
    _, accuracy = model.evaluate(test_x, test_y, verbose=0)
    print(f"test accuracy on {len(devices)} devices: {accuracy:.2%}")
    serve(model, test_x)


if __name__ == "__main__":
    main()
