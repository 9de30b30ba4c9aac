"""Errors that say what to install when the package cannot be imported."""

import importlib.util
from collections.abc import Iterable
from collections.abc import Mapping

from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import problem
from keras_conflux._compat.private_names import version_numbers

TESTED_KERAS = (3, 10), (3, 15)
TESTED_TENSORFLOW = (2, 18), (2, 21)
"""The oldest and the newest version that the tests pass with."""


def assert_installed() -> None:
    """Raises unless TensorFlow is installed and is Keras' backend."""
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "keras_conflux needs TensorFlow, which is not installed. On a "
            "machine with NVIDIA GPUs type `pip install "
            "'tensorflow[and-cuda]'`, elsewhere `pip install tensorflow-cpu`."
        )
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "keras_conflux works with Keras' TensorFlow backend, but the "
            f"active backend is {keras.backend.backend()!r}. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is "
            "first imported."
        )


def assert_supported(names: Iterable[ListedName]) -> None:
    """Raises if the insides of Keras and TensorFlow are not as expected.

    A version beyond those that are tested is warned about once.
    """
    from keras_conflux._common.user_warnings import warn

    wrong = _wrong(names)
    if wrong:
        raise ImportError(
            f"keras_conflux does not fit {_installed()}, which are installed: "
            f"{'; '.join(wrong)}. {advice()}"
        )
    text = untested()
    if text is not None:
        warn(text)


def advice() -> str:
    """Returns what to install where something does not fit."""
    return (
        f"keras_conflux is tested with {_tested()}. Type `pip install "
        f"{_requirement('keras', TESTED_KERAS)} "
        f"{_requirement('tensorflow', TESTED_TENSORFLOW)}`, or install a newer "
        "keras-conflux."
    )


def misfits(extensions: Mapping[str, Iterable[ListedName]]) -> dict[str, str]:
    """Returns the extensions that do not fit, and why."""
    found = {each: _wrong(names) for each, names in extensions.items()}
    return {
        extension: f"it does not fit {_installed()}: {'; '.join(wrong)}"
        for extension, wrong in found.items()
        if wrong
    }


def _wrong(names: Iterable[ListedName]) -> list[str]:
    keras, tensorflow = map(version_numbers, _versions())
    versions = {"keras": keras, "tensorflow": tensorflow}
    here = [x for x in names if x.is_in(versions[x.library])]
    return [*filter(None, map(problem, here))]


def untested() -> str | None:
    """Returns the message about untested versions, if there are any."""
    tested = TESTED_KERAS, TESTED_TENSORFLOW
    if all(
        oldest <= version_numbers(installed)[:2] <= newest
        for installed, (oldest, newest) in zip(_versions(), tested, strict=True)
    ):
        return None
    return (
        f"keras_conflux is tested with {_tested()}. Installed are "
        f"{_installed()}. What it relies on is there. The first use compares "
        "two CPU devices with one; `keras-conflux check` compares yours."
    )


def _tested() -> str:
    return _described(_range(TESTED_KERAS), _range(TESTED_TENSORFLOW))


def _versions() -> tuple[str, str]:
    import keras
    import tensorflow as tf

    return keras.__version__, tf.__version__


def _installed() -> str:
    return _described(*_versions())


def _described(keras: str, tensorflow: str) -> str:
    return f"Keras {keras} and TensorFlow {tensorflow}"


def _range(tested: tuple) -> str:
    return " to ".join(".".join(map(str, each)) for each in tested)


def _requirement(name: str, tested: tuple) -> str:
    (major, oldest), (_, newest) = tested
    return f"'{name}>={major}.{oldest},<{major}.{newest + 1}'"


_left_out: dict[str, str] = {}


def leave_out(extension: str, reason: str) -> None:
    """Has an extension be refused where it is asked for by name."""
    _left_out[extension] = reason


def refusal(extension: str, asked: str) -> str | None:
    """Returns why what a user has written is refused, `None` if it is not."""
    if extension not in _left_out:
        return None
    return f"`{asked}` is an extension, and {_left_out[extension]}"


def assert_in_place(extension: str, asked: str) -> None:
    """Raises `NotImplementedError` if what a user has written is refused."""
    refused = refusal(extension, asked)
    if refused:
        raise NotImplementedError(refused)
