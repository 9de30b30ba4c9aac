"""The data of a training that is interrupted is found again."""

import gc
import warnings
import weakref

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ON_GPU
from conftest import ONE_AND_TWO
from models import dense
from models import regression
from resume_cases import BATCH
from resume_cases import STEPS
from resume_cases import X
from resume_cases import Y
from test_resume import Kill
from test_resume import Killed
from test_resume import unseeded

import keras_conflux as kc
from keras_conflux._extensions.resume import fit as resumed_fit
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume import varying_data
from keras_conflux._extensions.resume.compat import pipelines

pytestmark = pytest.mark.usefixtures("deterministic")
SAMPLES = tf.data.Dataset.from_tensor_slices((X, Y))


def train(data, folder=None, after=None, devices=None, epochs=3, **options):
    """Runs the script of a user once; returns what it ends with.

    Args:
        data: Makes the arguments of `fit` that are the data, and callbacks.
        folder: Of checkpoints, if there are to be any.
        after: The training is killed after so many steps.
        devices: How many replicas there are, if any.
        epochs: How many there are.
        options: Of `fit`.
    """
    resumed_fit.ended_here.clear()  # as in a process of its own
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    if devices:
        kc.replicate(model, devices)
    model.compile("adam", "mse", jit_compile=False)
    given = data() | options
    callbacks = [Kill(after), *given.pop("callbacks", [])]
    if folder is not None:
        callbacks.append(kc.Resume(folder, every=1))
    history = model.fit(**given, epochs=epochs, callbacks=callbacks, verbose=0)
    return [*model.get_weights(), *history.history.values()]


def assert_goes_on(folder, data, after=STEPS + 3, **options):
    """Asserts that a training that is killed ends as one that is not."""
    expected = train(data, **options)
    with pytest.raises(Killed):
        train(data, folder, after, **options)
    assert_equal(train(data, folder, **options), expected)


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def generated():
    def samples():
        for row in np.random.permutation(len(X)):
            yield X[row] + np.random.normal(size=5), Y[row]

    spec = tf.TensorSpec((5,)), tf.TensorSpec((1,))
    data = tf.data.Dataset.from_generator(samples, output_signature=spec)
    return {"x": data.batch(BATCH).prefetch(2)}


def with_noise(x, y):
    def noise(x):
        return x + np.random.normal(size=x.shape).astype("float32")

    return tf.ensure_shape(tf.numpy_function(noise, [x], x.dtype), x.shape), y


