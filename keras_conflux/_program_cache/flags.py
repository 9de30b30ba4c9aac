"""The flags of TensorFlow and XLA that name folders, in the environment.

An unknown flag ends a process, so they are set only for versions that are known
to have them, and removed again when TensorFlow has run the first program: a
child process may have another TensorFlow, and JAX reads XLA_FLAGS as well.
"""

import pathlib
import re
from collections.abc import MutableMapping
from importlib import metadata

from keras_conflux._common.version_numbers import numbers
from keras_conflux._program_cache.unavailable import CacheUnavailable

KNOWN_TENSORFLOW = ((2, 21),)
"""The versions that have all of the flags. 2.20 has no cache of autotuning."""
KNOWN_JAX = (0, 7, 2)
"""The first version of JAX that is known to have those of XLA."""
FOLDER_PREFIX = "keras_conflux-"
"""How the folders begin that this package names in flags."""

_TENSORFLOW = "TF_XLA_FLAGS"
_XLA = "XLA_FLAGS"
_PREFIX = "--tf_xla_persistent_cache_prefix=keras_conflux"
_DEVICE_TYPES = "--tf_xla_persistent_cache_device_types"
_PROGRAMS = "--tf_xla_persistent_cache_directory"
_AUTOTUNING = "--xla_gpu_experimental_autotuner_cache_dir"
_OURS = re.compile(
    rf' ?{_PREFIX} {_DEVICE_TYPES}=\w+ {_PROGRAMS}="[^"]*"'
    rf'| ?{_AUTOTUNING}="[^"]*/{FOLDER_PREFIX}[^"]*"'
)


def assert_free(environ: MutableMapping[str, str]) -> None:
    """Raises if a flag cannot be added because of what the user has set.

    Args:
        environ: The environment variables, without flags of this package.

    Raises:
        CacheUnavailable: If it cannot.
    """
    for name in (_TENSORFLOW, _XLA):
        text = environ.get(name, "").strip()
        if text and not text.startswith("-"):
            raise CacheUnavailable(
                f"{name} names a file of flags, to which none can be added"
            )
    if "tf_xla_persistent_cache" in environ.get(_TENSORFLOW, ""):
        raise CacheUnavailable(
            f"{_TENSORFLOW} names a cache of its own", is_expected=True
        )


def set_programs(
    environ: MutableMapping[str, str], folder: pathlib.Path, device_type: str
) -> None:
    """Makes TensorFlow look for programs in a folder, and write them there.

    TensorFlow reads this when it is first asked for devices.

    Args:
        environ: The environment variables.
        folder: Where.
        device_type: `"GPU"` or `"CPU"`.
    """
    _append(
        environ,
        _TENSORFLOW,
        f"{_PREFIX} {_DEVICE_TYPES}={device_type} "
        f"{_PROGRAMS}={_quoted(folder)}",
    )


def set_autotuning(
    environ: MutableMapping[str, str], folder: pathlib.Path
) -> None:
    """Makes XLA keep which variant of a kernel was the fastest.

    XLA reads this when it first compiles, or on GPUs before, once a process.
    What the user has set stays. Nothing is set where an older JAX might read
    it.

    Args:
        environ: The environment variables.
        folder: Where.
    """
    if "autotune" not in environ.get(_XLA, "") and not _has_older_jax():
        _append(environ, _XLA, f"{_AUTOTUNING}={_quoted(folder)}")


def _has_older_jax() -> bool:
    try:
        return numbers(metadata.version("jaxlib")) < KNOWN_JAX
    except metadata.PackageNotFoundError:
        return False


def remove(environ: MutableMapping[str, str]) -> None:
    """Removes this package's flags, also those of a parent process.

    Args:
        environ: The environment variables.
    """
    for name in (_TENSORFLOW, _XLA):
        text = environ.get(name, "")
        if (rest := _OURS.sub("", text)) != text:
            environ[name] = rest
            if not rest.strip():
                del environ[name]


def _append(
    environ: MutableMapping[str, str], name: str, addition: str
) -> None:
    environ[name] = f"{environ.get(name, '')} {addition}".lstrip()


def _quoted(folder: pathlib.Path) -> str:
    if re.search(r'["\\\n]', str(folder)):
        raise CacheUnavailable(f"flags cannot name the folder {folder}")
    return f'"{folder}"'
