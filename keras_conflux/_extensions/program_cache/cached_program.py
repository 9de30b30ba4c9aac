"""A program whose first call loads its executables from disk."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import tensorflow as tf

from keras_conflux._compat import error_texts
from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.program_cache import setup
from keras_conflux._extensions.program_cache.cache import ProgramCache
from keras_conflux._extensions.program_cache.compat import repeatable_names
from keras_conflux._extensions.program_cache.folders import CacheUnavailable
from keras_conflux._fit.execution.traced_program import Purpose
from keras_conflux._fit.execution.traced_program import TracedProgram
from keras_conflux._replication import lost_values


class CachedProgram:
    """Traces a program of all replicas that XLA compiles, and calls it."""

    def __init__(
        self, trace: Callable[[], TracedProgram], purpose: Purpose
    ) -> None:
        self._identity = purpose.identity
        self._name = purpose.name
        self._cache = setup.current(purpose.kind)
        is_kept = self._cache is not None
        with repeatable_names(self._identity) if is_kept else nullcontext():
            self._program = trace()
        # XLA has read them when TensorFlow made the devices.
        xla_flags.remove_products()

    def __call__(self, *arguments: Any) -> Any:
        """Returns the result of the program, or raises its error."""
        if self._cache is None:
            return self._program(*arguments)
        try:
            return self._first_call(self._cache, arguments)
        finally:
            self._cache = None

    def is_stale(self) -> bool:
        """Whether it reads variables that have been replaced since."""
        return self._program.is_stale()

    def _first_call(self, cache: ProgramCache, arguments: Any) -> Any:
        """Calls the program, and forgets stored files that cannot be loaded."""
        is_stored = False
        try:
            with cache.serving(self._identity, self._name) as is_stored:
                return self._program(*arguments)
        except CacheUnavailable as unavailable:
            raise _nowhere_to_write(str(unavailable)) from unavailable
        except tf.errors.OpError as error:
            reason = error_texts.reason_of(error)
            is_of_writing = str(cache.exchange.folder) in str(error)
            if is_of_writing and not is_stored:
                raise _nowhere_to_write(reason) from error
            if not is_stored or _comes_from_the_program(error):
                raise
            cache.forget(self._identity)
            # `fit` would take some errors for the end of the data.
            raise tf.errors.InternalError(
                None,
                None,
                f"{self._name}: XLA's program of an earlier start cannot be "
                f"loaded, and was deleted. Start the program again. {reason}",
            ) from error


def _comes_from_the_program(error: tf.errors.OpError) -> bool:
    """Whether it would be raised without anything that is stored, too."""
    return (
        isinstance(error, tf.errors.ResourceExhaustedError)
        or lost_values.are_missing(error)
        or error_texts.is_of_operations(error)
    )


def _nowhere_to_write(reason: str) -> tf.errors.OpError:
    return error_texts.cannot_compile(
        f"XLA has to write its programs to a file, and cannot: {reason}. "
        "Make room there, set TMPDIR to another folder, or set "
        "KERAS_CONFLUX_CACHE=0 to write nothing",
    )
