"""The flags of TensorFlow and XLA that name folders, in the environment."""

import pathlib
import re
from collections.abc import MutableMapping

from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache.folders import CacheUnavailable

FOLDER_PREFIX = "keras_conflux_exchange-"
"""How the folders begin that this package names in flags."""

LAST_JAX = (0, 10)
"""The last version of JAX that has the flag for autotuning; 0.11 ends the
process that sets it."""

_TENSORFLOW = "TF_XLA_FLAGS"
_PREFIX = "--tf_xla_persistent_cache_prefix=keras_conflux"
_DEVICE_TYPES = "--tf_xla_persistent_cache_device_types"
_PROGRAMS = "--tf_xla_persistent_cache_directory"
_AUTOTUNING = "--xla_gpu_experimental_autotuner_cache_dir"
_OURS = re.compile(
    rf' ?{_PREFIX} {_DEVICE_TYPES}=\w+ {_PROGRAMS}="[^"]*"'
    rf'| ?{_AUTOTUNING}="[^"]*/{FOLDER_PREFIX}[^"]*"'
)


def assert_free(environ: MutableMapping[str, str]) -> None:
    """Raises if a flag cannot be added because of the user's own.

    Args:
        environ: The environment variables, without flags of this package.

    Raises:
        CacheUnavailable: If it cannot.
    """
    for name in (_TENSORFLOW, xla_flags.VARIABLE):
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
        folder: The folder.
        device_type: `"GPU"` or `"CPU"`.
    """
    xla_flags.append(
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
    The user's own flags stay. Nothing is set where a JAX might read it that
    is not known to have the flag.

    Args:
        environ: The environment variables.
        folder: The folder.
    """
    given = environ.get(xla_flags.VARIABLE, "")
    if "autotune" not in given and xla_flags.is_known_to_jax(LAST_JAX):
        xla_flags.append(
            environ,
            xla_flags.VARIABLE,
            f"{_AUTOTUNING}={_quoted(folder)}",
        )


def remove(environ: MutableMapping[str, str]) -> None:
    """Removes this package's flags, also a parent process' flags.

    Args:
        environ: The environment variables.
    """
    for name in (_TENSORFLOW, xla_flags.VARIABLE):
        xla_flags.take_out(environ, name, _OURS)


def _quoted(folder: pathlib.Path) -> str:
    if re.search(r'["\\\n]', str(folder)):
        raise CacheUnavailable(f"flags cannot name the folder {folder}")
    return f'"{folder}"'
