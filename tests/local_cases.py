"""Programs whose data lie in parts with several processes.

Each is given what replicates a model, and its data. On one device these are the
batches of all processes, joined.
"""

import dataclasses
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from models import COMPILED
from models import dense
from models import outcome
from models import regression
from process_cases import Contrastive

import keras_conflux as kc

SIZES = ([5, 4, 3], [16, 2, 9, 7, 1], [3, 8, 8, 1])
"""How many samples the batches of each process have. The first one ends first.
"""
NONE_IN_FIRST = ([], [5, 4, 3], [2, 2])


@dataclasses.dataclass
class Parts:
    """The data of one process, or those of all, joined.

    Args:
        count: How many processes there are.
        index: Which of them it is; `None` for one device.
    """

    count: int
    index: int | None = None

    def batches(self, sizes=SIZES, of=None, leaves=2):
        """Returns the batches that are drawn here, or those of one process."""
        of = self.index if of is None else of
        each = [self._of(sizes, index)[:] for index in range(self.count)]
        if of is not None:
            found = each[of]
        else:
            found = [
                tuple(map(np.concatenate, zip(*self._at(each, k), strict=True)))
                for k in range(max(map(len, each)))
            ]
        return [batch[:leaves] for batch in found]

    def dataset(self, sizes=SIZES, leaves=2, known=True, of=None):
        """Returns them as a `tf.data.Dataset`."""
        found = self.batches(sizes, of, leaves)
        spec = (
            tf.TensorSpec([None, 8]),
            tf.TensorSpec([None, 1]),
            tf.TensorSpec([None]),
        )
        data = tf.data.Dataset.from_generator(
            lambda: iter(found), output_signature=spec[:leaves]
        )
        if not known:
            return data
        length = tf.data.experimental.assert_cardinality(len(found))
        return data.apply(length)

    def everywhere(self):
        """Returns the processes whose predictions are made here."""
        return range(self.count) if self.index is None else [self.index]

    def _of(self, sizes, index):
        numbers = [sum(part) for part in sizes]
        x, y = regression(sum(numbers))
        weights = np.random.default_rng(1).uniform(0.2, 2, len(x))
        begin = sum(numbers[:index])
        ends = begin + np.cumsum(sizes[index], dtype=int)
        return [
            (x[e - n : e], y[e - n : e], weights[e - n : e].astype("float32"))
            for e, n in zip(ends, sizes[index], strict=True)
        ]

    def _at(self, each, position):
        return [part[position] for part in each if position < len(part)]


def fitted(model, parts, sizes=SIZES, leaves=2, known=True, **options):
    """Trains, evaluates and predicts, and returns all that it leaves."""
    options = {"epochs": 2} | options
    data = parts.dataset(sizes, leaves, known)
    history = model.fit(data, verbose=0, **options)
    shown = model.evaluate(parts.dataset(sizes), verbose=0)
    found = outcome(model, history) | {"evaluated": np.ravel(shown)}
    for index in parts.everywhere():
        if parts.index is None and not sizes[index]:
            continue  # one device cannot predict nothing
        data = parts.dataset(sizes, leaves=1, of=index)
        predicted = model.predict(data, verbose=0)
        assert predicted.shape == (sum(sizes[index]), 1)
        if len(predicted):
            found[f"predicted by {index}"] = predicted
    return found


def trained(model, parts, sizes=SIZES, leaves=2, **options):
    """Trains; does as `fitted` does only if all tests are asked for."""
    if os.environ.get("CONFLUX_ALL_TESTS") == "1":
        return fitted(model, parts, sizes, leaves, **options)
    data = parts.dataset(sizes, leaves)
    return outcome(model, model.fit(data, epochs=2, verbose=0, **options))


def uneven_parts(replicate, parts):
    model = dense(keras.optimizers.Adam(0.01, global_clipnorm=0.1))
    return fitted(replicate(model), parts)


def nothing_in_the_first(replicate, parts):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [layers.Input((8,)), NotZero(), *dense().layers], name="asserting"
    )
    model.compile("adam", "mse", metrics=["mae"], jit_compile=COMPILED)
    return fitted(replicate(model), parts, sizes=NONE_IN_FIRST)


class NotZero(layers.Layer):
    """Raises for samples that nobody has given."""

    def call(self, x):
        largest = tf.reduce_min(tf.reduce_max(tf.abs(x), -1))
        check = tf.debugging.assert_greater(largest, 0.0)
        with tf.control_dependencies([check] if check is not None else []):
            return tf.identity(x)


def accumulated_parts(replicate, parts):
    optimizer = keras.optimizers.SGD(0.01, gradient_accumulation_steps=5)
    return trained(replicate(dense(optimizer)), parts)


def weighted_parts(replicate, parts):
    model = dense(keras.optimizers.SGD(0.01, momentum=0.9))
    return trained(
        replicate(model),
        parts,
        leaves=3,
        validation_data=parts.dataset([part[::-1] for part in SIZES], 3),
    )


