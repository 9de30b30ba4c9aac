"""Turns the cache on when the package is imported, where it is safe."""

import functools
import logging
import os
from collections.abc import Mapping

import tensorflow as tf

from keras_conflux._compat.private_names import version_numbers
from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache import compat
from keras_conflux._extensions.program_cache import environment
from keras_conflux._extensions.program_cache import exchange_folder
from keras_conflux._extensions.program_cache import folders
from keras_conflux._extensions.program_cache.cache import ProgramCache
from keras_conflux._extensions.program_cache.store import Store

_log = logging.getLogger("keras_conflux")
_cache: ProgramCache | None = None
_why_off = "keras_conflux has not been imported"


def current(kind: str) -> ProgramCache | None:
    """Returns the cache of this process for a kind of devices, if any."""
    return _cache if _cache and _cache.kind == kind else None


def describe() -> str:
    """Says whether programs are kept, and where or why not."""
    return f"off: {_why_off}" if _cache is None else str(_cache)


def enable(version: str, hardware: Mapping[str, str] | None = None) -> None:
    """Keeps XLA's executables, unless something speaks against it.

    The hardware is by default the GPUs of this machine. TensorFlow logs pages
    for each program that is loaded on a CPU, so CPUs are for tests.
    """
    global _cache, _why_off
    # A parent process may have set some.
    exchange_folder.remove_flags(os.environ)
    try:
        _cache = _made(version, hardware)
    except folders.CacheUnavailable as unavailable:
        _cache, _why_off = None, str(unavailable)
        level = logging.DEBUG if unavailable.is_expected else logging.WARNING
        _log.log(
            level,
            "XLA's programs are not kept for the next start: %s. To choose "
            "another folder, set %s; 0 keeps nothing and does not warn.",
            unavailable,
            folders.VARIABLE,
        )


def _made(version: str, hardware: Mapping[str, str] | None) -> ProgramCache:
    root = folders.chosen(os.environ)
    hardware = _gpus() if hardware is None else hardware
    _assert_tensorflow_fits()
    exchange_folder.assert_no_flags(os.environ)
    facts = environment.facts(os.environ, version, hardware)
    here = root / f"xla-{environment.digest(facts)}"
    if os.environ.get(folders.VARIABLE):
        folders.make_private(root.parent, may_be_link=True)
    for folder in (root, here):
        folders.make_private(folder)
    folders.assert_room(here)
    exchange = exchange_folder.ExchangeFolder()
    kind = "GPU" if "GPU" in hardware else "CPU"
    exchange_folder.set_flags(os.environ, exchange.folder, kind)
    return ProgramCache(kind, root, Store(here), exchange)


def _gpus() -> dict[str, str]:
    missing = functools.partial(folders.CacheUnavailable, is_expected=True)
    if not tf.test.is_built_with_cuda():
        raise missing("this TensorFlow is built for CPUs")
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        raise missing("CUDA_VISIBLE_DEVICES hides all GPUs")
    return environment.gpus()


def _assert_tensorflow_fits() -> None:
    if version_numbers(tf.__version__)[:2] not in xla_flags.KNOWN_TENSORFLOW:
        raise folders.CacheUnavailable(
            f"the flags of TensorFlow {tf.__version__} are not known",
            is_expected=True,
        )
    if compat.has_listed_devices():
        raise folders.CacheUnavailable(
            "TensorFlow was asked for devices before keras_conflux was "
            "imported, and has read its flags"
        )
