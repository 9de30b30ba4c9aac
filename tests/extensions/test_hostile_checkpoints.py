"""A directory of checkpoints that others have filled hurts nobody.

Each kind of file is put in the place of each file of a checkpoint, and each
thing that a file can tell is told wrongly, with the digests that belong to it.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import resource
import shutil
import socket
import warnings
import zipfile

import h5py
import hypothesis
import hypothesis.strategies as st
import keras
import numpy as np
import pytest
from alarms import limited
from conftest import RUN_LONG_TESTS

import keras_conflux as kc
from keras_conflux._extensions.resume import fit as resumed_fit
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume import stored_arrays
from keras_conflux._extensions.resume.compat import compiled_parts
from keras_conflux._extensions.resume.held_attributes import HeldAttributes

WEIGHTS, STATE = "model.weights.h5", "state.npz"
SECONDS = 20


def built():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return kc.replicate(model, devices=1)


@pytest.fixture(scope="module")
def model():
    return built()


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Returns a directory with two checkpoints."""
    directory = tmp_path_factory.mktemp("made")
    for step in (1, 2):
        kc.save(model, directory, step=step, state={"step": step})
    return directory


@pytest.fixture
def runs(made, tmp_path):
    return shutil.copytree(made, tmp_path / "runs")


def newest(runs):
    return max(runs.glob("step-*"))


class TakesTooLong(BaseException):
    """Is no error that a checkpoint may lead to."""


def in_time():
    return limited(SECONDS, TakesTooLong)


def outside(path, tmp_path):
    """Returns where a file is that was taken away, and where others are."""
    folder = tmp_path / "outside"
    folder.mkdir(exist_ok=True)
    return folder / path.name


def link(path, tmp_path):
    path.symlink_to(path.rename(outside(path, tmp_path)))


def dangling(path, tmp_path):
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")


def zeros(path, tmp_path):
    path.unlink()
    path.symlink_to("/dev/zero")


def fifo(path, tmp_path):
    path.unlink()
    os.mkfifo(path)


def endless(path, tmp_path):
    """A link to a pipe that nobody writes to."""
    path.unlink()
    os.mkfifo(outside(path, tmp_path))
    path.symlink_to(outside(path, tmp_path))


def listening(path, tmp_path):
    path.unlink()
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)


def folder(path, tmp_path):
    path.unlink()
    path.mkdir()


def loop(path, tmp_path):
    path.unlink()
    path.symlink_to(path.name)


def empty(path, tmp_path):
    path.write_bytes(b"")


def noise(path, tmp_path):
    path.write_bytes(np.random.default_rng(1).bytes(10_000))


def brackets(path, tmp_path):
    path.write_text("[" * 10**6)


def large(path, tmp_path):
    with open(path, "wb") as file:
        file.truncate(2**28 + 1)


def gone(path, tmp_path):
    path.unlink()


KINDS = [link, dangling, zeros, fifo, endless, listening, folder, loop]
KINDS += [empty, noise, brackets, large, gone]


def assert_older_is_used(model, runs, tmp_path, named):
    """Asserts that the newest is named, and nothing hurt."""
    other = tmp_path / "outside"
    before = {each.name: each.lstat() for each in other.glob("*")}
    path = newest(runs)
    with in_time():
        (first, _) = kc.checkpoints(runs)
        assert named in first.damage
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            assert kc.load(model, runs) == (1, {"step": 1})
    (text,) = {str(each.message) for each in told}
    assert str(path) in text
    assert named in text
    after = {each.name: each.lstat() for each in other.glob("*")}
    assert [*map(changes, before.values())] == [*map(changes, after.values())]


def changes(found):
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_mode


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [WEIGHTS, STATE])
def test_other_things_in_place_of_files(model, runs, tmp_path, name, kind):
    kind(newest(runs) / name, tmp_path)
    assert_older_is_used(model, runs, tmp_path, name)


def a_file(path, tmp_path):
    path.rmdir()
    path.write_text("x")