def normalized_parts(replicate, parts):
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(8, use_bias=False),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse", jit_compile=COMPILED)
    return trained(replicate(model), parts)


def of_unknown_number(replicate, parts):
    # On one device, Keras counts an iteration too many an epoch.
    return fitted(replicate(dense()), parts, known=parts.index is None)


def several_steps(replicate, parts):
    model = dense(steps_per_execution=2)
    return fitted(replicate(model), parts)


def steps_across_epochs(replicate, parts):
    model = replicate(dense())
    data = parts.dataset([[7, 5], [3, 4], [2, 2]], known=False).repeat()
    history = model.fit(data, epochs=2, steps_per_epoch=3, verbose=0)
    return outcome(model, history)


def arrays(replicate, parts):
    """Arrays of 29, 13 and 21 samples, in batches of 8; 25% are kept apart."""
    sizes = [[8, 8, 5, 8], [8, 1, 4], [8, 7, 6]]
    model = replicate(dense("sgd"))
    if parts.index is not None:
        x, y = map(np.concatenate, zip(*parts.batches(sizes), strict=True))
        history = model.fit(
            x,
            y,
            batch_size=8,
            epochs=2,
            shuffle=False,
            validation_split=0.25,
            verbose=0,
        )
        return outcome(model, history)
    # What Keras keeps apart are the last samples of each process.
    kept = [[8], [4], [6]]
    before = [[8, 8, 5], [8, 1], [8, 7]]
    train = [part + last for part, last in zip(before, kept, strict=True)]
    each = [parts.batches(train, of=i) for i in range(parts.count)]
    joined = dataclasses.replace(parts)
    joined._of = lambda sizes, i: each[i][: len(before[i])]
    data = joined.dataset()
    validation = dataclasses.replace(parts)
    validation._of = lambda sizes, i: each[i][len(before[i]) :]
    history = model.fit(
        data, epochs=2, validation_data=validation.dataset(), verbose=0
    )
    return outcome(model, history)


def own_step_on_parts(replicate, parts):
    keras.utils.set_random_seed(1)
    model = Counting()
    model.compile("sgd", jit_compile=False)
    replicate(model)
    return outcome(model, model.fit(parts.dataset(), epochs=2, verbose=0))


class Counting(Contrastive):
    """Keeps also what a replica without samples must not spoil."""

    def __init__(self):
        super().__init__()
        self.steps = Steps(name="steps")
        self.last = self.add_weight(
            shape=(), dtype="int32", initializer="zeros", trainable=False
        )

        self.drawn = self.add_weight(
            shape=(), initializer="zeros", trainable=False
        )

    @property
    def metrics(self):
        return [self.steps]

    def train_step(self, data):
        found = super().train_step(data)
        noise = keras.random.normal(keras.ops.shape(data[0]), seed=3)
        self.steps.update_state()
        # Which no graph shows; replicas keep what the first one has.
        first = tf.numpy_function(
            lambda x: np.int32(1000 * x[0, 0]), [data[0]], tf.int32
        )
        self.last.assign(tf.ensure_shape(first, []))
        self.drawn.assign_add(keras.ops.sum(noise * data[0]))
        return found | {"steps": self.steps.result()}


class Steps(keras.metrics.Metric):
    """Counts steps, whatever their samples."""

    def __init__(self, **options):
        super().__init__(**options)
        self.total = self.add_weight(initializer="zeros", shape=())

    def update_state(self):
        self.total.assign_add(1.0)

    def result(self):
        return self.total


def single_parts(replicate, parts):
    model = replicate(dense())
    logs = []
    for batch in parts.batches([[5, 0, 4], [3, 6, 1], [0, 2, 2]]):
        logs.append(model.train_on_batch(*batch))
    (batch,) = parts.batches([[0], [9], [4]])
    logs.append(model.test_on_batch(*batch))
    found = outcome(model) | {"logs": np.ravel(logs)}
    for index in parts.everywhere():
        ((x, _),) = parts.batches([[2], [9], [0]], of=index)
        if len(x):
            found[f"predicted by {index}"] = model.predict_on_batch(x)
        elif parts.index is not None:
            assert model.predict_on_batch(x).shape == (0, 1)
    return found


def parts_of_a_distribution(replicate, parts):
    if parts.index is None:
        return fitted(dense(), parts)
    with keras.distribution.DataParallel(auto_shard_dataset=False).scope():
        return fitted(dense(), parts)


def words(replicate, parts):
    """Ragged strings, of which the first process has nothing."""
    each = [[], [["a"], ["b", "c", "d"], ["c", "a"]], [["d"], ["b"], ["a"]]]
    each = each[: parts.count]
    if parts.index is None:
        size = 2 * (parts.count - 1)
        batches = [part[:2] for part in each], [part[2:] for part in each]
        rows = [row for batch in batches for part in batch for row in part]
    else:
        size, rows = 2, each[parts.index]
    ragged = tf.ragged.constant(rows, tf.string, 1)
    lengths = tf.cast(ragged.row_lengths(), tf.float32)
    targets = tf.reshape(2 * lengths - 1, [-1, 1])
    data = tf.data.Dataset.from_tensor_slices((ragged, targets)).batch(size)
    model = Words()
    model.compile("sgd", "mse", jit_compile=False)
    replicate(model)
    return outcome(model, model.fit(data, epochs=2, verbose=0))


