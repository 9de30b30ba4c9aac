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
import shutil
import socket
import warnings
import zipfile

import h5py
import keras
import numpy as np
import pytest
from alarms import limited

import keras_conflux as kc
from keras_conflux._extensions.resume.callback_files import CallbackFiles

WEIGHTS, ARRAYS, STATE = "model.weights.h5", "state.npz", "state.json"
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


def in_time():
    return limited(SECONDS, AssertionError)


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
    """Asserts that the newest is named and put aside, and nothing hurt."""
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
@pytest.mark.parametrize("name", [WEIGHTS, ARRAYS, STATE])
def test_other_things_in_place_of_files(model, runs, tmp_path, name, kind):
    kind(newest(runs) / name, tmp_path)
    assert_older_is_used(model, runs, tmp_path, name)


def told(runs, **changed):
    """Changes what a checkpoint tells, with digests that are right."""
    path = newest(runs) / STATE
    outer = json.loads(path.read_text()) | changed
    outer["sha256"] = hashlib.sha256(str(outer["state"]).encode()).hexdigest()
    for name in outer["files"]:
        with contextlib.suppress(OSError, ValueError):
            if (path.parent / name).is_file():
                content = (path.parent / name).read_bytes()
                outer["files"][name] = hashlib.sha256(content).hexdigest()
    path.write_text(json.dumps(outer))


NAMES = "/dev/zero", "../outside/x", "/", ".", "..", "", "a/b", "a\0b", "\\x"


@pytest.mark.parametrize("which", ["weights", "arrays"])
@pytest.mark.parametrize(
    "name",
    [*NAMES, 5, None, ["x"], {}, "x" * 5000],
    ids=repr,
)
def test_names_that_are_no_files_of_the_folder(
    model, runs, tmp_path, which, name
):
    other = outside(tmp_path / "x", tmp_path)
    kept = WEIGHTS if which == "weights" else ARRAYS
    shutil.copy(newest(runs) / kept, other)
    files = {WEIGHTS: "", ARRAYS: ""}
    if isinstance(name, str):
        files[name] = hashlib.sha256(other.read_bytes()).hexdigest()
    told(runs, files=files, **{which: name})
    assert_older_is_used(model, runs, tmp_path, "cannot be read")


@pytest.mark.parametrize(
    "changed",
    [
        {"files": None},
        {"files": {}},
        {"files": 5},
        {"format": "x"},
        {"format": float("inf")},
        {"format": None},
        {"dtypes": {"variable0": "finfo"}},
        {"dtypes": 5},
        {"state": "[" * 10**5},
        {"state": "[1]"},
        {"state": "5"},
        {"state": 5},
    ],
    ids=lambda changed: str(changed)[:30],
)
def test_what_is_told_makes_no_sense(model, runs, tmp_path, changed):
    path = newest(runs) / STATE
    if "state" in changed or changed.get("files", ...) is not ...:
        outer = json.loads(path.read_text()) | changed
        text = str(outer["state"]).encode()
        outer["sha256"] = hashlib.sha256(text).hexdigest()
        path.write_text(json.dumps(outer))
    else:
        told(runs, **changed)
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
    "no array": packed(**{"variable0": b"x"}),
    "one array": header((2,)) + bytes(8),
    "pickled": packed(**{"variable0.npy": b"\x93NUMPY\1\0v\0{'descr': 'O'"}),
}


@pytest.mark.parametrize("kind", ARRAY_FILES)
def test_files_of_arrays_that_are_not_ours(model, runs, tmp_path, kind):
    (newest(runs) / ARRAYS).write_bytes(ARRAY_FILES[kind])
    told(runs)
    assert_older_is_used(model, runs, tmp_path, ARRAYS)


def test_arrays_that_the_model_does_not_have(model, runs):
    path = newest(runs) / ARRAYS
    with np.load(path) as found:
        arrays = dict(found)
    for changed in (arrays | {"variable0": np.zeros(10**6)}, {}):
        np.savez(path, **changed)
        told(runs)
        with in_time(), pytest.raises(ValueError, match="does not write such"):
            kc.load(model, runs)


def test_weights_that_unpack_to_more_than_the_model(model, runs, tmp_path):
    path = newest(runs) / WEIGHTS
    with h5py.File(path, "a") as file:
        size = 2**40
        file.create_dataset("more", (size,), "f4", chunks=True, fillvalue=1)
    told(runs)
    assert path.stat().st_size < 2**24
    with in_time(), pytest.raises(ValueError, match=f"unpack to {size + 26}"):
        kc.load(model, runs)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", [".lock", ".files.json", ".unfinished"])
def test_files_beside_checkpoints(model, runs, tmp_path, name, kind):
    place = runs
    if name == ".unfinished":
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
        if name == ".lock" and kind not in (empty, gone):
            refused = pytest.raises(OSError, match=re.escape(str(runs)))
        with refused:
            model.fit(x, x[:, :2], verbose=0, callbacks=[resume, log])
    after = [*map(changes, (each.lstat() for each in other.glob("*")))]
    assert before == after


@pytest.mark.parametrize("name", ["../../mine", "/{}/mine", "train/../../mine"])
@pytest.mark.parametrize("index", [0, 1, -1, "0"])
def test_files_of_callbacks_are_theirs(tmp_path, index, name):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    name = name.format(tmp_path)
    runs = tmp_path / "runs"
    runs.mkdir()
    nothing = hashlib.sha256(b"").hexdigest()
    written = dict(callback=index, name=name, length=0, end=nothing)
    journal = {"began": [written], "events": [[index, name]]}
    (runs / ".files.json").write_text(json.dumps(journal))
    callbacks = [
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.TensorBoard(tmp_path / "a" / "tb"),
    ]
    CallbackFiles(callbacks, runs).begin_anew()
    (runs / ".files.json").write_text(json.dumps(journal))
    CallbackFiles(callbacks, runs).go_on([written], over=False)
    assert mine.read_text() == "mine"


def test_an_event_file_that_is_a_link_is_not_cut(tmp_path):
    mine = tmp_path / "mine"
    mine.write_text("mine")
    train = tmp_path / "tb" / "train"
    train.mkdir(parents=True)
    (train / "events.tfevents.1").symlink_to(mine)
    nothing = hashlib.sha256(b"").hexdigest()
    name = "train/events.tfevents.1"
    written = dict(callback=0, name=name, length=0, end=nothing)
    board = keras.callbacks.TensorBoard(tmp_path / "tb")
    (tmp_path / "runs").mkdir()
    CallbackFiles([board], tmp_path / "runs").go_on([written], over=False)
    assert mine.read_text() == "mine"