def a_pipe(path, tmp_path):
    path.rmdir()
    os.mkfifo(path)


def a_link_to_another(path, tmp_path):
    path.rmdir()
    shutil.copytree(newest(path.parent), outside(path, tmp_path))
    path.symlink_to(outside(path, tmp_path))


def a_link_to_itself(path, tmp_path):
    path.rmdir()
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    "kind", [a_file, a_pipe, a_link_to_another, a_link_to_itself]
)
def test_other_things_in_place_of_folders(model, runs, tmp_path, kind):
    shutil.rmtree(newest(runs))
    path = runs / "step-000000000009-000000"
    path.mkdir()
    kind(path, tmp_path)
    named = "it is a link" if path.is_symlink() else "cannot be read"
    assert_older_is_used(model, runs, tmp_path, named)


def state_of(runs):
    """Returns what a checkpoint tells, and its arrays."""
    with open(newest(runs) / STATE, "rb") as file:
        return stored_arrays.read(file)


def tell(runs, state, arrays):
    """Changes what a checkpoint tells, with a digest that is right."""
    path = newest(runs)
    if isinstance(state, dict):
        content = (path / WEIGHTS).read_bytes()
        state |= {"digest": hashlib.sha256(content).hexdigest()}
    stored_arrays.write(path / STATE, state, arrays)


@pytest.mark.parametrize("changed", [None, 5, "5", [1], {}, {"format": 4}])
def test_what_is_told_makes_no_sense(model, runs, tmp_path, changed):
    stored_arrays.write(newest(runs) / STATE, changed, {})
    assert_older_is_used(model, runs, tmp_path, "cannot be read")


@pytest.mark.parametrize("text", ["[" * 10**5, "", "5", "[{}]", ["[]", "[]"]])
def test_a_text_that_is_no_document(model, runs, tmp_path, text):
    np.savez(newest(runs) / STATE, text=np.array(text))
    assert_older_is_used(model, runs, tmp_path, "cannot be read")


def packed(how=zipfile.ZIP_STORED, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", how) as written:
        for name, content in members.items():
            written.writestr(name, content)
    return file.getvalue()


def header(shape):
    file = io.BytesIO()
    described = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, described)
    return file.getvalue()


def overlapping():
    """Entries of a directory that mean the same bytes, a thousand times."""
    one = bytearray(packed(**{"a.npy": header((250,)) + bytes(1000)}))
    begin = one.index(b"PK\1\2")
    end = one.index(b"PK\5\6")
    entry, last = one[begin:end], one[end:]
    last[8:12] = (1000).to_bytes(2, "little") * 2
    last[12:16] = (1000 * len(entry)).to_bytes(4, "little")
    return bytes(one[:begin] + entry * 1000 + last)


def encrypted():
    content = bytearray(packed(**{"variable0.npy": header((2,)) + bytes(8)}))
    for begin, flags in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        content[content.index(begin) + flags] |= 1
    return bytes(content)


BOMB = header((2**28,)) + bytes(2**24)
ARRAY_FILES = {
    "a bomb": packed(zipfile.ZIP_DEFLATED, **{"variable0.npy": BOMB}),
    "overlapping": overlapping(),
    "encrypted": encrypted(),
    "promises too much": packed(**{"variable0.npy": header((2**50,))}),
    "promises far too much": packed(**{"variable0.npy": header((2**62, 9))}),
    "no dtype": packed(**{"variable0:finfo.npy": header((2,)) + bytes(8)}),
    "no array": packed(**{"variable0": b"x"}),
    "one array": header((2,)) + bytes(8),
    "pickled": packed(**{"variable0.npy": b"\x93NUMPY\1\0v\0{'descr': 'O'"}),
}


@pytest.mark.parametrize("kind", ARRAY_FILES)
def test_files_of_arrays_that_are_not_ours(model, runs, tmp_path, kind):
    (newest(runs) / STATE).write_bytes(ARRAY_FILES[kind])
    assert_older_is_used(model, runs, tmp_path, STATE)


