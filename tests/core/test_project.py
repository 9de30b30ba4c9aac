"""What surrounds the package says the same as the package."""

import pathlib
import re
import tomllib

import pytest

import keras_conflux as kc
from keras_conflux._compat import versions

ROOT = pathlib.Path(kc.__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
URLS = PROJECT["urls"]
WORKFLOWS = ROOT / ".github" / "workflows"

in_a_checkout = pytest.mark.skipif(
    not WORKFLOWS.exists(), reason="an sdist has no folder .github"
)


def pythons() -> list[str]:
    """Returns the versions of Python that the classifiers name."""
    return re.findall(r":: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.M)


def test_the_versions_of_python_are_those_required():
    oldest, *_, newest = pythons()
    beyond = f"3.{int(newest.removeprefix('3.')) + 1}"
    assert PROJECT["requires-python"] == f">={oldest},<{beyond}"


@in_a_checkout
def test_ci_runs_all_versions():
    tests = (WORKFLOWS / "tests.yml").read_text()
    release = (WORKFLOWS / "release.yml").read_text()
    matrix = ", ".join(f'"{each}"' for each in pythons())
    assert f"python: [{matrix}]" in tests
    assert f"python: [{matrix}]" in release
    (major, minor), _ = versions.TESTED_KERAS
    assert f'"keras=={major}.{minor}.0"' in tests
    (major, minor), _ = versions.TESTED_TENSORFLOW
    assert f'"tensorflow-cpu=={major}.{minor}.0"' in tests


@in_a_checkout
def test_the_addresses_are_those_of_the_metadata():
    source, site = URLS["Source"], URLS["Documentation"]
    raw = source.replace("//github.com", "//raw.githubusercontent.com")
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("*.cff"),
        *ROOT.glob("*.yml"),
        *ROOT.glob("*.toml"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / ".github").rglob("*.*"),
        *(ROOT / "examples").glob("*.ipynb"),
    ]
    for path in files:
        found = re.findall(
            r"https://[\w./-]*keras-conflux[\w./-]*", path.read_text()
        )
        for address in found:
            assert address.startswith((source, site, raw)), (path, address)


@in_a_checkout
def test_forms_for_issues_ask_for_the_environment():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        asks = "What `keras-conflux env` prints" in path.read_text()
        assert asks or path.stem == "config"