def noisy():
    return {"x": SAMPLES.map(with_noise).batch(BATCH).prefetch(2)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize("data", [generated, noisy])
def test_python_code_in_tf_data_draws_random_numbers(tmp_path, data, devices):
    assert_goes_on(tmp_path, data, devices=devices)


def test_epochs_of_one_step(tmp_path):
    """Two batches that were trained last are both of step 0."""

    def data():
        return {"x": SAMPLES.batch(BATCH).repeat(), "steps_per_epoch": 1}

    assert_goes_on(tmp_path, data, after=2, devices=1)


class Reordered(keras.utils.PyDataset):
    """Has another order after each epoch."""

    def __init__(self):
        super().__init__()
        self.order = np.arange(len(X))

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[index * BATCH : (index + 1) * BATCH]
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.order = np.roll(self.order, 5)


def shuffled():
    return SAMPLES.shuffle(len(X), seed=3)


def shuffled_batches():
    return shuffled().batch(BATCH)


def cut_validation():
    return {
        **{"x": X, "y": Y, "batch_size": BATCH},
        **{"validation_data": shuffled_batches(), "validation_steps": 2},
    }


def reordered_validation():
    return cut_validation() | {"validation_data": Reordered()}


class Drawn(Reordered):
    """Draws from a generator, also where Keras only looks at its shapes."""

    def __init__(self, generator=None):
        super().__init__()
        self.generator = generator or np.random

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return x, y + self.generator.normal()


def drawn_validation():
    return {"x": X, "y": Y, "batch_size": BATCH, "validation_data": Drawn()}


def drawn_validation_of_its_own():
    data = Drawn(np.random.default_rng(3))
    return {"x": X, "y": Y, "batch_size": BATCH, "validation_data": data}


def drawn_for_both():
    data = Drawn(np.random.default_rng(3))
    return {"x": data, "validation_data": data}


def parts_of_one_shuffle():
    data = shuffled()
    parts = {"x": data.skip(8).batch(2), "validation_data": data.take(8)}
    parts["validation_data"] = parts["validation_data"].batch(2)
    return parts


def parts_of_one_shuffle_cut():
    return parts_of_one_shuffle() | {"steps_per_epoch": 4}


def same_for_validation():
    data = shuffled_batches()
    return {"x": data, "validation_data": data, "steps_per_epoch": 4}


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize(
    ("data", "after"),
    [
        (cut_validation, STEPS + 3),
        (reordered_validation, 2 * STEPS),
        (drawn_validation, STEPS + 3),
        (drawn_validation_of_its_own, 2 * STEPS),
        (drawn_for_both, 3),
        (drawn_for_both, STEPS + 3),
        (parts_of_one_shuffle, 10),
        (parts_of_one_shuffle_cut, 6),
        (same_for_validation, 6),
    ],
)
def test_validation_data(tmp_path, data, after, devices):
    assert_goes_on(tmp_path, data, after, devices=devices)


def files():
    """The usual way to read files, of which the length is not known."""

    def read(index):
        return tf.data.Dataset.from_tensor_slices((X, Y)).shard(4, index)

    data = tf.data.Dataset.range(4).shuffle(4, seed=2).interleave(read)
    return data.shuffle(5, seed=4).batch(BATCH)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", ONE_AND_TWO)
@pytest.mark.parametrize("after", [STEPS, 2 * STEPS, 2 * STEPS + 3])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_shuffle_above_another_one(tmp_path, is_known, after, devices):
    """Keras makes iterators that it never draws from, if it knows a length."""
    known = tf.data.experimental.assert_cardinality(STEPS)

    def data():
        data = files().apply(known) if is_known else files()
        return {"x": data, "validation_data": files().apply(known)}

    assert_goes_on(tmp_path, data, after, devices=devices)


def test_a_reader_of_files_whose_names_are_shuffled(tmp_path):
    names = [str(tmp_path / f"{i}.txt") for i in range(6)]
    for i, name in enumerate(names):
        np.savetxt(name, np.full([4, 5], i / 6.0))

    def row(line):
        x = tf.strings.to_number(tf.strings.split(line))
        return tf.ensure_shape(x, [5]), x[:1]

    def data():
        shuffled = tf.data.Dataset.from_tensor_slices(names).shuffle(6, seed=3)
        return {"x": tf.data.TextLineDataset(shuffled).map(row).batch(4)}

    assert_goes_on(tmp_path / "checkpoints", data)


@pytest.mark.skipif(ON_GPU, reason="deterministic ops refuse to have no seed")
def test_validation_data_that_varies_is_named(tmp_path):
    def generator():
        yield X, Y

    without_seed = unseeded(lambda: SAMPLES.shuffle(9)).batch(BATCH)
    repeated = shuffled().repeat().batch(BATCH)
    for words, data in (
        ("validation data .* shuffles without a seed", without_seed),
        ("validation data .* is a generator", generator()),
        ("validation data .* shuffled before it is rep", repeated),
    ):
        with pytest.warns(kc.ConfluxWarning, match=words):
            train(
                cut_validation,
                tmp_path / words,
                epochs=1,
                validation_data=data,
                validation_steps=1,
            )


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "steps", "cut"),
    [
        (shuffled_batches, 0, None),
        (shuffled_batches, STEPS + 3, None),
        (shuffled_batches, 0, 4),
        (Reordered, 0, None),
    ],
)
def test_a_second_training_on_the_same_data(tmp_path, make, steps, cut):
    """The first one, which is over, has to leave the data as it did."""

    def trained(folder, after=None):
        keras.utils.set_random_seed(7)
        data = {"x": make(), "steps_per_epoch": cut}
        first = train(lambda: data, folder and folder / "1", epochs=2)
        second = folder and folder / "2"
        return first + train(lambda: data, second, after, epochs=2)

    expected = trained(None)
    with pytest.raises(Killed):
        trained(tmp_path, steps)
    assert_equal(trained(tmp_path), expected)


