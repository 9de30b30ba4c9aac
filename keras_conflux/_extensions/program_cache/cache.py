"""Stores XLA's executables, and gives TensorFlow the stored ones."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Iterator

from keras_conflux._compat import tensorflow_internals
from keras_conflux._extensions.program_cache import exchange_folder
from keras_conflux._extensions.program_cache import store
from keras_conflux._extensions.program_cache.store import Store

_FILES_OF_A_PROGRAM = 32
"""How many are kept: of all replicas, and of former versions of its code."""

_log = logging.getLogger("keras_conflux")


@dataclasses.dataclass
class ProgramCache:
    """The executables for a kind of devices, also of earlier processes."""

    kind: str
    root: pathlib.Path
    store: Store
    exchange: exchange_folder.ExchangeFolder

    def __str__(self) -> str:
        size = store.size(self.root) / 2**20
        return f"on, {size:.0f} MiB in {_shortened(self.root)}"

    @contextlib.contextmanager
    def serving(self, program: str, name: str) -> Iterator[bool]:
        """Makes TensorFlow find stored files, and stores new executables.

        Yields whether any is stored of the program, a text that is the same
        whenever the same program is run; the name is for the log.
        """
        exchange, kind = self.exchange, _kind(program)
        exchange.assert_usable()
        stored = self.store.files(kind)
        # Files that lie there now were compiled without this package.
        others = set(exchange.written())
        exchange.link(stored)
        began = time.monotonic()
        try:
            yield bool(stored)
            compiled = len(set(exchange.written()) - others)
            _log.info(
                "%s: %s %s; its first execution took %.1f s",
                name,
                _told(bool(stored), compiled),
                self.store.folder,
                time.monotonic() - began,
            )
        finally:
            # XLA has read them by now.
            exchange_folder.remove_flags(os.environ)
            exchange.unlink(stored)
            self._keep(kind, set(exchange.written()) - others)
            self.store.keep_newest(kind, _FILES_OF_A_PROGRAM)
            store.prune(self.root)

    def forget(self, program: str) -> None:
        """Deletes all that is stored of a program, which cannot be loaded."""
        self.store.keep_newest(_kind(program), 0)

    def _keep(self, kind: str, files: set[pathlib.Path]) -> None:
        try:
            for file in files:
                self.store.add(kind, file)
                file.unlink()
        except OSError as error:
            _log.warning(
                "XLA's programs could not be kept for the next start in %s: %s",
                self.store.folder,
                error.strerror or error,
            )


def _told(is_stored: bool, compiled: int) -> str:
    if compiled:
        several = "s" if compiled > 1 else ""
        return f"XLA has compiled {compiled} program{several}, kept in"
    if is_stored:
        return "a program compiled in an earlier start was loaded from"
    return "TensorFlow has kept no program of XLA in"


def _shortened(path: pathlib.Path) -> str:
    """Returns a path without the name of the user, if it is in the home."""
    with contextlib.suppress(RuntimeError, ValueError):
        return f"~/{path.relative_to(pathlib.Path.home())}"
    return str(path)


def _kind(program: str) -> str:
    """Returns the kind of a program's files; XLA's keys tell no determinism."""
    suffix = "-deterministic" if tensorflow_internals.is_deterministic() else ""
    digest = hashlib.sha256(program.encode()).hexdigest()[:16]
    return f"programs{suffix}/{digest}"
