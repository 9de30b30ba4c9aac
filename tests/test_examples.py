"""The examples, run as a user runs them."""

import os
import pathlib
import subprocess
import sys

import pytest
from conftest import ON_GPU

ROOT = pathlib.Path(__file__).parent.parent


def run(*arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize("name", ["digits", "custom_loop"])
def test_example(name):
    count = "2" if ON_GPU else "3"
    printed = run(f"examples/{name}.py", "--epochs", "1", "--devices", count)
    assert f"test accuracy on {count} devices" in printed
    assert "served without keras_conflux" in printed
