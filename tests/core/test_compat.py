"""What the package knows of Keras and TensorFlow is listed, and compared."""

import ast
import itertools
import pathlib
import re
import subprocess
import threading
import time
import tomllib
import warnings
from unittest import mock

import forked
import keras
import pytest
import tensorflow as tf

import keras_conflux as kc
from keras_conflux import _supported
from keras_conflux._compat import patching
from keras_conflux._compat import versions
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import Private
from keras_conflux._compat.private_names import Public
from keras_conflux._compat.private_names import problem
from keras_conflux._extensions import installation
from keras_conflux._extensions import self_check
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.keras_distribution import (
    patches as keras_distribution,
)
from keras_conflux._fit import keras_patches

PACKAGE = pathlib.Path(kc.__file__).parent
EXTENSIONS = private_names.NAMES
LISTED = [*_supported.CORE, *itertools.chain(*EXTENSIONS.values())]


def may_know_private_names(path: pathlib.Path) -> bool:
    """Whether a file is of `_compat`, or of what a shelf has for that."""
    if path.parent.name == "_graphs":
        return True
    if PACKAGE / "_extensions" in path.parents:
        return path.parent.name == "compat" or path.stem in (
            "compat",
            "private_names",
        )
    return path.parent.name == "_compat"


OUTSIDE = [p for p in PACKAGE.rglob("*.py") if not may_know_private_names(p)]


def test_installed_versions_are_as_expected():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.assert_supported(LISTED)
    said = [str(each.message) for each in caught]
    assert said == [versions.untested()] * bool(versions.untested())


def test_all_that_is_wrong_is_said_at_once(monkeypatch):
    clip, logs = Patched.CLIP_GRADIENTS, Patched.METRICS_OR_LOGS
    inputs = private_names.BUILD_METRICS
    monkeypatch.delattr(inputs.owner, inputs.attribute)
    monkeypatch.delattr(clip.owner, clip.attribute)
    monkeypatch.setattr(logs.owner, logs.attribute, lambda self, why: why)
    monkeypatch.setattr(keras, "__version__", "3.99.0")
    with pytest.raises(ImportError) as caught:
        versions.assert_supported(LISTED)
    said = str(caught.value)
    assert "Keras 3.99.0" in said
    assert f"`{clip.path}` is missing" in said
    assert f"`{inputs.path}` is missing" in said  # an extension's
    assert f"`{logs.path}` takes (self, why), not (self, logs)" in said
    assert "Keras 3.10 to 3.15 and TensorFlow 2.18 to 2.21" in said
    assert "pip install 'keras>=3.10,<3.16' 'tensorflow>=2.18,<2.22'" in said


def test_an_attribute_that_is_renamed_is_noticed():
    def build(self):
        self._other_gradients = []

    name = Private(f"{__name__}:build", mentions="_accumulated")
    globals()["build"] = build
    path = f"{__name__}:build"
    assert problem(name) == f"`{path}` does not use `_accumulated`"
    assert not Private("keras:not_yet", since=(4, 0)).is_in((3, 15))


def test_a_method_is_found_where_a_class_inherits_it():
    class Made:
        def build(self):
            self._made = True

    class Heir(Made):
        pass

    globals()["Heir"] = Heir
    path = f"{__name__}:Heir"
    assert ListedName(f"{path}.build").owner is Made
    assert ListedName(f"{path}.none").owner is Heir
    attributes = Private(path, mentions="_made, build, _lost")
    assert problem(attributes) == f"`{path}` does not use `_lost`"


def test_names_are_public_or_private():
    for name in LISTED:
        is_public = not name.mentions and not re.search(
            r"^\w+\.(src|python|compiler)\b|[.:]_[a-z]", name.path
        )
        assert isinstance(name, Public) == is_public, name


@pytest.mark.parametrize("library", ["KERAS", "TENSORFLOW"])
def test_a_version_beyond_those_tested_warns_once(library, monkeypatch):
    monkeypatch.setattr(versions, f"TESTED_{library}", ((1, 0), (1, 9)))
    message = rf"(?i){library} 1\.0 to 1\.9.*{re.escape(keras.__version__)}"
    with pytest.warns(kc.ConfluxWarning, match=message) as caught:
        versions.assert_supported(LISTED)
    assert len(caught) == 1


@pytest.fixture
def untested(monkeypatch, tmp_path):
    monkeypatch.setattr(versions, "TESTED_KERAS", ((1, 0), (1, 9)))
    monkeypatch.setenv("KERAS_CONFLUX_CACHE", str(tmp_path))


def test_untested_versions_are_tried_once(untested, monkeypatch):
    ended = subprocess.CompletedProcess([], 0, "", "")
    run = mock.Mock(return_value=ended)
    monkeypatch.setattr(self_check.subprocess, "run", run)
    for version, runs in (("0.1", 1), ("0.1", 1), ("0.2", 2)):
        self_check.compare_once(version)
        assert run.call_count == runs
    monkeypatch.setattr(versions, "untested", lambda: None)
    self_check.compare_once("0.3")
    assert run.call_count == 2


