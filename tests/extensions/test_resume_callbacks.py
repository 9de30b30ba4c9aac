"""What callbacks hold is given back when a training goes on."""

import collections
import contextlib
import datetime
import enum
import functools
import itertools
import os
import pathlib
import random
import tracemalloc
import types
import warnings

import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
import tensorflow as tf
from resume_cases import STEPS
from test_resume import Kill
from test_resume import Killed
from test_resume import linear

import keras_conflux as kc
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.held_attributes import CallbackStates
from keras_conflux._extensions.resume.held_attributes import HeldAttributes


def resumed(folder, make, after=STEPS + 3, epochs=2):
    """Trains until a process is killed, then to the end with a new callback.

    Returns:
        The callback, and one of a training that was not interrupted.
    """
    undisturbed, killed, callback = make(), make(), make()
    linear(undisturbed, epochs=epochs)
    resume = kc.Resume(folder, every=1)
    with pytest.raises(Killed):
        linear(resume, killed, Kill(after), epochs=epochs)
    linear(kc.Resume(folder), callback, Kill(), epochs=epochs)
    return callback, undisturbed


class OncePerEpoch(keras.callbacks.Callback):
    """Does something after the first step of an epoch."""

    def __init__(self, size):
        super().__init__()
        self.due = np.zeros(size, bool)
        self.timer = None
        self.done = 0

    def on_epoch_begin(self, epoch, logs=None):
        self.due = ~np.zeros_like(self.due)
        self.timer = object()

    def on_train_batch_end(self, batch, logs=None):
        assert self.timer is not None
        self.done += self.due[0]
        self.due = np.zeros_like(self.due)


@pytest.mark.long
@pytest.mark.parametrize("after", [STEPS + 3, STEPS - 2])
def test_a_value_that_is_what_it_was_at_first(tmp_path, after):
    callback, undisturbed = resumed(tmp_path, lambda: OncePerEpoch(9), after)
    assert callback.done == undisturbed.done == 2


class Drawing(keras.callbacks.Callback):
    """Draws from the generator of NumPy, which data does not."""

    drawn = None

    def on_train_batch_end(self, batch, logs=None):
        self.drawn = np.random.normal()


