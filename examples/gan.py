"""Two networks with two optimizers: a `train_step` of one's own, under `fit`.

    python examples/gan.py [--epochs 20] [--devices 4]

A generative adversarial network learns to draw the digits of digits.py. How
well it does is measured by the energy distance (Szekely and Rizzo, 2013) from
its drawings to digits that it has not seen: the closer to 0, the better.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from digits import choose
from digits import load_data

import keras_conflux as kc

NOISE = 32
SHADES = " .:-=+*#%@"


class Gan(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        layers = keras.layers
        self.generator = keras.Sequential(
            [
                layers.Input((NOISE,)),
                layers.Dense(128, activation="relu"),
                layers.Dense(128, activation="relu"),
                layers.Dense(64, activation="sigmoid"),
                layers.Reshape((8, 8, 1)),
            ]
        )
        self.critic = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Flatten(),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(128, activation="leaky_relu"),
                layers.Dense(1),
            ]
        )
        self.seed = keras.random.SeedGenerator(0)
        self.built = True  # there is no `call` to build it by

    def compile(self, generator_optimizer, critic_optimizer) -> None:
        super().compile(optimizer=None)
        self.generator_optimizer = generator_optimizer
        self.critic_optimizer = critic_optimizer

    def draw(self, count):
        return self.generator(
            keras.random.normal((count, NOISE), seed=self.seed)
        )

    def train_step(self, real):
        # Nothing here knows of replicas: each has its part of the batch and
        # its own noise, and `apply` makes the gradients those of the batch.
        count = keras.ops.shape(real)[0]
        with tf.GradientTape() as tape:
            critic_loss = keras.ops.mean(
                keras.ops.softplus(-self.critic(real))
                + keras.ops.softplus(self.critic(self.draw(count)))
            )
        variables = self.critic.trainable_variables
        gradients = tape.gradient(critic_loss, variables)
        self.critic_optimizer.apply(gradients, variables)

        with tf.GradientTape() as tape:
            generator_loss = keras.ops.mean(
                keras.ops.softplus(-self.critic(self.draw(count)))
            )
        variables = self.generator.trainable_variables
        gradients = tape.gradient(generator_loss, variables)
        self.generator_optimizer.apply(gradients, variables)
        return {"critic_loss": critic_loss, "generator_loss": generator_loss}


def energy_distance(one: np.ndarray, other: np.ndarray) -> float:
    """Returns 0 for samples of one distribution, but for chance, else more."""

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        gaps = a.reshape(len(a), 1, -1) - b.reshape(1, len(b), -1)
        return np.linalg.norm(gaps, axis=2).mean()

    return 2 * apart(one, other) - apart(one, one) - apart(other, other)


def show(images: np.ndarray) -> None:
    shades = np.array(list(SHADES))[(images[..., 0] * 9.99).astype(int)]
    for row in shades.transpose(1, 0, 2):
        print("   ".join("".join(np.repeat(line, 2)) for line in row))


def main() -> None:
    devices, epochs = choose(__doc__, epochs=20)
    (train, _), (test, _) = load_data()
    dataset = tf.data.Dataset.from_tensor_slices(train)
    dataset = dataset.shuffle(len(train), seed=0).batch(64)

    keras.utils.set_random_seed(0)
    model = kc.replicate(Gan(), devices)
    adam = keras.optimizers.Adam
    model.compile(adam(1e-3, beta_1=0.0), adam(5e-3, beta_1=0.0))
    untrained = energy_distance(model.draw(len(test)).numpy(), test)
    model.fit(dataset, epochs=epochs)
    kc.assert_in_sync(model)

    show(model.draw(6).numpy())
    distance = energy_distance(model.draw(len(test)).numpy(), test)
    real = energy_distance(train[: len(test)], test)
    print(
        f"distance on {len(devices)} devices: {distance:.3f} (untrained "
        f"{untrained:.3f}, other real digits {real:.3f})"
    )


if __name__ == "__main__":
    main()