def test_a_second_training_on_one_generator_is_named(tmp_path):
    """How many batches the first one has drawn ahead, nobody knows."""

    def batches():
        while True:
            yield X[:BATCH], Y[:BATCH]

    data, other = ({"x": batches(), "steps_per_epoch": 2} for _ in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        train(lambda: data, tmp_path / "1", epochs=1)
        train(lambda: other, tmp_path / "2", epochs=1)
    with pytest.warns(kc.ConfluxWarning, match="a generator.* one of its own"):
        train(lambda: data, tmp_path / "3", epochs=1)


def test_a_second_training_on_a_shuffle_before_an_endless_repeat(tmp_path):
    """How many seeds the first one has taken, nobody knows."""

    def trained(folder, data):
        train(lambda: {"x": data, "steps_per_epoch": 2}, folder, epochs=1)

    once, shuffled_last = shuffled_batches(), SAMPLES.repeat().shuffle(9, 1)
    for i in range(2):  # warnings are errors
        trained(tmp_path / f"last {i}", shuffled_last.batch(BATCH))
        trained(tmp_path / f"new {i}", shuffled_batches().repeat())
    trained(tmp_path / "1", once.repeat())
    with pytest.warns(kc.ConfluxWarning, match="without end for one `fit`"):
        trained(tmp_path / "2", once.repeat())


@pytest.mark.parametrize("devices", [None, 1])
def test_data_is_free_after_training(tmp_path, devices):
    model = dense()
    if devices:
        kc.replicate(model, devices)
    data = tf.data.Dataset.from_tensor_slices(regression(16)).batch(4)
    there = weakref.ref(data)
    model.fit(data, callbacks=[kc.Resume(tmp_path)], verbose=0)
    del data
    gc.collect()
    assert there() is None


@pytest.mark.long
def test_data_that_this_process_has_used_before(tmp_path):
    data = {"x": shuffled_batches()}
    with pytest.raises(Killed):
        train(lambda: data, tmp_path, STEPS + 3)
    with pytest.warns(kc.ConfluxWarning, match="shuffled more often"):
        train(lambda: data, tmp_path)


def test_a_shuffle_that_begins_more_than_once_is_named():
    for data in (
        shuffled().repeat(2),
        shuffled().concatenate(shuffled()),
        shuffled().repeat().take(40),
        shuffled().cache(),
    ):
        (found,) = varying_data.causes(data.batch(BATCH))
        assert "shuffled before it is repeated" in found
    for data in (shuffled().repeat(), SAMPLES.cache().repeat(2).shuffle(9, 1)):
        assert not varying_data.causes(data.batch(BATCH))


def with_random(x, y):
    return x + tf.random.normal([5], seed=3), y


def with_random_inside(x, y):
    return tf.data.Dataset.from_tensors((x, y)).map(with_random)


def with_python(x, y):
    x = tf.numpy_function(np.negative, [x], x.dtype)
    return tf.ensure_shape(x, [5]), y


@pytest.mark.skipif(ON_GPU, reason="ops are deterministic")
def test_random_numbers_in_parallel_calls_are_named():
    calls = {"num_parallel_calls": 2}
    for words, data in (
        ("`RandomStandardNormal` in par", SAMPLES.map(with_random, **calls)),
        (
            "`RandomStandardNormal` in par",
            SAMPLES.interleave(with_random_inside, **calls),
        ),
        ("Python code in parallel", SAMPLES.map(with_python, **calls)),
    ):
        found = varying_data.causes(data.batch(BATCH))
        assert len(found) == 1
        assert words in found[0]
    for data in (
        SAMPLES.map(with_random),
        SAMPLES.map(with_random, num_parallel_calls=1),
        SAMPLES.map(lambda x, y: (x + 1, y), **calls),
    ):
        assert not varying_data.causes(data.batch(BATCH))


def test_a_cache_of_random_numbers_is_named(tmp_path):
    seed = keras.random.SeedGenerator(3)
    generator = tf.random.Generator.from_seed(3)
    for noise in (
        lambda: keras.random.normal([5], seed=seed),
        lambda: generator.normal([5]),
    ):
        data = SAMPLES.map(lambda x, y, noise=noise: (x + noise(), y))
        (found,) = varying_data.causes(data.cache().batch(BATCH))
        assert "keeps by `cache`" in found
        on_disk = data.cache(str(tmp_path / "file"))
        for other in (data, on_disk):
            assert not varying_data.causes(other.batch(BATCH))
        # Data sets from outside of a function keep their parts to themselves.
        for other in (
            tf.data.Dataset.range(2).flat_map(lambda _, d=data: d),
            tf.data.Dataset.range(2).flat_map(
                lambda _, d=data: tf.data.Dataset.range(2).flat_map(lambda _: d)
            ),
            tf.data.Dataset.from_tensors(data).flat_map(lambda d: d),
            tf.data.Dataset.from_tensors({"a": data}).flat_map(
                lambda d: d["a"]
            ),
        ):
            (found,) = varying_data.causes(other)
            assert "cannot be found" in found
        windows = SAMPLES.window(3).flat_map(lambda *each: each[0])
        assert not varying_data.causes(windows)
    assert not varying_data.causes(SAMPLES.map(with_random).cache())


def test_variables_of_data_are_in_an_order_that_all_processes_have():
    seeds = [keras.random.SeedGenerator(i) for i in range(9)]

    def with_noise(x, y):
        noise = [keras.random.normal([5], seed=seed) for seed in seeds]
        return x + sum(noise), y

    found = pipelines.variables_of_dataset(SAMPLES.map(with_noise).repeat())
    expected = [seed.state.value for seed in seeds]
    assert [*map(id, found)] == [*map(id, expected)]


@pytest.mark.parametrize("name", ["x", "validation_data"])
@pytest.mark.parametrize("draws", [True, False])
def test_a_cache_of_what_python_code_draws_is_named(tmp_path, name, draws):
    def same(x, y):
        return tf.ensure_shape(tf.numpy_function(abs, [x], x.dtype), [5]), y

    cached = SAMPLES.map(with_noise if draws else same).cache().batch(BATCH)
    cached = cached.map(with_noise)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        data = {"x": SAMPLES.batch(BATCH)} | {name: cached}
        train(lambda: data, tmp_path)
    named = [x for x in caught if "what Python code has made" in str(x.message)]
    assert len(named) == draws


def test_a_choice_that_is_another_each_time_is_named():
    choice = tf.data.Dataset.range(2).repeat(20)

    def chosen(choice):
        samples = [SAMPLES.shuffle(9, seed=1), SAMPLES]
        return tf.data.Dataset.choose_from_datasets(samples, choice)

    shuffled = choice.shuffle(9, seed=3)
    for other in (shuffled, choice.flat_map(lambda _: shuffled)):
        (found,) = varying_data.causes(chosen(other))
        assert "shuffle no `choice_dataset`" in found
    for equal in (chosen(choice), SAMPLES.enumerate()):
        assert not varying_data.causes(equal)


@pytest.mark.long
@pytest.mark.sampled(2)
@pytest.mark.parametrize("after", [STEPS, STEPS + 3])
def test_a_seed_generator_in_tf_data(tmp_path, after):
    def noisy():
        seed = keras.random.SeedGenerator(3)

        def with_noise(x, y):
            return x + keras.random.normal([5], seed=seed), y

        return SAMPLES.map(with_noise).batch(BATCH)

    def data():
        return {"x": noisy(), "validation_data": noisy()}

    assert_goes_on(tmp_path, data, after)


class Noisy(Reordered):
    """Draws from generators of its own, one of them of its class."""

    order_of = np.random.default_rng(5)

    def __init__(self):
        super().__init__()
        type(self).order_of = np.random.default_rng(5)
        self.seed = keras.random.SeedGenerator(3)
        self.random = np.random.default_rng(3)

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        noise = keras.random.normal(x.shape, seed=self.seed)
        return x + self.random.normal(size=x.shape) + noise, y

    def on_epoch_end(self):
        self.order_of.shuffle(self.order)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("after", [STEPS, STEPS + 3])
def test_generators_of_a_pydataset(tmp_path, after):
    assert_goes_on(tmp_path, lambda: {"x": Noisy()}, after)


class Holder(keras.callbacks.Callback):
    """Holds something, as data that it looks at."""

    def __init__(self, held):
        super().__init__()
        self.held = held


class Peeking(Holder):
    """Trains on the first labels that it finds in a data set."""

    def look(self, *_):
        found = self.held() if callable(self.held) else self.held
        (found,) = found if isinstance(found, tuple) else (found,)
        (label,) = next(iter(found))[1][:1]
        self.model.layers[-1].bias.assign_add(label)

    on_epoch_begin = on_epoch_end = look


class Evaluating(Holder):
    """Trains by what it finds when it evaluates, in the middle of an epoch."""

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            found = self.model.evaluate(self.held, steps=1, verbose=0)
            self.model.layers[-1].bias.assign_add([found])


class Reducing(Holder):
    """Trains on what it finds in a data set, without an iterator."""

    def on_epoch_end(self, epoch, logs=None):
        first, last = self.held.take(1), self.held.take(2)
        _, found = first.get_single_element()
        label = last.reduce(found[:1], lambda _, row: row[1][:1])
        self.model.layers[-1].bias.assign_add(label[0])


def looked_at(kind, own):
    """Returns what makes data, and a callback that draws from a shuffle."""

    def made():
        samples = SAMPLES.shuffle(len(X), seed=7)
        data = samples.batch(BATCH)
        held = {
            "the training's": data,
            "part of the training's": samples.take(9).batch(2),
            "another": shuffled_batches(),
            "in a function": lambda: data,
        }[own]
        return {"x": data, "callbacks": [kind(held)]}

    return made


@pytest.mark.long
@pytest.mark.sampled(3)
@pytest.mark.parametrize("after", [3, STEPS, STEPS + 3])
@pytest.mark.parametrize(
    ("kind", "own"),
    [
        (Peeking, "the training's"),
        (Peeking, "part of the training's"),
        (Peeking, "another"),
        (Peeking, "in a function"),
        (Evaluating, "the training's"),
        (Evaluating, "another"),
        (Reducing, "the training's"),
    ],
)
def test_a_callback_draws_from_a_shuffle(tmp_path, kind, own, after):
    assert_goes_on(tmp_path, looked_at(kind, own), after, devices=1)


class Refilled(Reordered):
    """Takes its order from a shuffle of tf.data."""

    def __init__(self):
        super().__init__()
        self.orders = [tf.data.Dataset.range(len(X)).shuffle(len(X), seed=3)]

    def on_epoch_end(self):
        self.order = np.array([*self.orders[0].as_numpy_iterator()])


@pytest.mark.parametrize("after", [2 * STEPS, 2 * STEPS + 3])
def test_shuffles_in_lists_and_in_a_pydataset(tmp_path, after):
    def data():
        holder = Peeking((shuffled_batches(),))
        holder.kind = h5py.File  # whose methods' class has no name of a module
        return {"x": Refilled(), "callbacks": [holder]}

    assert_goes_on(tmp_path, data, after)


@pytest.mark.parametrize("name", ["x", "validation_data"])
def test_a_callback_may_hold_the_data_of_the_training(tmp_path, name):
    data = {"x": Reordered(), "validation_data": Reordered()}
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)
    callbacks = [Holder(data[name]), kc.Resume(tmp_path, every=1)]
    model.fit(**data, callbacks=callbacks, verbose=0)  # warnings are errors
    callbacks[0].held = Reordered()
    with pytest.warns(kc.ConfluxWarning, match=r"'held' \(a Reordered\)"):
        model.fit(**data, epochs=2, callbacks=callbacks, verbose=0)