def test_arrays_that_the_model_does_not_have(model, runs, tmp_path):
    told, arrays = state_of(runs)
    tell(runs, told, dict.fromkeys(arrays, np.zeros(10**6)))
    with in_time(), pytest.raises(ValueError, match="does not write such"):
        kc.load(model, runs)
    tell(runs, told, {})
    assert_older_is_used(model, runs, tmp_path, "cannot be read")


def test_an_array_that_is_told_more_than_once(model, runs, tmp_path):
    told, arrays = state_of(runs)
    (name, *_) = arrays
    under(told["state"], "variables")[:] = [{"array": name}] * 2
    tell(runs, told, arrays)
    assert_older_is_used(model, runs, tmp_path, "cannot be read")


def of_numpy(name):
    return np.random.Generator(getattr(np.random, name)(1)).bit_generator.state


KEY = np.zeros(624, "uint32")
LEGACY = [
    ("MT19937", KEY, 2**30, 0, 0.0),
    ["MT19937", KEY, -1],
    (np.array(["MT19937"]), KEY, np.int64(625)),
]


@hypothesis.settings(max_examples=20, deadline=None, database=None)
@hypothesis.given(
    place=st.integers(-(2**31), 2**31 - 1).filter(lambda x: not 0 <= x <= 624),
    kind=st.sampled_from(["MT19937", "Philox", *LEGACY]),
    is_scalar=st.booleans(),
)
def test_generators_that_would_read_other_memory(place, kind, is_scalar):
    state = kind
    if isinstance(kind, str):
        state = of_numpy(kind)
        inner = state["state"] if kind == "MT19937" else state
        name = "pos" if kind == "MT19937" else "buffer_pos"
        inner[name] = np.int32(place) if is_scalar else place
    content = plain_values.to_bytes({"any": [plain_values.State(state)]})
    with pytest.raises(ValueError, match="generator"):
        plain_values.from_bytes(content)


@pytest.mark.parametrize("place", ["1", "text", np.array("1"), [1], None, 0.5])
def test_generators_whose_place_is_no_number(place):
    states = [("MT19937", KEY, place), {**of_numpy("Philox")}]
    states[1]["buffer_pos"] = place
    for state in states:
        content = plain_values.to_bytes({"any": state})
        with pytest.raises(ValueError, match="generator is at"):
            plain_values.from_bytes(content)


def test_a_text_is_no_number():
    for held in (0, 0.5, None, [1]):
        for text in ("a/b", np.array("a/b"), np.str_("word"), b"a"):
            assert not plain_values.Form(held).admits(text)


def test_a_generator_keeps_the_size_of_its_pool():
    def held(generator):
        callback = keras.callbacks.Callback()
        callback.random = generator
        return HeldAttributes(callback, plain_values.mark)

    here, there = (np.random.default_rng(1) for _ in range(2))
    before = held(there)
    there.random()
    saved = before.changed()
    saved["random"].value[1]["pool_size"] = 300_000_000
    with in_time():
        held(here).restore(saved)
    assert here.random() == there.random()


def test_metrics_for_more_labels_than_the_model_has():
    model = built()
    sizes = [f"float32 None {n}" for n in (2**16, 2**16 + 1)]
    model.compile("sgd", "mse", metrics=[keras.metrics.AUC(multi_label=True)])
    compiled_parts.build(model, {"_compile_loss": json.dumps(sizes[:1] * 2)})
    with in_time(), pytest.raises(ValueError, match="a metric for the shape"):
        compiled_parts.build(
            model, {"_compile_metrics": json.dumps(sizes[1:] * 2)}
        )


def test_generators_of_numpy_are_read():
    for name in ("MT19937", "Philox", "PCG64", "PCG64DXSM", "SFC64"):
        plain_values.from_bytes(plain_values.to_bytes(of_numpy(name)))
    for state in (np.random.get_state(), {"bit_generator": of_numpy("SFC64")}):
        plain_values.from_bytes(plain_values.to_bytes(state))