def test_untested_versions_that_train_otherwise_are_refused(
    untested, monkeypatch, capfd
):
    begin, compare = self_check._TRAINING.split("; ")
    program = f"{begin}; equal._TOLERANCE = -1; {compare}"
    monkeypatch.setattr(self_check, "_TRAINING", program)
    with pytest.raises(ImportError, match=r"differs by .*pip install"):
        self_check.compare_once("0.1")
    assert "a training is compared, once" in capfd.readouterr().err


def test_untested_versions_that_cannot_be_tried_are_warned_of(
    untested, monkeypatch
):
    monkeypatch.setattr(self_check, "_TRAINING", "1 / 0")
    with pytest.warns(kc.ConfluxWarning, match="ZeroDivisionError"):
        self_check.compare_once("0.1")


def test_a_patch_release_does_not_warn(monkeypatch):
    for module, (_, (major, minor)) in (
        (keras, versions.TESTED_KERAS),
        (tf, versions.TESTED_TENSORFLOW),
    ):
        monkeypatch.setattr(module, "__version__", f"{major}.{minor}.99")
    assert versions.untested() is None


def test_the_range_is_that_of_the_installation():
    text = (PACKAGE.parent / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = project["optional-dependencies"]
    for name, tested, required in (
        ("keras", versions.TESTED_KERAS, project["dependencies"]),
        ("tensorflow-cpu", versions.TESTED_TENSORFLOW, extras["cpu"]),
        ("tensorflow[and-cuda]", versions.TESTED_TENSORFLOW, extras["cuda"]),
    ):
        (major, oldest), _ = tested
        assert f"{name}>={major}.{oldest}" in required


def test_each_patch_point_is_patched_once():
    found = set()
    for table in (
        keras_patches.PATCHES,
        keras_distribution.PATCHES,
        installation.KERNELS,
        installation.OPTIMIZERS,
        installation.REMAT,
        installation.RECOMPUTATION,
        installation.SHARDING,
    ):
        points = [point for point, _ in table]
        assert len(points) == len(set(points))
        found |= set(points)
    listed = [v for v in vars(Patched).values() if isinstance(v, ListedName)]
    assert found >= set(listed)
    assert found <= set(LISTED)


MISFIT = """
import warnings, sys
import keras, numpy as np
from keras.src.saving import saving_lib
sys.modules["tensorflow.compiler.xla.service.hlo_pb2"] = None
del saving_lib.H5IOStore
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import keras_conflux as kc
*_, memory, resume = (str(each.message) for each in caught)
assert "`memory` is left out, so errors of memory have no notes" in memory
assert "`tensorflow.compiler.xla.service.hlo_pb2:HloProto` is miss" in memory
assert "`resume` is left out, so `kc.Resume`" in resume
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
for name, call in {
    "kc.Resume": lambda: kc.Resume("runs"),
    "kc.save": lambda: kc.save(model, "runs", step=1),
    "kc.load": lambda: kc.load(model, "runs"),
    "kc.memory": lambda: kc.memory(model),
}.items():
    try:
        call()
        sys.exit(name)
    except NotImplementedError as error:
        assert f"`{name}` is an extension, and it does not" in str(error), error
        assert "pip install" in str(error)
model.compile("sgd", "mse")
kc.replicate(model, "CPU:0").fit(np.ones((4, 4)), np.ones((4, 3)), verbose=0)
"""


def test_an_extension_that_does_not_fit_is_left_out():
    ended = forked.run("-c", MISFIT)
    assert ended.returncode == 0, ended.stderr


def test_threads_wait_until_all_replacements_are_in_place():
    called, seen = [], []

    def slow():
        time.sleep(0.1)
        called.append(1)

    def use():
        patching.begin()
        seen.append(len(called))

    patching.when_used(slow)
    threads = [threading.Thread(target=use) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [1, 1, 1]


def test_no_name_of_speed_is_in_the_table_of_the_core():
    points = {point for point, _ in keras_patches.PATCHES}
    assert not points & {*EXTENSIONS["kernels"], *EXTENSIONS["optimizers"]}


def names_and_strings(path: pathlib.Path) -> set[str]:
    """Returns what a file reads of objects, and its strings."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            found.add(node.attr)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def test_listed_private_names_stand_where_they_are_listed():
    private = {
        name
        for each in LISTED
        for name in (each.attribute, *each.mentions.split(", "))
        if re.match(r"_[a-z]", name, re.IGNORECASE)
    }
    assert "_clip_gradients" in private
    for path in OUTSIDE:
        assert not names_and_strings(path) & private, path


def test_private_names_that_are_read_are_this_packages_own():
    """So a new one of Keras or TensorFlow is put where it is listed."""
    defined = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                defined.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(
                node.ctx, ast.Store
            ):
                defined.add(node.attr)
            if isinstance(node, ast.AnnAssign):  # as a dataclass has it
                defined.add(ast.unparse(node.target))
    for path in OUTSIDE:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                private = re.match(r"_[a-z]", node.attr)
                assert not private or node.attr in defined, (path, node.attr)


def test_private_modules_are_imported_there_only():
    for path in OUTSIDE:
        source = path.read_text()
        for module in ("keras.src", "tensorflow.python", "tensorflow.compiler"):
            assert module not in source, path