def test_what_a_pydataset_loses_is_named(tmp_path):
    class Holding(Reordered):
        def on_epoch_end(self):
            self.order = [*self.order]

    data = Holding()
    data.noise = keras.layers.GaussianNoise(1.0, seed=3)
    with pytest.warns(kc.ConfluxWarning) as told:
        train(lambda: {"x": data}, tmp_path, epochs=2)
    texts = " ".join(str(each.message) for each in told)
    assert "PyDataset Holding holds values not saved" in texts
    assert "'noise' (a GaussianNoise)" in texts
    assert "Holding has changed in training" in texts


class Drawing(keras.callbacks.Callback):
    """Draws as an epoch begins, whose data goes on from the last one."""

    def on_epoch_begin(self, epoch, logs=None):
        self.model.layers[-1].bias.assign_add([np.random.normal()])


@pytest.mark.parametrize("after", [STEPS, STEPS + 3])
def test_numbers_that_a_callback_draws_as_cut_data_goes_on(tmp_path, after):
    def data():
        samples = SAMPLES.shuffle(len(X), seed=7).batch(BATCH).repeat()
        drawing = [Drawing()]
        return {"x": samples, "steps_per_epoch": STEPS, "callbacks": drawing}

    assert_goes_on(tmp_path, data, after)


