"""Errors that say what to install when the package cannot be imported."""

import importlib.util
from collections.abc import Iterable

from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import problems
from keras_conflux._compat.private_names import version_numbers

TESTED_KERAS = (3, 14), (3, 15)
TESTED_TENSORFLOW = (2, 20), (2, 21)
"""The oldest and the newest version that the tests pass with."""


def assert_installed() -> None:
    """Raises unless TensorFlow is installed and is Keras' backend.

    Raises:
        ImportError: Saying what to type.
    """
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
    """Compares the insides of Keras and TensorFlow with the expected ones.

    A version beyond those that are tested is warned about once.

    Args:
        names: All that the package replaces or reads.

    Raises:
        ImportError: If a private name is missing or has changed, with all of
            them, the versions, and those that are tested.
    """
    import keras
    import tensorflow as tf

    from keras_conflux._common.user_warnings import warn

    versions = {
        "keras": version_numbers(keras.__version__),
        "tensorflow": version_numbers(tf.__version__),
    }
    wrong = [
        problem
        for name in names
        for problem in problems([name], versions[name.library])
    ]
    if wrong:
        raise ImportError(
            f"keras_conflux does not fit {_installed()}, which are installed: "
            f"{'; '.join(wrong)}. It is tested with {_tested()}. Type "
            f"`pip install {_requirement('keras', TESTED_KERAS)} "
            f"{_requirement('tensorflow', TESTED_TENSORFLOW)}`, or a newer "
            "keras-conflux."
        )
    text = untested()
    if text is not None:
        warn(text)


def untested() -> str | None:
    """Returns the message about untested versions, if there are any."""
    import keras
    import tensorflow as tf

    if _is_in(version_numbers(keras.__version__), TESTED_KERAS) and _is_in(
        version_numbers(tf.__version__), TESTED_TENSORFLOW
    ):
        return None
    return (
        f"keras_conflux is tested with {_tested()}. Installed are "
        f"{_installed()}. What it relies on is there, but whether N devices "
        "still compute what one does has not been tried."
    )


def _tested() -> str:
    return (
        f"Keras {_range(TESTED_KERAS)} and TensorFlow "
        f"{_range(TESTED_TENSORFLOW)}"
    )


def _installed() -> str:
    import keras
    import tensorflow as tf

    return f"Keras {keras.__version__} and TensorFlow {tf.__version__}"


def _is_in(version: tuple, tested: tuple) -> bool:
    oldest, newest = tested
    return oldest <= version[:2] <= newest


def _range(tested: tuple) -> str:
    return " to ".join(".".join(map(str, each)) for each in tested)


def _requirement(name: str, tested: tuple) -> str:
    (major, oldest), (_, newest) = tested
    return f"'{name}>={major}.{oldest},<{major}.{newest + 1}'"
