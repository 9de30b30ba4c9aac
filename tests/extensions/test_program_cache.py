"""What XLA has compiled is kept on disk and found by the next process.

Trainings run in processes of their own, as TensorFlow reads its flags once, and
on a CPU with one replica, as XLA has no collectives for several.
"""

import contextlib
import errno
import json
import logging
import os
import pathlib
import shutil
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from keras_conflux._extensions.program_cache import cache as program_cache
from keras_conflux._extensions.program_cache import environment
from keras_conflux._extensions.program_cache import exchange_folder
from keras_conflux._extensions.program_cache import folders
from keras_conflux._extensions.program_cache import setup
from keras_conflux._extensions.program_cache import store
from keras_conflux._extensions.program_cache.cache import ProgramCache
from keras_conflux._extensions.program_cache.cached_program import CachedProgram
from keras_conflux._extensions.program_cache.exchange_folder import (
    ExchangeFolder,
)
from keras_conflux._extensions.program_cache.folders import CacheUnavailable
from keras_conflux._extensions.program_cache.store import Store
from keras_conflux._fit.execution.traced_program import Purpose

SCRIPT = pathlib.Path(__file__).parents[1] / "cached_training.py"


def start(
    cache: pathlib.Path, *trainings: dict, stderr: int | None = None
) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *map(json.dumps, trainings)],
        env={
            **os.environ,
            "KERAS_CONFLUX_CACHE": str(cache),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def result(process: subprocess.Popen) -> list[dict]:
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    found = json.loads(output.splitlines()[-1])
    assert found["flags"] == []  # children get none
    return found["trainings"]


def run(cache: pathlib.Path, *trainings: dict) -> list[dict]:
    return result(start(cache, *trainings))


def programs(cache: pathlib.Path) -> list[pathlib.Path]:
    return sorted(cache.glob("keras_conflux/xla-*/programs/*/*"))


NAMES = "first", "second", "third"


@pytest.fixture(scope="module")
def two_at_once(tmp_path_factory):
    """A cache that two processes have filled at once, and what they tell."""
    cache = tmp_path_factory.mktemp("two_at_once") / "cache"
    trainings = [{"name": each} for each in NAMES]
    both = [start(cache, *trainings) for _ in range(2)]
    return cache, *map(result, both)


@pytest.mark.long
def test_the_next_process_finds_what_two_have_compiled(two_at_once, tmp_path):
    filled, first, second = two_at_once
    (own,) = filled.iterdir()
    assert own.stat().st_mode & 0o777 == 0o700  # nobody else gets inside
    for compiled in (*first, *second):
        assert not compiled["warnings"]
        assert compiled["steps"] == 4
        # The one that comes later may find what the other has left.
        assert "XLA has compiled 1 program, kept in" in compiled["log"][0] or (
            "was loaded from" in compiled["log"][0]
        )
    assert len(programs(filled)) == len(NAMES)

    # With the same name, another model is not taken for it.
    cache = shutil.copytree(filled, tmp_path / "cache")
    name = {"name": NAMES[0]}
    same, wider = run(cache, name | {"others": 5}, name | {"units": 9})
    assert "compiled in an earlier start was loaded" in same["log"][0]
    assert same["losses"] == first[0]["losses"] == second[0]["losses"]
    assert same["steps"] == 4
    assert "has compiled 1 program" in wider["log"][0]
    assert len(programs(cache)) == len(NAMES) + 1


def rewrite(path: pathlib.Path, content: bytes) -> None:
    """Puts other content where it looks whole to this package."""
    path.unlink()
    name = path.name.rpartition(".")[0]
    path.with_name(store.stored_name(name, content)).write_bytes(content)


@pytest.mark.long
def test_damaged_files_are_compiled_again(two_at_once, tmp_path):
    filled, expected, _ = two_at_once
    cache = shutil.copytree(filled, tmp_path / "cache")
    cut, unreadable, _ = programs(cache)
    cut.write_bytes(cut.read_bytes()[:-100])
    # TensorFlow takes this for the end of the data.
    rewrite(unreadable, unreadable.read_bytes()[:-100])
    trainings = [{"name": each} for each in NAMES]
    process = start(cache, *trainings, stderr=subprocess.PIPE)
    _, said = process.communicate(timeout=200)
    assert process.returncode != 0
    assert "cannot be loaded, and was deleted. Start the program" in said

    *found, unwritten = run(
        cache, *trainings, {"name": "full", "file_bytes": 2000}
    )
    for compiled, before in zip(found, expected, strict=True):
        assert compiled["losses"] == before["losses"]
        assert compiled["steps"] == 4
        assert not compiled["warnings"]
    # Where TensorFlow cannot write, it would make that an error of the step.
    (warning,) = unwritten["warnings"]
    assert "runs as a plain graph" in warning
    assert "set TMPDIR to another folder" in warning
    assert unwritten["steps"] == 4
    assert len(programs(cache)) == 3


# Where it is kept


def unavailable(match: str):
    return pytest.raises(CacheUnavailable, match=match)


def test_where_the_user_wants_it(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    default = tmp_path / ".cache" / "keras_conflux"
    assert folders.chosen({}) == default
    assert folders.chosen({"XDG_CACHE_HOME": "relative"}) == default
    assert folders.chosen({"XDG_CACHE_HOME": "/x"}) == pathlib.Path(
        "/x/keras_conflux"
    )
    named = {"KERAS_CONFLUX_CACHE": "~/mine", "XDG_CACHE_HOME": "/x"}
    assert folders.chosen(named) == tmp_path / "mine" / "keras_conflux"
    with unavailable("KERAS_CONFLUX_CACHE is 0"):
        folders.chosen({"KERAS_CONFLUX_CACHE": "0"})


def test_a_folder_that_others_could_write_to_is_refused(tmp_path, monkeypatch):
    made = tmp_path / "some" / "folder"
    folders.make_private(made)
    assert made.stat().st_mode & 0o777 == 0o700
    made.chmod(0o720)
    with unavailable("chmod go-w"):
        folders.make_private(made)
    made.chmod(0o755)
    folders.make_private(made)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with unavailable("belongs to user"):
        folders.make_private(made)


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    file = tmp_path / "file"
    file.touch()
    with unavailable("File exists"):
        folders.make_private(file)
    with unavailable("file/folder: File exists"):
        folders.make_private(file / "folder")
    with unavailable("MiB free"):
        folders.assert_room(tmp_path, needed=2**60)
    with unavailable("No such file"):
        folders.assert_room(tmp_path / "missing")
    folders.assert_room(tmp_path, needed=0)
    assert os.listdir(tmp_path) == ["file"]


# What is kept


def source(tmp_path: pathlib.Path, name: str, content: bytes) -> pathlib.Path:
    path = tmp_path / name
    path.write_bytes(content)
    return path


def test_what_is_stored_is_whole(tmp_path):
    kept = Store(tmp_path / "store")
    assert kept.files("programs/1") == {}
    long = bytes(5000)
    kept.add("programs/1", source(tmp_path, "a.pb", b"one"))
    kept.add("programs/1", source(tmp_path, "a.pb", long + b"two"))
    kept.add("programs/1", source(tmp_path, "b.pb", long + b"three"))
    kept.add("programs/2", source(tmp_path, "c.pb", b"four"))
    found = kept.files("programs/1")
    assert {n: p.read_bytes() for n, p in found.items()} == {
        "a.pb": long + b"two",
        "b.pb": long + b"three",
    }
    for path in found.values():  # as on a disk that has lost its end
        path.write_bytes(path.read_bytes()[:-1])
    # A process that is writing, or was killed, leaves this.
    (tmp_path / "store" / "programs/1" / ".unfinished").write_bytes(b"f")
    assert kept.files("programs/1") == {}
    assert not found["a.pb"].exists()
    assert (tmp_path / "store" / "programs/1" / ".unfinished").exists()
    assert len(kept.files("programs/2")) == 1


def test_what_cannot_be_stored_leaves_nothing(tmp_path, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    kept = Store(tmp_path / "store")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        kept.add("programs", source(tmp_path, "a.pb", b"one"))
    assert os.listdir(tmp_path / "store" / "programs") == []


def test_the_oldest_files_are_deleted(tmp_path):
    kept = Store(tmp_path / "xla-1")
    for age, name in enumerate(["new", "old", "older", "oldest"]):
        kind = f"programs/{name}"
        kept.add(kind, source(tmp_path, "a.pb", bytes(100)))
        for path in kept.files(kind).values():
            os.utime(path, (time.time() - age * 1000,) * 2)
    assert store.size(tmp_path / "xla-1") == 400
    store.prune(tmp_path / "xla-1", limit=250)
    left = {p.parent.name for p in (tmp_path / "xla-1").rglob("a.pb.*")}
    assert left == {"new", "old"}
    kept.add("programs/new", source(tmp_path, "b.pb", bytes(100)))
    kept.keep_newest("programs/new", 1)
    assert set(kept.files("programs/new")) == {"b.pb"}


def test_what_was_never_finished_is_deleted_after_a_day(tmp_path):
    content = bytes(9000)
    for digits, age in ("recent", 0), ("old", 2 * DAY):
        name = f"{store._UNFINISHED}{digits}"
        path = source(tmp_path, name, content[:5000])  # and then killed
        os.utime(path, (time.time() - age,) * 2)
    store.prune(tmp_path)
    (left,) = os.listdir(tmp_path)
    assert left.endswith("recent")


def test_what_is_emptied_is_removed(tmp_path):
    kept = Store(tmp_path / "xla-0123456789abcdef")
    kept.add("programs/1", source(tmp_path, "a.pb", bytes(100)))
    store.prune(tmp_path, limit=0)
    assert not kept.folder.exists()
    kept.add("programs/1", source(tmp_path, "a.pb", bytes(100)))
    assert len(kept.files("programs/1")) == 1


# What others have put there


DAY = 86400


def others_files(
    folder: pathlib.Path, outside: pathlib.Path, names: tuple[str, ...] = ()
) -> dict[str, object]:
    """Fills a folder with files that this package has not written.

    Args:
        folder: Where.
        outside: A folder that links lead to; it is filled, too.
        names: More files, for those that look as if they were of this package.

    Returns:
        What `everything` returns of both, less what there was.
    """
    former = everything(folder)
    for place in (folder, outside):
        (place / "project" / ".git").mkdir(parents=True, exist_ok=True)
        (place / "empty" / "deeper").mkdir(parents=True)
        with open(place / "data.tfrecord", "wb") as file:
            file.truncate(3 * 2**30)
        for name in (".bashrc", "project/.env", "project/.git/a.0123abcd"):
            (place / name).write_text("mine")
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
    (folder / "link").symlink_to(outside / "data.tfrecord")
    (folder / "folder").symlink_to(outside)
    (folder / ".dangling").symlink_to(outside / "nothing")
    for place in (folder, outside):
        for path in [place, *place.rglob("*")]:
            age = (time.time() - 3 * DAY,) * 2
            os.utime(path, age, follow_symlinks=False)
    found = everything(folder, outside)
    return {path: found[path] for path in found if path not in former}


def everything(*folders: pathlib.Path) -> dict[str, object]:
    """Returns all that lies in some folders, with what small files hold."""
    found = {}
    for folder in folders:
        for path in folder.rglob("*"):
            kind = path.lstat().st_mode
            size = path.lstat().st_size
            small = path.is_file() and path.stat().st_size < 100
            is_own = small and not path.is_symlink()
            found[str(path)] = (
                kind,
                None if path.is_dir() else size,
                path.read_bytes() if is_own else None,
            )
    return found


def assert_all_stays(before: dict[str, object], *folders: pathlib.Path):
    found = everything(*folders)
    assert {path: found.get(path) for path in before} == before


def filled(folder: pathlib.Path, tmp_path: pathlib.Path) -> Store:
    """Returns a store with files of programs, in a folder of programs."""
    kept = Store(folder / "xla-0123456789abcdef")
    for name in ("1", "2", "3"):
        content = name.encode() * 5000
        kept.add(f"programs/{name}", source(tmp_path, "a.pb", content))
    return kept


@pytest.mark.parametrize("depth", [".", "xla-0123456789abcdef/programs/1"])
def test_files_of_others_stay_when_old_ones_are_deleted(tmp_path, depth):
    root, outside = tmp_path / "root", tmp_path / "outside"
    kept = filled(root, tmp_path)
    (stored,) = kept.files("programs/1").values()
    theirs = filled(outside, tmp_path)
    in_outside = everything(outside)
    names = (
        f".{stored.name}.a1b2c3d4",
        ".unfinished",
        "environment.json",
        "xla-fedcba9876543210/environment.json",
        "xla-fedcba9876543210/programs/1/c.pb.0123abcd",
    )
    before = others_files(root / depth, outside, names) | in_outside
    before |= everything(outside)
    link = root / "xla-aaaaaaaaaaaaaaaa"
    link.symlink_to(theirs.folder)
    copy = root / depth / f"a.pb{stored.name.removeprefix('a.pb')[:-1]}0"
    copy.symlink_to(stored)
    os.utime(stored, (time.time() - 9 * DAY,) * 2)
    assert store.size(root) == 15000

    store.prune(root, limit=12000)
    assert not stored.exists()
    assert len(kept.files("programs/3")) == 1
    assert_all_stays(before, root, outside)
    kept.keep_newest("programs/1", 0)
    kept.keep_newest("programs/2", 0)
    store.prune(root, limit=0)
    assert_all_stays(before, root, outside)
    assert link.is_symlink()
    assert copy.is_symlink()
    assert store.size(root) == 0


def test_folders_that_are_links_are_not_entered(tmp_path):
    theirs, here = filled(tmp_path / "outside", tmp_path), tmp_path / "root"
    before = everything(tmp_path / "outside")
    kept = Store(here / theirs.folder.name)
    link = kept.folder / "programs/1"
    link.parent.mkdir(parents=True)
    link.symlink_to(theirs.folder / "programs/1")
    assert kept.files("programs/1") == {}
    kept.keep_newest("programs/1", 0)
    kept.keep_newest("programs/1", 0)
    store.prune(here, limit=0)
    here.rename(tmp_path / "elsewhere")
    here.symlink_to(tmp_path / "outside")
    store.prune(here, limit=0)
    assert everything(tmp_path / "outside") == before
    with unavailable("is a link"):
        folders.make_private(here)
    folders.make_private(here, may_be_link=True)


@pytest.mark.long
def test_a_start_leaves_the_files_of_others(tmp_path):
    """As where a user names the folder of all their files."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    home.mkdir()
    outside.mkdir()
    before = others_files(home, outside)
    (trained,) = run(home, {"name": "small"})
    assert "has compiled 1 program" in trained["log"][0]
    assert_all_stays(before, home, outside)
    assert set(os.listdir(home)) == {
        *(pathlib.Path(path).name for path in before if in_(home, path)),
        "keras_conflux",
    }
    assert len(programs(home)) == 1


def in_(folder: pathlib.Path, path: str) -> bool:
    return pathlib.Path(path).parent == folder


# Where TensorFlow looks


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A folder for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    monkeypatch.setattr(folders, "MINIMUM_FREE", 0)
    return folder


def test_folders_of_killed_processes_are_removed(temporary):
    killed, running = ExchangeFolder(), ExchangeFolder()
    (killed.folder / "keras_conflux__1__2.pb").write_bytes(b"part")
    os.utime(killed.folder, (time.time() - 2 * DAY,) * 2)
    ExchangeFolder()
    assert not killed.folder.exists()
    assert running.folder.exists()
    # One that works for days makes its folder again.
    killed.assert_usable()
    assert killed.folder.is_dir()
    killed._remove(os.getpid())
    assert not killed.folder.exists()


def test_a_source_distribution_stays(temporary):
    unpacked = temporary / "keras_conflux-0.1.0"
    (unpacked / "src").mkdir(parents=True)
    os.utime(unpacked, (time.time() - 3 * DAY,) * 2)
    ExchangeFolder()
    assert (unpacked / "src").exists()


# What TensorFlow is told


def test_flags_are_added_and_removed(tmp_path, monkeypatch):
    environ = {"TF_XLA_FLAGS": "--tf_xla_clustering_debug"}
    before = dict(environ)
    folder = tmp_path / f"{exchange_folder.FOLDER_PREFIX}1 with spaces"
    for _ in range(2):  # as in a child process
        exchange_folder.remove_flags(environ)
        assert environ == before
        exchange_folder.set_flags(environ, folder, "GPU")
    assert environ["TF_XLA_FLAGS"].startswith("--tf_xla_clustering_debug --")
    assert environ["TF_XLA_FLAGS"].count("persistent_cache_directory") == 1
    environ["TF_XLA_FLAGS"] += " --later"
    exchange_folder.remove_flags(environ)
    assert environ == {"TF_XLA_FLAGS": "--tf_xla_clustering_debug --later"}
    alone = {}
    exchange_folder.set_flags(alone, folder, "GPU")
    exchange_folder.remove_flags(alone)
    assert alone == {}


def test_what_the_user_has_set_stays():
    mine = {"TF_XLA_FLAGS": "--tf_xla_persistent_cache_directory=/mine"}
    with unavailable("a cache of its own"):
        exchange_folder.assert_no_flags(mine)
    with unavailable("a file of flags"):
        exchange_folder.assert_no_flags({"TF_XLA_FLAGS": "/my/flags"})
    exchange_folder.assert_no_flags({"TF_XLA_FLAGS": " --tf_xla_x"})


def test_what_conflux_env_says(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kept = Store(tmp_path / "cache" / "xla-1")
    kept.add("programs/1", source(tmp_path, "a.pb", bytes(3 * 2**20)))
    shown = ProgramCache("GPU", tmp_path / "cache", kept, None)
    assert str(shown) == "on, 3 MiB in ~/cache"
    shown.root = pathlib.Path("/elsewhere")
    assert str(shown) == "on, 0 MiB in /elsewhere"


# What programs depend on


def test_any_change_leads_to_another_folder(tmp_path, monkeypatch):
    (tmp_path / "libcudnn.so.9.1").touch()
    environ = {"LD_LIBRARY_PATH": str(tmp_path), "HOME": "/home/a"}
    gpu = {"GPU": "NVIDIA H200", "driver": "580.1"}

    def folder(version="1.0", gpu=gpu, **changed) -> str:
        facts = environment.facts({**environ, **changed}, version, gpu)
        return environment.digest(facts)

    same = folder()
    assert folder(HOME="/home/b", CUDA_VISIBLE_DEVICES="1,0") == same
    others = [
        folder(version="1.1"),
        folder(gpu={**gpu, "GPU": "NVIDIA H100"}),
        folder(gpu={**gpu, "driver": "590.1"}),
        folder(XLA_FLAGS="--xla_gpu_autotune_level=2"),
        folder(TF_XLA_FLAGS="--tf_xla_clustering_debug"),
        folder(TF_DETERMINISTIC_OPS="1"),
        folder(CUDA_VISIBLE_DEVICES="MIG-1-2"),
    ]
    (tmp_path / "libcudnn.so.9.1").rename(tmp_path / "libcudnn.so.9.2")
    others.append(folder())
    monkeypatch.setattr(tf.version, "GIT_VERSION", "v2.21.0-1")
    others.append(folder())
    assert len({same, *others}) == 1 + len(others)


def test_what_has_to_be_deterministic_is_kept_apart(monkeypatch):
    usual = program_cache._kind("a")
    monkeypatch.setattr(
        "keras_conflux._compat.tensorflow_internals.is_deterministic",
        lambda: True,
    )
    assert program_cache._kind("a") != usual


@pytest.fixture
def _driver(tmp_path, monkeypatch):
    monkeypatch.setattr(environment, "_FILES", tmp_path)
    monkeypatch.setattr(environment, "_DEVICES", tmp_path)


def driver_files(tmp_path: pathlib.Path, *models: str) -> None:
    for index, model in enumerate(models):
        folder = tmp_path / "gpus" / f"0000:{index}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(
            f"Model: \t\t {model}\nIRQ:   \t\t 1\n"
        )
    (tmp_path / "version").write_text("NVRM version: 580.1\nGCC version: 1\n")


@pytest.mark.usefixtures("_driver")
def test_the_driver_tells_the_gpus_without_tensorflow(tmp_path):
    with unavailable("no NVIDIA GPU"):
        environment.gpus()
    driver_files(tmp_path, "NVIDIA H200", "NVIDIA H200")
    assert environment.gpus() == {
        "GPU": "NVIDIA H200",
        "driver": "NVRM version: 580.1",
    }


@pytest.mark.usefixtures("_driver")
def test_gpus_of_several_models_share_nothing(tmp_path):
    driver_files(tmp_path, "NVIDIA H200", "NVIDIA T400")
    with unavailable("several models.*NVIDIA H200, NVIDIA T400"):
        environment.gpus()


@pytest.mark.usefixtures("_driver")
def test_nvidia_smi_tells_it_as_well(tmp_path, monkeypatch):
    """As in containers that hide the driver's files."""
    told = "580.1, NVIDIA H200\n580.1, NVIDIA H200\n"
    monkeypatch.setattr(environment, "nvidia_smi", lambda *_: told)
    (tmp_path / "nvidia0").touch()
    found = environment.gpus()
    assert found == {"GPU": "NVIDIA H200", "driver": "580.1"}
    monkeypatch.setattr(environment, "nvidia_smi", lambda *_: "")
    with unavailable("no NVIDIA GPU"):
        environment.gpus()


# When it is off


@pytest.fixture
def _restored(monkeypatch):
    monkeypatch.setattr(setup, "_cache", None)
    monkeypatch.setattr(setup, "_why_off", "")


@pytest.mark.usefixtures("_restored")
def test_off_where_something_speaks_against_it(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "keras_conflux")
    cpu = {"CPU": "this one"}
    monkeypatch.setenv("KERAS_CONFLUX_CACHE", "0")
    setup.enable("1.0", cpu)
    assert setup.describe() == "off: KERAS_CONFLUX_CACHE is 0"
    monkeypatch.setenv("KERAS_CONFLUX_CACHE", str(tmp_path / "cache"))
    with monkeypatch.context() as newer:
        newer.setattr(tf, "__version__", "2.22.0")
        setup.enable("1.0", cpu)
    assert (
        setup.describe() == "off: the flags of TensorFlow 2.22.0 are not known"
    )
    assert not caplog.messages  # nobody has to hear of these
    setup.enable("1.0", cpu)  # in these tests TensorFlow has started
    assert "before keras_conflux was imported" in setup.describe()
    assert setup.current("CPU") is None
    (message,) = caplog.messages
    assert "set KERAS_CONFLUX_CACHE; 0 keeps nothing" in message
    assert "persistent_cache" not in os.environ.get("TF_XLA_FLAGS", "")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("_restored")
def test_off_without_gpus(monkeypatch):
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    monkeypatch.delenv("KERAS_CONFLUX_CACHE", raising=False)
    setup.enable("1.0")
    assert setup.describe() == "off: this TensorFlow is built for CPUs"
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    setup.enable("1.0")
    assert setup.describe() == "off: CUDA_VISIBLE_DEVICES hides all GPUs"


@pytest.mark.usefixtures("_restored")
def test_programs_of_other_devices_are_left_alone(tmp_path, monkeypatch):
    kept = Store(tmp_path)
    cache = ProgramCache("GPU", tmp_path, kept, None)
    monkeypatch.setattr(setup, "_cache", cache)
    assert setup.current("GPU") is cache
    assert setup.current("CPU") is None


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.InvalidArgumentError(
            None, None, "Detected unsupported operations when trying to compile"
        ),
        tf.errors.ResourceExhaustedError(None, None, "Out of memory"),
    ],
    ids=["an operation", "memory"],
)
def test_what_is_stored_is_not_blamed_for_a_program(monkeypatch, error):
    forgotten = []

    class Stored:
        @contextlib.contextmanager
        def serving(self, program, name):
            yield True

        class exchange:
            folder = "nowhere"

        def forget(self, program):
            forgotten.append(program)

    def program():
        raise error

    monkeypatch.setattr(setup, "current", lambda kind: Stored())
    purpose = Purpose("identity", "CPU", "a model")
    cached = CachedProgram(lambda: program, purpose)
    with pytest.raises(type(error)):
        cached()
    assert not forgotten
