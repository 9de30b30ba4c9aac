"""Checkpoints in a directory that is named by a URL.

`memory://` belongs to this process, and `file://` to all. Both are treated like
a bucket: nothing is renamed, and nothing is locked.
"""

import json
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from test_resume import Kill
from test_resume import Killed
from test_resume import linear
from test_run import COMMAND
from upath import UPath

import keras_conflux as kc
from keras_conflux._extensions.resume import fit as resumed_fit
from keras_conflux._extensions.resume import storage

pytestmark = pytest.mark.usefixtures("deterministic")
FILES = {"model.weights.h5", "state.npz", "state.json"}


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """An empty directory."""
    yield f"{request.param}://{tmp_path}/run"
    UPath("memory://").fs.store.clear()


def train(url, after=None, epochs=3, keep=2):
    """Runs a script; returns its weights."""
    resumed_fit.ended_here.clear()  # as in a process of its own
    resume = kc.Resume(url, every=1, keep=keep)
    return linear(Kill(after), resume, epochs=epochs).get_weights()


def killed(url, after=7):
    with pytest.raises(Killed):
        train(url, after)


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_training_goes_on(url, tmp_path):
    killed(UPath(url))
    found = kc.checkpoints(url)
    assert [each.damage for each in found] == [None, None]  # two are kept
    assert found[0].step > found[1].step
    assert found[0].size > 1000
    assert {each.name for each in found[0].path.iterdir()} == FILES
    assert_equal(train(url), train(tmp_path / "here"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", sorted(FILES))
def test_damage_is_named_and_the_one_before_is_used(url, name):
    expected = train(f"{url}-whole")
    killed(url)
    last, before = kc.checkpoints(url)
    (last.path / name).write_bytes((last.path / name).read_bytes()[:-7])
    assert name in kc.checkpoints(url)[0].damage
    with pytest.warns(kc.ConfluxWarning, match=rf"{name}.*one before it"):
        killed(url, after=0)
    assert [each.path for each in kc.checkpoints(url)] == [before.path]
    assert_equal(train(url), expected)


@pytest.mark.sampled(2)
def test_dying_while_files_are_put(url, monkeypatch):
    expected = train(f"{url}-whole")
    copy = storage._copy
    for count in range(4):
        left = iter(range(9 + count))  # of three files each

        with monkeypatch.context() as patched:

            def copy_some(*paths, left=left, patched=patched):
                if next(left, None) is None:
                    # As if the process had died: nothing is cleaned up.
                    patched.setattr(storage, "_remove_files", stay)
                    raise Died
                copy(*paths)

            patched.setattr(storage, "_copy", copy_some)
            with pytest.raises(Died):
                train(f"{url}{count}")
        found = kc.checkpoints(f"{url}{count}")
        assert found
        assert not any(each.damage for each in found)
        assert_equal(train(f"{url}{count}"), expected)
        names = [each.name for each in UPath(f"{url}{count}").iterdir()]
        assert len([each for each in names if each.startswith("step")]) == 2


class Died(BaseException):
    pass


def stay(*_):
    pass


class NoRoute(Exception):
    """Not an `OSError`, as those of file systems may be."""


def fail(*_, **__):
    raise NoRoute("no route")


def test_a_network_that_fails_does_not_end_training(url, monkeypatch):
    monkeypatch.setattr(storage, "_copy", fail)
    with pytest.warns(kc.ConfluxWarning, match="NoRoute: no route"):
        train(url)
    assert kc.checkpoints(url) == []


def test_what_cannot_be_listed_is_not_empty(url, monkeypatch):
    killed(url)
    files = UPath(url).fs
    with monkeypatch.context() as patched:
        patched.setattr(type(files), "ls", fail)
        for use in (kc.checkpoints, train):
            with pytest.raises(OSError, match="NoRoute: no route"):
                use(url)
    assert [each.damage for each in kc.checkpoints(url)] == [None, None]


def test_what_is_replaced_stays_until_the_new_one_is_there(url, monkeypatch):
    model, copy = linear(), storage._copy
    kc.save(model, url, step=3, state=1)

    def fail_at_last(source, target):
        if source.name == "state.json":
            fail()
        copy(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(storage, "_copy", fail_at_last)
        model.set_weights([weight + 1 for weight in model.get_weights()])
        with pytest.raises(OSError, match="NoRoute"):
            kc.save(model, url, step=3, state=2)
    assert kc.load(linear(), url).state == 1
    kc.save(model, url, step=3, state=2)
    other = linear()
    assert kc.load(other, url).state == 2
    assert_equal(other.get_weights(), model.get_weights())
    (found,) = kc.checkpoints(url)
    assert len([*found.path.iterdir()]) == 3


def test_files_of_others_stay(url):
    model = linear()
    kc.save(model, url, step=1)
    (first,) = (each.path for each in kc.checkpoints(url))
    # The last is a folder that lacks the file with the digests.
    others = first / "notes.txt", UPath(url) / "step-000000000002-000000" / "a"
    others[1].parent.mkdir()
    for path in others:
        path.write_text("mine")
    for step in (1, 3, 4):
        kc.save(model, url, step=step, keep=1)
    assert [each.step for each in kc.checkpoints(url)] == [4]
    assert [path.read_text() for path in others] == ["mine", "mine"]


def test_an_old_one_that_cannot_be_removed_is_told(url, monkeypatch):
    monkeypatch.setattr(type(UPath(url).fs), "rm_file", fail)
    with pytest.warns(kc.ConfluxWarning, match="older checkpoint could not"):
        train(url)
    assert len(kc.checkpoints(url)) > 2


def test_a_directory_that_is_emptied(url):
    class Emptying(Kill):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                time.sleep(0.5)  # a checkpoint may be under way
                UPath(url).fs.rm(UPath(url).path, recursive=True)

    with warnings.catch_warnings():
        warnings.simplefilter("error", kc.ConfluxWarning)
        linear(Emptying(), kc.Resume(url, every=1), epochs=3)
    assert [each.damage for each in kc.checkpoints(url)] == [None, None]


@pytest.mark.parametrize("name", ["memory:///", "file:///", "a::gs://b/c"])
def test_a_url_of_no_directory(name):
    with pytest.raises(ValueError, match="the URL of a directory"):
        kc.Resume(name)


def test_the_first_of_two_trainings_is_told(url):
    resume = kc.Resume(url, every=1)

    class Other(Kill):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                with storage.storage_of(resume.directory).locked():
                    pass

    with pytest.raises(RuntimeError, match="Another training has begun"):
        linear(Other(), resume, epochs=3)


def test_a_training_that_is_overtaken_while_it_puts_files(url, monkeypatch):
    resume, copy = kc.Resume(url, every=1), storage._copy

    def overtaken(source, target):
        copy(source, target)
        with storage.storage_of(resume.directory).locked():
            pass

    monkeypatch.setattr(storage, "_copy", overtaken)
    with pytest.raises(RuntimeError, match="Another training has begun"):
        linear(resume)
    assert kc.checkpoints(url) == []


def test_a_loop_of_ones_own(url):
    model = linear()
    kc.save(model, url, step=3, state={"best": 0.5})
    kc.save(model, url, step=3, state={"best": 0.25})  # again
    expected = model.get_weights()
    other = linear()
    other.set_weights([weight + 1 for weight in expected])
    assert kc.load(other, url).state == {"best": 0.25}
    assert_equal(other.get_weights(), expected)


def test_the_command_lists_them(tmp_path):
    url = f"file://{tmp_path}/run"
    killed(url)
    command = [sys.executable, COMMAND, "resume", url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert [each["damage"] for each in found] == [None, None]
    assert found[0]["path"].startswith(url)
    done = subprocess.run([*command[:3], "a::gs://b"], capture_output=True)
    assert done.returncode == 2
    assert b"the URL of a directory" in done.stderr