class Words(keras.Model):
    """Adds up what each word of a sample weighs."""

    def __init__(self):
        super().__init__()
        self.number = layers.StringLookup(vocabulary=["a", "b", "c", "d"])
        self.weigh = layers.Embedding(5, 1, embeddings_initializer="ones")

    def call(self, x):
        numbers = self.number(x)
        weights = tf.ragged.map_flat_values(self.weigh, numbers)
        return tf.reduce_sum(weights, 1)


def shuffled_parts(replicate, parts):
    """Each part is one batch, whose order of samples must not matter."""
    sizes = [[9], [6], [7]]
    model = replicate(dense())
    (batch,) = parts.batches(sizes)
    history = model.fit(
        *batch,
        batch_size=22,
        epochs=3,
        shuffle=parts.index is not None,
        verbose=0,
    )
    return outcome(model, history)


def weighted_classes(replicate, parts):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([layers.Input((8,)), layers.Dense(3, "softmax")])
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        jit_compile=COMPILED,
    )
    replicate(model)

    def labelled(x, y):
        return x, tf.cast(x[:, 0] > 0, tf.int32) + tf.cast(
            x[:, 1] > 0, tf.int32
        )

    data = parts.dataset().map(labelled)
    data = data.apply(
        tf.data.experimental.assert_cardinality(len(parts.batches()))
    )
    history = model.fit(
        data, epochs=2, class_weight={0: 1.0, 1: 3.0, 2: 0.2}, verbose=0
    )
    return outcome(model, history)


def from_a_py_dataset(replicate, parts):
    batches = parts.batches([[5, 4, 3], [6, 2, 9], [3, 8, 8]], leaves=3)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return len(batches)

        def __getitem__(self, index):
            return batches[index]

    model = replicate(dense())
    return outcome(model, model.fit(Batches(), epochs=2, verbose=0))


def sparse_gradients(replicate, parts):
    """Of an embedding, of which each process has met other rows."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Lambda(lambda x: keras.ops.cast(x * 3 + 15, "int32")),
            layers.Embedding(30, 4),
            layers.GlobalAveragePooling1D(),
            layers.Dense(1),
        ]
    )
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=COMPILED
    )
    replicate(model)
    return outcome(model, model.fit(parts.dataset(), epochs=2, verbose=0))


def rows_of_two_lengths(replicate, parts):
    """Two rows of one leaf belong to each row of the other.

    Then all processes must have as many samples.
    """
    keras.utils.set_random_seed(1)
    model = TwoLengths()
    model.compile("sgd", jit_compile=False)
    replicate(model)
    sizes = [[4, 8], [4, 8], [4, 8]]
    batches = [
        (np.repeat(x, 2, 0) * np.float32(0.5), y)
        for x, y in parts.batches(sizes)
    ]
    spec = tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1])
    data = tf.data.Dataset.from_generator(
        lambda: iter(batches), output_signature=spec
    ).apply(tf.data.experimental.assert_cardinality(2))
    return outcome(model, model.fit(data, epochs=2, verbose=0))


class TwoLengths(keras.Model):
    """Predicts a number from the sum over two rows."""

    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            pairs = tf.reshape(self(x), [-1, 2])
            loss = tf.reduce_mean((tf.reduce_sum(pairs, 1) - y[:, 0]) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def sent_by_the_first(replicate, parts):
    """A value of the first replica's samples; the first process has none."""
    model = Sending(has_others=parts.index is not None)
    model.compile("sgd", jit_compile=False)
    replicate(model)
    data = parts.dataset([[], [1, 1], [1, 1]])
    return outcome(model, model.fit(data, epochs=1, verbose=0))


class Sending(keras.Model):
    """Logs what the first replica that has samples sends."""

    def __init__(self, has_others):
        super().__init__()
        self.has_others = has_others

    def train_step(self, data):
        first = data[0][0, 0]
        return {"sent": kc.broadcast(first) if self.has_others else first}


LOCAL_CASES = {
    case.__name__: case
    for case in (
        uneven_parts,
        nothing_in_the_first,
        normalized_parts,
    )
}
MORE_LOCAL_CASES = {
    case.__name__: case
    for case in (
        of_unknown_number,
        accumulated_parts,
        weighted_parts,
        several_steps,
        steps_across_epochs,
        arrays,
        own_step_on_parts,
        single_parts,
        parts_of_a_distribution,
        words,
        shuffled_parts,
        weighted_classes,
        from_a_py_dataset,
        sparse_gradients,
        rows_of_two_lengths,
        sent_by_the_first,
    )
}
