"""Kinds of data that a training is resumed in, and a callback of a user's."""

import keras
import numpy as np
import tensorflow as tf

SAMPLES, BATCH = 22, 4
STEPS = -(-SAMPLES // BATCH)
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(SAMPLES, 5)).astype("float32")
Y = (X[:, :1] * X[:, 1:2] + X[:, 2:3]).astype("float32")


class Own(keras.callbacks.Callback):
    """A user's callback, with a state and an effect."""

    seen = 0
    losses = ()

    def on_epoch_begin(self, epoch, logs=None):
        rate = self.model.optimizer.learning_rate
        rate.assign(rate * 0.9)

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1
        self.losses = (*self.losses, logs["loss"])


class Shuffled(keras.utils.PyDataset):
    """Shuffles its samples after each epoch, and adds noise."""

    random = np.random

    def __init__(self):
        super().__init__()
        self.order = np.arange(SAMPLES)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        noise = self.random.normal(size=(len(rows), 5)).astype("float32")
        return X[rows] + noise, Y[rows]

    def on_epoch_end(self):
        self.random.shuffle(self.order)


class Stateful(Shuffled):
    """Draws from a generator of its own, which is no plain value."""

    def __init__(self):
        super().__init__()
        self.random = np.random.default_rng(3)
        self.order = self.random.permutation(SAMPLES)

    def state_dict(self):
        return {"random": self.random.bit_generator.state, "order": self.order}

    def load_state_dict(self, state):
        self.random.bit_generator.state = state["random"]
        self.order = state["order"]


def generated():
    order = np.arange(SAMPLES)
    while True:
        np.random.shuffle(order)
        for begin in range(0, SAMPLES, BATCH):
            rows = order[begin : begin + BATCH]
            yield X[rows], Y[rows]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(SAMPLES)


def noisy():
    return dataset().map(lambda x, y: (x + tf.random.normal([5]), y))


def with_noise(sample, generator):
    x, y = sample
    return x + generator.normal(size=5).astype("float32"), y


def grain_dataset():
    import grain  # which few machines have

    samples = grain.MapDataset.source(list(zip(X, Y, strict=True)))
    return samples.seed(3).shuffle().random_map(with_noise)


def gathered():
    rows = tf.data.Dataset.range(SAMPLES).shuffle(SAMPLES, seed=7)
    x, y = tf.constant(X), tf.constant(Y)
    return rows.batch(BATCH).map(lambda i: (tf.gather(x, i), tf.gather(y, i)))


DATA = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": BATCH, "shuffle": True},
    "arrays, in another order each epoch": lambda: {"x": gathered()},
    "tf.data": lambda: {"x": dataset().batch(BATCH).prefetch(2)},
    "tf.data, random map": lambda: {"x": noisy().batch(BATCH)},
    "tf.data, repeated": lambda: {
        "x": dataset().repeat().batch(BATCH),
        "steps_per_epoch": 4,
    },
    "tf.data, cut": lambda: {"x": dataset().batch(2), "steps_per_epoch": 4},
    "tf.data, of unknown length": lambda: {
        "x": dataset().filter(lambda x, y: True).batch(BATCH)
    },
    "PyDataset": lambda: {"x": Shuffled()},
    "PyDataset with a state": lambda: {"x": Stateful()},
    "generator": lambda: {"x": generated(), "steps_per_epoch": 4},
}
GRAIN = {
    "Grain": lambda: {"x": grain_dataset().batch(BATCH)},
    "Grain, repeated": lambda: {
        "x": grain_dataset().repeat().batch(BATCH).to_iter_dataset(),
        "steps_per_epoch": 4,
    },
}