class Weighed(Reordered):
    """Orders its samples by weights, which a callback shares and changes."""

    def __init__(self):
        super().__init__()
        self.weights = np.zeros(len(X))

    def on_epoch_end(self):
        self.order = np.argsort(self.weights, kind="stable")


class Weighing(keras.callbacks.Callback):
    def __init__(self, data):
        super().__init__()
        self.data, self.weights = data, data.weights

    def on_train_batch_end(self, batch, logs=None):
        rows = self.data.order[batch * BATCH : (batch + 1) * BATCH]
        self.weights[rows] += (1 + batch) % 3 - logs["loss"]


@pytest.mark.parametrize("after", [2, STEPS, STEPS + 2])
def test_an_array_of_data_that_a_callback_changes(tmp_path, after):
    def data():
        weighed = Weighed()
        return {"x": weighed, "callbacks": [Weighing(weighed)]}

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The callback Weighing holds")
        assert_goes_on(tmp_path, data, after, devices=1)


def test_a_pydataset_that_changes_itself_and_is_cut_is_named(tmp_path):
    with pytest.warns(kc.ConfluxWarning, match="leave `steps_per_epoch` out"):
        train(lambda: {"x": Reordered(), "steps_per_epoch": 2}, tmp_path)


@pytest.mark.parametrize("is_shared", [True, False])
def test_a_generator_of_data_and_a_callback_is_named(tmp_path, is_shared):
    data, callback = Reordered(), keras.callbacks.Callback()
    data.random = np.random.default_rng(1)
    callback.random = data.random if is_shared else np.random.default_rng(1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        train(lambda: {"x": data, "callbacks": [callback]}, tmp_path)
    named = [x for x in caught if "a callback may draw" in str(x.message)]
    assert len(named) == is_shared


GLOBAL = np.random.default_rng(1)


def _drawn_by_a_global():
    return GLOBAL.normal(size=(5,)).astype("float32")


class Counting:
    """Yields samples, in another order each time if it counts."""

    def __init__(self, counts):
        self.counts, self.times = counts, 0

    def __call__(self):
        self.times += self.counts
        for place in np.random.default_rng(self.times).permutation(len(X)):
            yield X[place], Y[place]

    def moved(self, x):
        self.times += self.counts
        return x + self.times


def in_a_closure(counts):
    own = Counting(counts)
    times = 0

    def samples():
        nonlocal times
        times += own.counts
        yield from own()

    return samples


@pytest.mark.parametrize("name", ["x", "validation_data"])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("way", ["__call__", "moved", "a closure", None])
def test_objects_that_python_code_changes_are_named(
    tmp_path, way, counts, name
):
    own = Counting(counts)
    if way == "a closure":
        code = in_a_closure(counts)
    else:
        code = own if way is None else getattr(own, way)

    def moved(x, y):
        return tf.ensure_shape(tf.numpy_function(code, [x], x.dtype), [5]), y

    def data():
        spec = tf.TensorSpec((5,)), tf.TensorSpec((1,))
        if way == "moved":
            made = SAMPLES.map(moved)
        else:
            made = tf.data.Dataset.from_generator(code, output_signature=spec)
        return {"x": SAMPLES.batch(BATCH)} | {name: made.batch(BATCH)}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        train(data, tmp_path)
    named = [x for x in caught if "depends on ['times']" in str(x.message)]
    assert len(named) == counts


def test_python_code_with_a_generator_of_its_own_is_named():
    own = np.random.default_rng(1)

    class Global(Reordered):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + _drawn_by_a_global(), y

    def in_a_cell():
        yield own.normal(size=5)

    def made_inside():
        yield np.random.default_rng(1).normal(size=5)

    inner, in_order = shuffled(), SAMPLES

    def of_a_shuffle():
        yield from inner.as_numpy_iterator()

    def of_samples():
        yield from in_order.as_numpy_iterator()

    made = tf.data.Dataset.from_generator
    spec = tf.TensorSpec((5,), "float64")

    def drawn_in_map(x, y):
        return tf.numpy_function(lambda x: x + own.normal(), [x], x.dtype), y

    def traced(x, y):
        return x + own.normal(), y

    cell, inside, drawn, read = (
        made(generator=each, output_signature=spec).batch(2)
        for each in (in_a_cell, made_inside, of_a_shuffle, of_samples)
    )
    for given in (
        (None, Global()),
        (cell,),
        (drawn,),
        (SAMPLES.map(drawn_in_map),),
    ):
        (found,) = varying_data.causes(*given)
        assert "that is no attribute of a `PyDataset`" in found
    for given in (
        (None, Noisy()),
        (None, Refilled()),
        (inside,),
        (read,),
        (SAMPLES.map(traced),),
    ):
        assert not varying_data.causes(*given)


def test_a_table_that_data_changes_is_named():
    table = tf.lookup.experimental.MutableHashTable("int64", "int64", 0)

    def count(x, y):
        key = tf.zeros([], "int64")
        table.insert(key, table.lookup(key) + 1)
        return x, y

    (found,) = varying_data.causes(SAMPLES.map(count))
    assert "changes a table" in found


def test_one_worker_in_another_process_is_named():
    data = Reordered()
    assert not varying_data.causes(None, data)
    data.workers, data.use_multiprocessing = 1, True
    (found,) = varying_data.causes(None, data)
    assert "in other processes" in found


class Harder(keras.callbacks.Callback):
    """Sets a variable that the data reads, in the first step of an epoch."""

    def __init__(self, level):
        super().__init__()
        self.level = level

    def on_train_batch_end(self, batch, logs=None):
        if batch == 0:
            self.level.assign_add(1.0)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        assert not state


def test_a_variable_that_a_callback_sets_for_the_data(tmp_path):
    def trained(folder, after=None):
        keras.utils.set_random_seed(7)
        level = tf.Variable(1.0)
        data = SAMPLES.map(lambda x, y: (x * level, y)).batch(BATCH)
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
        callbacks = [Harder(level), Kill(after), kc.Resume(folder, every=1)]
        model.fit(data, epochs=2, callbacks=callbacks, verbose=0)
        return float(level)  # which the batches drawn ahead may not see

    assert trained(tmp_path / "plain") == 3
    with pytest.raises(Killed):
        trained(tmp_path / "killed", STEPS + 3)
    assert trained(tmp_path / "killed") == 3


class Large(Reordered):
    """Holds its samples, too."""

    def __init__(self):
        super().__init__()
        self.samples = X


@pytest.mark.long
def test_large_arrays_of_a_pydataset(tmp_path, monkeypatch):
    monkeypatch.setattr(plain_values, "_LARGE", 8 * len(X) - 1)
    assert_goes_on(tmp_path, lambda: {"x": Large()})
    with np.load(checkpoint(tmp_path) / "state.npz") as found:
        state = str(found["text"])
    assert '"order"' in state
    assert '"samples"' not in state


@pytest.mark.parametrize("place", [0, 1, 1_234_567, -1])
def test_each_entry_of_a_large_array_counts(place):
    large = np.zeros((1_000_000, 2))
    before = plain_values.mark(large)
    large.flat[place] = 1.0
    assert plain_values.mark(large) != before


def checkpoint(folder):
    return kc.checkpoints(folder)[0].path
