"""Compares two devices with one, before versions that are not tested are used.

Names tell whether the package fits a version, and not whether it computes the
same. So a process of its own trains a small model, once for each version.
"""

import os
import subprocess
import sys

import keras
import tensorflow as tf

from keras_conflux._common.notices import tell
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import versions
from keras_conflux._extensions.launchers.known import without_launchers
from keras_conflux._extensions.program_cache import folders

_RUNS = "CONFLUX_SELF_CHECK"
"""An environment variable, which is set where the model is trained."""
_TRAINING = "from keras_conflux.tools.checks import equal; equal.compare(2)"
_SECONDS = 300.0
"""The longest time that it may take on a busy machine."""


def compare_once(version: str) -> None:
    """Trains a model on two CPU devices and on one, if it is to be tried."""
    if versions.untested() is None or os.environ.get(_RUNS):
        return
    name = f"{version}-{keras.__version__}-{tf.__version__}.equal"
    try:
        folder = folders.chosen(os.environ)
        if (folder / name).exists():
            return
        _compare()
        folders.make_private(folder)
        (folder / name).touch()
    except (folders.CacheUnavailable, OSError, subprocess.SubprocessError) as e:
        warn(
            f"Whether two devices compute what one does was not found out, or "
            f"not written down: {e}. Type `keras-conflux check`."
        )


def _compare() -> None:
    tell("these versions are not tested: a training is compared, once")
    env = {**without_launchers(os.environ), "CUDA_VISIBLE_DEVICES": "-1"}
    ended = subprocess.run(
        [sys.executable, "-c", _TRAINING],
        env=env | {"PYTHONPATH": os.pathsep.join(sys.path), _RUNS: "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=_SECONDS,
        check=False,
    )
    if ended.returncode == 0:
        return
    said = ended.stderr.strip().splitlines() or ["it said nothing"]
    _, is_wrong, what = said[-1].partition("Wrong: ")
    if not is_wrong:
        raise subprocess.SubprocessError(said[-1])
    raise ImportError(
        "keras_conflux does not compute what one device does with these "
        f"versions: {what}. {versions.advice()}"
    )