def test_weights_that_unpack_to_more_than_the_model(model, runs, tmp_path):
    path = newest(runs) / WEIGHTS
    with h5py.File(path, "a") as file:
        size = 2**40
        file.create_dataset("more", (size,), "f4", chunks=True, fillvalue=1)
    tell(runs, *state_of(runs))
    assert path.stat().st_size < 2**24
    with (
        in_time(),
        pytest.raises(ValueError, match=f"unpack to {4 * size + 108}"),
    ):
        kc.load(model, runs)


HUGE = {
    "text": "S40000000",
    "axes": np.dtype(("f4", (40_000_000,))),
    "fields": np.dtype([("a", "f4", (40_000_000,))]),
    "any length": h5py.vlen_dtype("f4"),
    "references": h5py.ref_dtype,
}


@pytest.mark.parametrize("kind", HUGE)
def test_weights_that_are_no_numbers(model, runs, kind):
    path = newest(runs) / WEIGHTS
    with h5py.File(path, "a") as file:
        del file["layers/dense/vars/0"]
        file.create_dataset(
            "layers/dense/vars/0", (3, 2), HUGE[kind], chunks=True
        )
    tell(runs, *state_of(runs))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with in_time(), pytest.raises(ValueError, match="under 'layers/dense/v"):
        kc.load(model, runs)
    now = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert now - before < 2**16  # kilobytes


NO_LOCKS = [link, dangling, zeros, endless, listening, folder, loop]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [".lock", STATE])
def test_files_beside_checkpoints(model, runs, tmp_path, name, kind):
    place = runs
    if name == STATE:
        place = runs / ".step-000000000009-000000"
        place.mkdir()
    (place / name).write_text("1 on host")
    kind(place / name, tmp_path)
    other = tmp_path / "outside"
    before = [*map(changes, (each.lstat() for each in other.glob("*")))]
    x = np.ones((4, 3), "float32")
    resume = kc.Resume(runs, signals=())
    log = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    for path in runs.glob("step-*"):
        shutil.rmtree(path)
    with in_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused = contextlib.nullcontext()
        if name == ".lock" and kind in NO_LOCKS:
            refused = pytest.raises(OSError, match=re.escape(str(runs)))
        with refused:
            model.fit(x, x[:, :2], verbose=0, callbacks=[resume, log])
    after = [*map(changes, (each.lstat() for each in other.glob("*")))]
    assert before == after


class Keeps(keras.callbacks.Callback):
    """Appends to a file, and removes those that are too old."""

    def __init__(self, folder):
        super().__init__()
        self.path = str(folder / "log.txt")
        self.nowhere = None
        self.kept = []
        self.seen = 0

    def on_epoch_end(self, epoch, logs=None):
        self.seen += 1
        for each in (self.path, self.nowhere, *self.kept):
            if each is not None:
                with open(each, "a") as file:
                    file.write("x")


class Reads(keras.utils.PyDataset):
    def __init__(self, folder):
        super().__init__()
        self.paths = [str(folder / f"{i}.npy") for i in range(4)]

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        OPENED.add(self.paths[index])
        return np.load(self.paths[index]), np.ones((2, 2))

    def on_epoch_end(self):
        self.paths.append(self.paths.pop(0))


OPENED = set()


class SecondEpoch(keras.callbacks.Callback):
    """Leaves the training in its second epoch, if it is asked for two."""

    epochs = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.epochs += batch == 0
        if (self.epochs, self.params["epochs"], batch) == (2, 2, 2):
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def trainings(model, tmp_path_factory):
    """Returns what trains in a folder, with its callbacks and data."""
    folder = tmp_path_factory.mktemp("training")
    for index in range(4):
        np.save(folder / f"{index}.npy", np.full((2, 3), index, "float32"))

    def train(runs, epochs):
        resumed_fit.ended_here.clear()
        held = [
            Keeps(folder),
            keras.callbacks.ModelCheckpoint(folder / "mine.weights.h5"),
            keras.callbacks.CSVLogger(folder / "log.csv"),
            keras.callbacks.EarlyStopping("loss"),
            Reads(folder),
        ]
        resume = kc.Resume(runs, every=1, signals=())
        called = [*held[:-1], SecondEpoch(), resume]
        try:
            model.fit(held[-1], epochs=epochs, verbose=0, callbacks=called)
        finally:
            train.held = held

    train.folder = folder
    return train