class Numbered(keras.utils.PyDataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        x = np.full((4, 1), index / STEPS, "float32")
        return x, x


@pytest.mark.parametrize("after", [2, STEPS, STEPS + 3])
def test_numbers_that_a_callback_draws(tmp_path, after):
    def fitted(*callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(Numbered(), epochs=2, verbose=0, callbacks=[*callbacks])

    undisturbed, killed, callback = (Drawing() for _ in range(3))
    fitted(undisturbed)
    with pytest.raises(Killed):
        fitted(kc.Resume(tmp_path, every=1), killed, Kill(after))
    fitted(kc.Resume(tmp_path), callback, Kill())
    assert callback.drawn == undisturbed.drawn


class Weighed(keras.utils.PyDataset):
    """Draws the next epoch's samples by weights that a callback changes."""

    def __init__(self):
        super().__init__()
        self.weights, self.order = np.ones(4 * STEPS), np.arange(4 * STEPS)
        self.level, self.noise = 1.0, np.random.default_rng(1)

    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        rows = self.order[4 * index : 4 * index + 4, None]
        x = np.float32(rows / len(rows)) + self.noise.normal()
        return x, x

    def on_epoch_end(self):
        chances = self.weights**self.level
        self.order = np.random.choice(
            4 * STEPS, 4 * STEPS, p=chances / sum(chances)
        )


class Weigh(keras.callbacks.Callback):
    def __init__(self, data):
        super().__init__()
        self.data = data

    def on_train_batch_end(self, batch, logs=None):
        self.data.weights[self.data.order[:batch]] += logs["loss"]
        self.data.level += 0.5


@pytest.mark.parametrize("after", [2, STEPS + 3])
def test_data_that_a_callback_changes(tmp_path, after):
    def fitted(*callbacks):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        data = Weighed()
        callbacks = [*callbacks, Weigh(data)]
        model.fit(data, epochs=3, verbose=0, callbacks=callbacks)
        return [*data.order, *data.weights, data.level]

    expected = fitted()
    with pytest.raises(Killed):
        fitted(kc.Resume(tmp_path, every=1), Kill(after))
    assert fitted(kc.Resume(tmp_path), Kill()) == expected


class Odd(keras.callbacks.Callback):
    """Holds what is not a number, string or array."""

    def __init__(self, shared, rate):
        super().__init__()
        self.shared = shared
        self.first = self.second = []
        self.recent = collections.deque(maxlen=4)
        self.by_epoch = collections.defaultdict(list)
        self.seen = set()
        self.numpy = np.random.default_rng(1)
        self.python = random.Random(1)
        self.rate = keras.Variable(rate)
        self.constant = keras.Variable(rate)
        self.learned = None

    def on_epoch_begin(self, epoch, logs=None):
        self.learned = self.model.optimizer.learning_rate

    def on_train_batch_end(self, batch, logs=None):
        drawn = self.numpy.random() + self.python.random()
        self.shared.append(logs["loss"])
        self.first = self.first[:1] or [-drawn]
        self.second.append(drawn)
        self.recent.append(drawn)
        self.by_epoch["drawn"].append(drawn)
        self.seen.add(float(self.rate))
        self.rate.assign_add(0.5)

    def found(self):
        held = {**vars(self), "rate": float(self.rate)}
        names = ("shared", "first", "second", "recent", "by_epoch", "seen")
        return [held[name] for name in (*names, "rate")]


def test_what_else_a_callback_holds(tmp_path):
    shared = []

    def make():
        shared.append([])
        return Odd(shared[-1], rate=0.5)

    callback, undisturbed = resumed(tmp_path, make)
    assert callback.found() == undisturbed.found()
    assert shared[-1] == undisturbed.shared


def test_objects_that_could_lose_their_state_are_named(tmp_path):
    count = {"epochs": 0}

    def counting(epoch, logs):
        count["epochs"] += 1

    callback = keras.callbacks.Callback()
    callback.path = tmp_path
    callback.function = len
    callback.generator = np.random.default_rng(1)
    linear(kc.Resume(tmp_path / "a"), callback)  # nothing that could be lost
    callback.teacher = keras.Sequential(
        [keras.Input((5,)), keras.layers.BatchNormalization()]
    )
    callback.items = iter([1, 2])
    named = (
        r"holds.*: 'teacher' \(a Sequential\), 'items' \(a list_iterator\)\."
    )
    with pytest.warns(kc.ConfluxWarning, match=named):
        linear(kc.Resume(tmp_path / "b"), callback)
    lambdas = keras.callbacks.LambdaCallback(on_epoch_end=counting)
    with pytest.warns(kc.ConfluxWarning, match=r"given back \['count'\]"):
        linear(kc.Resume(tmp_path / "c"), lambdas)


def counter(count=0):
    def following():
        nonlocal count
        count += 1
        return count

    return following


def drawing(generator):
    return lambda: generator.random()


def keeping(x, seen=[]):  # noqa: B006
    return seen.append(x)


class Keeping(keras.callbacks.ModelCheckpoint):
    """Does more than its parent of Keras, with attributes of its own."""

    def __init__(self, path):
        super().__init__(path, save_weights_only=True)
        self.last, self.phase = None, "first"

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, logs)
        self.last, self.phase = [self._get_file_path(epoch, None, logs)], "next"


def test_attributes_that_a_subclass_of_keras_loses_are_named(tmp_path):
    callback = Keeping(tmp_path / "{epoch}.weights.h5")
    with pytest.warns(kc.ConfluxWarning, match=r"back \['last', 'phase'\]"):
        linear(kc.Resume(tmp_path / "run", every=STEPS), callback)


class Patience:
    """Counts calls, as what a callback is handed may do."""

    calls = 0

    def step(self, one=1):
        self.calls += one


def using(counter):
    first = counter[0] if isinstance(counter, list) else counter
    return lambda one, held=counter: first.step(one)


def endless():
    held = [0, 1]
    return [*held, held.append(held) or held]


def turning(held):
    def turn():
        held[0], held[-1] = held[-1], held[0]

    return turn


def counting_in(held):
    def count():
        held.n += 1

    return count


def later(make):
    made = None

    def ask():
        nonlocal made
        made = made or make()

    return ask


def printing(file):
    return lambda one: print(one, file=file)


class OfClass:
    n = 0


def opened():
    return pathlib.Path(os.devnull).open("a")


def numbered(one):
    numbered.calls += one


numbered.calls = 0

HOLDING = {
    "a number that it writes": (counter, True),
    "an object": (lambda: Patience().step, True),
    "an object that it uses": (lambda: using(Patience()), True),
    "an object in a list": (lambda: using([Patience(), 1]), True),
    "a list of objects": (lambda: turning([Patience(), Patience()]), True),
    "a list in itself": (lambda: turning(endless()), True),
    "many objects": (lambda: turning([Patience()] * 2000 + [Patience()]), True),
    "a pair in many": (lambda: turning([("a", i) for i in range(2000)]), True),
    "a namespace": (lambda: counting_in(types.SimpleNamespace(n=1)), True),
    "a class": (lambda: counting_in(OfClass), True),
    "an object array": (lambda: turning(np.array([{}, []], object)), True),
    "an object later": (lambda: later(Patience), False),
    "a generator later": (lambda: later(np.random.default_rng), True),
    "a file": (lambda: opened().write, False),
    "a file in a closure": (lambda: printing(opened()), False),
    "a variable": (lambda: keras.Variable(0).assign_add, True),
    "a variable of texts": (lambda: tf.Variable("a").assign, False),
    "a metric": (lambda: keras.metrics.Mean().update_state, True),
    "an attribute": (lambda: numbered, True),
    "a generator": (lambda: drawing(np.random.default_rng(1)), True),
    "a method of a generator": (lambda: random.Random(1).random, True),
    "an argument": (lambda: functools.partial(keeping, [1]), True),
    "a default": (lambda: keeping, True),
    "a generator of Python's": (lambda: iter([1]).__next__, True),
    "a global generator": (lambda: np.random.normal, False),
    "a global generator of Python": (lambda: random.random, False),
    "a number": (lambda: lambda one=1: one + 2, False),
    "no number": (lambda: lambda one=float("nan"): one + 2, False),
    "a number below zero": (lambda: counter(-3), True),
    "a table": (lambda: {1: 2}.get, False),
}


@pytest.mark.parametrize("kind", HOLDING)
def test_functions_that_hold_what_they_change_are_named(kind):
    make, is_named = HOLDING[kind]
    callback = keras.callbacks.Callback()
    callback.function = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        held = HeldAttributes(callback)
        for given in ([], [1]):
            with contextlib.suppress(TypeError):
                callback.function(*given)
                break
        held.changed()
        held.changed()
    assert len(caught) == is_named


class SetOnce(keras.callbacks.Callback):
    """Sets an attribute in the first epoch, or in each one."""

    def __init__(self, value, anew):
        super().__init__()
        self.make, self.anew = value, anew

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 0 or self.anew:
            self.mine = self.make()

    def on_train_batch_end(self, batch, logs=None):
        if isinstance(self.mine, int):
            self.mine += 1


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("value", [int, lambda: iter([1])])
def test_a_value_that_only_the_first_epoch_sets_is_named(tmp_path, value, anew):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        resume = kc.Resume(tmp_path, every=1)
        linear(resume, SetOnce(value, anew), epochs=2)
    told = [each for each in caught if "given back ['mine']" in str(each)]
    assert len(told) == (not anew)


@pytest.mark.parametrize("every", [1, STEPS])
def test_a_metric_that_each_epoch_makes_is_named_in_its_midst(tmp_path, every):
    class Measured(keras.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.metric = None

        def on_epoch_begin(self, epoch, logs=None):
            self.metric = keras.metrics.Mean()

        def on_train_batch_end(self, batch, logs=None):
            self.metric.update_state(batch)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", kc.ConfluxWarning)
        linear(kc.Resume(tmp_path, every=every), Measured(), epochs=2)
    told = [each for each in caught if "given back ['metric']" in str(each)]
    assert len(told) == (every == 1)


class Remembering(keras.callbacks.Callback):
    """Keeps the weights of the first epoch that it sees."""

    def on_epoch_begin(self, epoch, logs=None):
        if not hasattr(self, "reference"):
            self.reference = self.model.get_weights()


def test_weights_that_only_the_first_epoch_keeps_are_named(tmp_path):
    with pytest.warns(kc.ConfluxWarning, match="given back \\['reference'\\]"):
        linear(kc.Resume(tmp_path, every=STEPS), Remembering(), epochs=2)


class RateLogged(keras.callbacks.Callback):
    """Logs a variable, as many programs do, and more if asked."""

    more = None

    def on_epoch_end(self, epoch, logs=None):
        logs["rate"] = self.model.optimizer.learning_rate
        self.model.history.history["best"] = 1.5
        if self.more is not None:
            logs["more"] = self.more


def test_a_history_of_variables_is_given_back(tmp_path):
    def logged(callback):
        return callback.model.history.history.items()

    callback, undisturbed = resumed(tmp_path, RateLogged, STEPS + 3)
    found, expected = (
        {k: np.ravel(v).astype(float).tolist() for k, v in logged(x)}
        for x in (callback, undisturbed)
    )
    assert found == expected
    assert len(found["rate"]) == len(found["loss"]) == 2


def test_a_history_of_objects_is_named(tmp_path):
    logged = RateLogged()
    logged.more = datetime.timedelta(1)
    with pytest.warns(kc.ConfluxWarning, match="History has changed"):
        linear(kc.Resume(tmp_path, every=STEPS), logged, epochs=2)


class Phase(enum.Enum):
    FIRST = 1
    SECOND = 2


def count_up(count):
    return count + 1


def append(values):
    values.append(len(values))
    return values


def shuffle(values):
    return [*values[1:], values[0]]


def draw(function):
    def change(generator):
        function(generator)
        return generator

    return change


HELD = {
    "a number": (lambda: 0, count_up),
    "a list": (list, append),
    "a deque": (lambda: collections.deque(maxlen=3), append),
    "an array": (lambda: np.zeros(3), lambda x: x + 1),
    "paths": (lambda: [pathlib.Path("a/b"), pathlib.Path("c")], shuffle),
    "NumPy's": (lambda: np.random.default_rng(1), draw(lambda x: x.random())),
    "MT19937": (
        lambda: np.random.Generator(np.random.MT19937(1)),
        draw(lambda x: x.random()),
    ),
    "Philox": (
        lambda: np.random.Generator(np.random.Philox(1)),
        draw(lambda x: x.random(dtype="f4")),
    ),
    "spawned": (lambda: np.random.default_rng(1), draw(lambda x: x.spawn(1))),
    "RandomState": (
        lambda: np.random.RandomState(1),
        draw(lambda x: x.normal()),
    ),
    "Python's": (lambda: random.Random(1), draw(lambda x: x.gauss())),
    "Keras'": (
        lambda: keras.random.SeedGenerator(1),
        draw(lambda x: keras.random.normal([], seed=x)),
    ),
    "TensorFlow's": (
        lambda: tf.random.Generator.from_seed(1),
        draw(lambda x: x.normal([])),
    ),
}
LOST = {
    "a state of the system": (random.SystemRandom, draw(lambda x: None)),
    "a constant": (lambda: Phase.FIRST, lambda _: Phase.SECOND),
    "an object later": (lambda: None, lambda _: object()),
    "a generator later": (lambda: None, lambda _: np.random.default_rng(1)),
    "a huge number": (lambda: 10**5000, lambda x: x),
    "an array of a class": (lambda: np.zeros(2).view(Array), lambda x: x),
    "a text": (lambda: "before", lambda _: "after"),
    "a type": (lambda: 1, lambda _: [1]),
    "iterators": (lambda: [iter([1])], lambda x: x),
    "a variable of texts": (lambda: tf.Variable(["a"]), lambda x: x),
}


class Array(np.ndarray):
    """Has a unit, maybe."""


def holding(parent, place, make, change):
    """Returns an object that holds a value at a place, and a step of it."""

    class Holds(parent):
        __slots__ = ("slot",)
        of_class = make()

        def __init__(self):
            super().__init__()
            self.slot = make()
            self.own = make()
            self.__mangled = make()

        def __len__(self):
            return 1

        def __getitem__(self, index):
            return index

    held = Holds()
    holder = Holds if place == "of_class" else held

    def step():
        value = change(getattr(holder, place))
        setattr(holder, place, value)

    return held, step, lambda: getattr(holder, place)


PLACES = ["slot", "own", "_Holds__mangled", "of_class"]
PARENTS = [keras.callbacks.Callback, keras.utils.PyDataset]


def found_in(value):
    """Returns what tells the state of a value of `HELD`."""
    if hasattr(value, "spawn"):
        return float(value.spawn(1)[0].random() + value.random())
    for function in ("random", "normal"):
        if hasattr(value, function):
            size = ([],) if isinstance(value, tf.random.Generator) else ()
            return float(getattr(value, function)(*size))
    return value.state.numpy() if hasattr(value, "state") else value


def attributes(held):
    if isinstance(held, keras.utils.PyDataset):
        return HeldAttributes(held, plain_values.mark)
    return HeldAttributes(held)


def drawn_kinds(kinds):
    return (
        st.sampled_from(sorted(kinds)),
        st.sampled_from(PLACES),
        st.sampled_from(PARENTS),
    )


@hypothesis.settings(max_examples=40, deadline=None, database=None)
@hypothesis.given(*drawn_kinds(HELD), st.integers(0, 3), st.integers(0, 3))
def test_values_at_all_places_are_given_back(kind, place, parent, one, two):
    def stepped(count, saved=None):
        held, step, value = holding(parent, place, *HELD[kind])
        taken = attributes(held)
        if saved is not None:
            taken.restore(saved)
        for _ in range(count):
            step()
        return taken, value

    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        first, _ = stepped(one)
        told = plain_values.to_bytes(first.changed())
        _, got = stepped(two, plain_values.from_bytes(told))
        _, expected = stepped(one + two)
    np.testing.assert_array_equal(found_in(got()), found_in(expected()))


@hypothesis.settings(max_examples=40, deadline=None, database=None)
@hypothesis.given(*drawn_kinds(LOST))
def test_values_that_cannot_be_given_back_are_named(kind, place, parent):
    hypothesis.assume(place != "of_class" or kind in ("a text", "a type"))
    held, step, _ = holding(parent, place, *LOST[kind])

    def train():
        taken = attributes(held)
        for _ in range(2):
            taken.begin_epoch()
            step()
        taken.restore(taken.changed())

    with pytest.warns(kc.ConfluxWarning, match=f"{place}'"):
        train()


class Pair(keras.callbacks.Callback):
    """Has two attributes, which may hold the same object."""

    def __init__(self, one, other):
        super().__init__()
        self.one, self.other = one, other
        self.steps = 0

    def grow(self, change):
        self.steps += 1
        if self.steps == 2:
            change(self)
        if isinstance(self.one, list):
            self.one.append(self.steps)
        else:
            self.one += self.steps


def nothing(pair):
    pass


def join(pair):
    pair.other = pair.one


def part(pair):
    pair.other = pair.one.copy()


def move(pair):
    pair.other = pair.one[:1]


def swap(pair):
    pair.one, pair.other = pair.other, pair.one


def arrays():
    return np.zeros(2), np.ones(2)


def same_arrays():
    return arrays()[:1] * 2


def lists():
    return [0], [1]


def views():
    buffer = np.zeros(3)
    return buffer, buffer[1:]


def same_lists():
    return lists()[:1] * 2


@pytest.mark.parametrize(
    "begin", [arrays, same_arrays, views, lists, same_lists]
)
@pytest.mark.parametrize("change", [nothing, join, part, swap, move])
def test_names_of_one_object(begin, change):
    """They are given one object again, and others if they have parted.

    An array that became a view of another one is named.
    """
    may_be_named = change is move or (begin, change) == (views, swap)

    def grown(count, saved=None):
        pair = Pair(*begin())
        held = HeldAttributes(pair)
        if saved is not None:
            held.restore(plain_values.from_bytes(saved))
        for _ in range(count):
            pair.grow(change)
        return pair, held

    for one, two in itertools.product(range(4), range(3)):
        _, held = grown(one)
        with warnings.catch_warnings(record=True) as named:
            warnings.simplefilter("always")
            saved = plain_values.to_bytes(held.changed())
        if not (named and may_be_named):
            assert not named
            found, _ = grown(two, saved)
            expected, _ = grown(one + two)
            np.testing.assert_equal(vars(found), vars(expected))


class Telling(keras.callbacks.Callback):
    state = None

    def __init__(self):
        super().__init__()
        self.told = {"constant": 3, "seen": 0}

    def on_train_batch_end(self, batch, logs=None):
        self.told["seen"] += 1

    def state_dict(self):
        return self.told

    def load_state_dict(self, state):
        self.told = {"constant": state["constant"], "seen": state["seen"]}


def test_all_that_a_callback_tells(tmp_path):
    callback, undisturbed = resumed(tmp_path, Telling)
    assert callback.told == undisturbed.told

    wrong = Telling()
    wrong.told["seen"] = np.random.default_rng(3)
    with pytest.raises(TypeError, match=r"Telling.*'seen'.* a Generator"):
        linear(kc.Resume(tmp_path / "wrong"), wrong)


def test_large_arrays_are_not_copied():
    callback = keras.callbacks.Callback()
    callback.samples = [np.zeros(2**23, "uint8")]
    tracemalloc.start()
    states = CallbackStates([callback])
    states.changed()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**22
    callback.samples[0][7] = 1
    ((_, values),) = states.changed()
    (found,) = values["samples"]
    assert found[7] == 1
    assert not np.shares_memory(found, callback.samples[0])


def test_a_log_goes_on_in_its_file(tmp_path):
    path = tmp_path / "log.csv"
    resumed(tmp_path, lambda: keras.callbacks.CSVLogger(path))
    rows = [row.partition(",")[0] for row in path.read_text().splitlines()]
    # Those of an epoch that is trained again come twice.
    assert [*dict.fromkeys(rows)] == ["epoch", "0", "1"]
