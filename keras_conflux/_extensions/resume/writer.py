"""Writes checkpoints, in a thread while training goes on."""

import contextlib
import pathlib
from collections.abc import Callable
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume import storage
from keras_conflux._extensions.resume import stored_arrays
from keras_conflux._extensions.resume.checkpoint_files import FORMAT
from keras_conflux._extensions.resume.checkpoint_files import STATE
from keras_conflux._extensions.resume.checkpoint_files import WEIGHTS
from keras_conflux._extensions.resume.compat import weight_files
from keras_conflux._extensions.resume.model_state import ModelState
from keras_conflux._extensions.resume.stored_arrays import Arrays


class CheckpointWriter:
    """Writes into a directory that no other training writes into."""

    def __init__(self, directory: pathlib.Path) -> None:
        self._root = directory
        self._thread = ThreadPoolExecutor(1, "conflux-checkpoint")
        self._writing: Future[str] | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Makes the directory, keeps it from others, and ends the writing."""
        what = "opening the directory of the checkpoints"
        with contextlib.ExitStack() as stack:
            if process_index() == 0:
                with errors_reported_to_all(what):
                    stack.enter_context(storage.locked(self._root))
                    storage.remove_unfinished(self._root)
            stack.enter_context(self._thread)
            stack.callback(self.wait)
            yield

    def start(self, write: Callable[[], str]) -> None:
        """Lets the thread write. See `write`."""
        self._writing = self._thread.submit(write)

    def wait(self) -> None:
        """Waits until a checkpoint is written. A full disk only warns."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            said = writing.result()
        except OSError as error:
            said = (
                f"A checkpoint could not be written: {error}. Training goes "
                "on, and the checkpoints before stay."
            )
        if said:
            warn(said)


def write(
    root: pathlib.Path,
    position: tuple[int, int],
    model: ModelState,
    state: dict[str, Any],
    keep: int,
) -> str:
    """Writes a checkpoint, removes old ones, and tells if one could not go.

    The position is the number of steps done, and the epoch.
    """
    final = checkpoint_files.new_path(root, *position)
    with storage.new_folder(final) as folder:
        try:
            weight_files.write(model.weights, folder / WEIGHTS)
        except RuntimeError as error:  # h5py's, where a disk is full
            raise OSError(str(error)) from error
        arrays: Arrays = {}
        told = {
            "format": FORMAT,
            "digest": checkpoint_files.digest_of(folder, WEIGHTS),
            "state": plain_values.encode(state | model.beside, arrays),
        }
        stored_arrays.write(folder / STATE, told, arrays)
    try:
        for old in _replaced(root, final, keep):
            storage.remove(old)
    except OSError as error:
        return f"An older checkpoint could not be removed: {error}."
    return ""


def _replaced(
    root: pathlib.Path, final: pathlib.Path, keep: int
) -> list[pathlib.Path]:
    """Returns former checkpoints of the same step, and those beyond `keep`."""
    found = checkpoint_files.folders(root)  # the newest first
    newest = {checkpoint_files.position_of(x)[:2]: x for x in reversed(found)}
    kept = [*newest.values()][-keep:]
    return [path for path in found if path not in (*kept, final)]