@pytest.fixture(scope="module")
def interrupted(trainings, tmp_path_factory):
    """Returns a directory of a training that was left in its second epoch."""
    runs = tmp_path_factory.mktemp("interrupted") / "runs"
    with pytest.raises(KeyboardInterrupt):
        trainings(runs, 2)
    again = shutil.copytree(runs, runs.with_name("again"))
    trainings(again, 3)
    trainings.held_honestly = [dict(vars(each)) for each in trainings.held]
    return runs


def places(value, path=()):
    """Yields where values are in what JSON has given."""
    yield path
    items = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        items = enumerate(value)
    for key, each in items:
        yield from places(each, (*path, key))


def under(encoded, name):
    """Returns what a dict in JSON has under a name."""
    return dict(encoded["dict"])[name]


VICTIM = "{folder}/precious"
VALUES = [None, True, -1, 0, 1e300, 2**70, VICTIM, [], {}, [VICTIM], {"x": 1}]
VALUES += [[[VICTIM]], {"dict": [["path", VICTIM]]}, {"tuple": []}]
VALUES += [{"array": "value0"}, {"deque": [[VICTIM], 3]}]
ATTRIBUTES = ["path", "nowhere", "kept", "paths", "filepath", "filename"]
ATTRIBUTES += ["_train_dir", "new", "on_epoch_end", "__class__", "seen"]


def altered(state, path, value, attribute):
    """Changes a field, or gives an object one more attribute."""
    *path, last = path
    for key in path:
        state = state[key]
    if isinstance(state[last], dict) and "dict" in state[last]:
        state[last]["dict"].append([attribute, value])
    else:
        state[last] = value


def assert_nothing_else_changes(trainings, interrupted, folder, change):
    precious = folder / "precious"
    precious.write_text("mine")
    np.save(folder / "precious.npy", np.ones((2, 3)))
    runs = shutil.copytree(interrupted, folder / "runs")
    state, arrays = state_of(runs)
    change(state)
    state = json.loads(json.dumps(state).replace("{folder}", str(folder)))
    tell(runs, state, arrays)
    OPENED.clear()
    with in_time(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception):  # the load may fail
            trainings(runs, 3)
    assert precious.read_text() == "mine"
    assert {os.path.dirname(each) for each in OPENED} <= {str(trainings.folder)}
    for held, honestly in zip(
        trainings.held, trainings.held_honestly, strict=True
    ):
        assert vars(held).keys() <= honestly.keys()
        for name, value in vars(held).items():
            if isinstance(value, str):
                assert value == honestly[name]


@hypothesis.settings(
    max_examples=200 if RUN_LONG_TESTS else 20, deadline=None, database=None
)
@hypothesis.given(data=st.data())
def test_any_field_of_any_value(trainings, interrupted, tmp_path_factory, data):
    def change(state):
        where = data.draw(st.sampled_from([*places(state)][1:]), "place")
        value = data.draw(st.sampled_from(VALUES), "value")
        altered(state, where, value, data.draw(st.sampled_from(ATTRIBUTES)))

    folder = tmp_path_factory.mktemp("drawn")
    assert_nothing_else_changes(trainings, interrupted, folder, change)


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_paths_and_new_attributes(trainings, interrupted, tmp_path, name):
    def change(told):
        (part,) = under(told["state"], "parts")
        data = under(under(part, "place"), "attributes")
        callbacks = under(told["state"], "callbacks")
        for values in [data, *(each[1] for each in callbacks)]:
            value = [VICTIM] if name in ("kept", "paths") else VICTIM
            values["dict"].append([name, value])

    assert_nothing_else_changes(trainings, interrupted, tmp_path, change)
