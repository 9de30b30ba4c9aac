"""The flags of TensorFlow that name a folder, in the environment."""

import pathlib
import re
from collections.abc import MutableMapping

from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache.folders import CacheUnavailable

FOLDER_PREFIX = "keras_conflux_exchange-"
"""How the folders begin that this package names in flags."""

_TENSORFLOW = "TF_XLA_FLAGS"
_PREFIX = "--tf_xla_persistent_cache_prefix=keras_conflux"
_DEVICE_TYPES = "--tf_xla_persistent_cache_device_types"
_PROGRAMS = "--tf_xla_persistent_cache_directory"
_OURS = re.compile(rf' ?{_PREFIX} {_DEVICE_TYPES}=\w+ {_PROGRAMS}="[^"]*"')


def assert_free(environ: MutableMapping[str, str]) -> None:
    """Raises if a flag cannot be added because of the user's own.

    Args:
        environ: The environment variables, without flags of this package.

    Raises:
        CacheUnavailable: If it cannot.
    """
    given = environ.get(_TENSORFLOW, "").strip()
    if given and not given.startswith("-"):
        raise CacheUnavailable(
            f"{_TENSORFLOW} names a file of flags, to which none can be added"
        )
    if "tf_xla_persistent_cache" in given:
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


def remove(environ: MutableMapping[str, str]) -> None:
    """Removes this package's flags, also a parent process' flags.

    Args:
        environ: The environment variables.
    """
    xla_flags.take_out(environ, _TENSORFLOW, _OURS)


def _quoted(folder: pathlib.Path) -> str:
    if re.search(r'["\\\n]', str(folder)):
        raise CacheUnavailable(f"flags cannot name the folder {folder}")
    return f'"{folder}"'
