"""Flags of XLA, which it reads from the environment once a process.

An unknown flag ends a process. So flags are set only for versions that are
known to have them, and removed again when XLA has read them: a child process
may have another TensorFlow, and JAX reads them as well.
"""

import os
import re
from collections.abc import MutableMapping
from importlib import metadata

from keras_conflux._compat.private_names import version_numbers

KNOWN_TENSORFLOW = ((2, 21),)
"""The versions that are known to have all of the flags."""
FIRST_JAX = (0, 7, 2)
"""The first version of JAX that is known to have them."""
LAST_JAX = (0, 11)
"""The last one."""
VARIABLE = "XLA_FLAGS"
SWITCH = "KERAS_CONFLUX_XLA_FLAGS"
"""The environment variable that turns the flags for products off, by `0`."""

# The pass gives some products of cuBLASLt less memory than they ask for later.
_CUBLASLT = (
    "--xla_gpu_enable_cublaslt=true "
    "--xla_disable_hlo_passes=gemm-workspace-rewriter"
)
_NO_TRITON = "--xla_gpu_enable_triton_gemm=false"


def choose_products(environ: MutableMapping[str, str] = os.environ) -> None:
    """Makes XLA take products of matrices on GPUs from cuBLASLt alone.

    By default it compiles tens of kernels for each product to compare, which is
    most of the time to the first step. The user's own flags stay.
    """
    import tensorflow as tf  # commands do not wait for it

    if (
        environ.get(SWITCH) != "0"
        and tf.test.is_built_with_cuda()
        and version_numbers(tf.__version__)[:2] in KNOWN_TENSORFLOW
        and is_known_to_jax()
    ):
        given = environ.get(VARIABLE, "").strip()
        if given and not given.startswith("-"):
            return  # it names a file of flags
        if not _has_any(given, _CUBLASLT):
            append(environ, VARIABLE, _CUBLASLT)
            if not _has_any(given, _NO_TRITON):
                append(environ, VARIABLE, _NO_TRITON)


def remove_products(environ: MutableMapping[str, str] = os.environ) -> None:
    """Removes the flags of `choose_products`, also of a parent process."""
    for flags in (_CUBLASLT, _NO_TRITON):
        take_out(environ, VARIABLE, re.compile(f" ?{re.escape(flags)}"))


def is_known_to_jax() -> bool:
    """Whether JAX, if it is installed, is known to have the flags."""
    try:
        version = version_numbers(metadata.version("jaxlib"))
    except metadata.PackageNotFoundError:
        return True
    return version >= FIRST_JAX and version[:2] <= LAST_JAX


def append(environ: MutableMapping[str, str], name: str, addition: str) -> None:
    """Appends flags to an environment variable."""
    environ[name] = f"{environ.get(name, '')} {addition}".lstrip()


def take_out(
    environ: MutableMapping[str, str], name: str, flags: re.Pattern[str]
) -> None:
    """Takes flags and the space before them out of a variable.

    The variable goes if it is empty.
    """
    if flags.search(environ.get(name, "")):
        environ[name] = flags.sub("", environ[name]).lstrip()
        if not environ[name]:
            del environ[name]


def _has_any(given: str, flags: str) -> bool:
    """Whether any of some flags is given, with any value."""
    return any(flag.partition("=")[0] in given for flag in flags.split())
