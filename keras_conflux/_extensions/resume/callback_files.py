"""The files that callbacks append to, and how they are taken back.

Only known files of this training are touched: a CSV file that
begins as it left it, and event files whose names were noted when it made them.
Nothing is deleted: lines taken back are kept beside, where nobody reads them.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import socket
from collections.abc import Iterable
from typing import Any

from keras.callbacks import CSVLogger
from keras.callbacks import TensorBoard

from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import plain_files
from keras_conflux._extensions.resume.checkpoint_files import MALFORMED
from keras_conflux._extensions.resume.checkpoint_files import os_errors
from keras_conflux._extensions.resume.compat import (
    callbacks as private_callbacks,
)
from keras_conflux._extensions.resume.storage import free_name
from keras_conflux._extensions.resume.storage import storage_of

_COMPARED = 4096
"""How many bytes, up to where a file is cut, have to be the same as before."""
_EVENTS = "tfevents"
"""The part of file names by which TensorBoard knows its files."""
_FOLDERS_OF_EVENTS = ("train", "validation")
_UNDONE = "undone"


@dataclasses.dataclass(frozen=True)
class Written:
    """A file, up to where a training has written it."""

    callback: int
    """Which of the callbacks that write files."""
    name: str
    """Relative to the folder that the callback writes to, which may move."""
    length: int
    end: str
    """A digest of the last bytes."""


class CallbackFiles:
    """The files of `CSVLogger` and `TensorBoard` that a training has written.

    Args:
        callbacks: The callbacks of this process that write, among others.
        directory: The directory of the checkpoints. Gets a file that tells of
            writes before the first of them, and since the last.
    """

    def __init__(self, callbacks: list[Any], directory: pathlib.Path) -> None:
        kinds = CSVLogger | TensorBoard
        self._callbacks = [x for x in callbacks if isinstance(x, kinds)]
        self._journal = directory / ".files.json"
        self._began: list[Written] = []
        """The files that there were when the training began."""
        self._events: set[tuple[int, str]] = set()
        """The event files that this training has made, in all attempts."""
        self._why_no_journal = ""
        self._others: set[tuple[int, str]] = set()
        """The files that there were before this attempt."""

    def begin_anew(self) -> None:
        """Takes back writes of an attempt that left no checkpoint."""
        self._read_journal()
        self._take_back(self._began)
        self._began = self._now(self._logs())
        self._begin_journal()

    def go_on(self, saved: Any, over: bool) -> None:
        """Takes back writes since a checkpoint.

        Args:
            saved: The result of `written`.
            over: Whether the training has ended. Others may have written to
                the same files since.
        """
        self._read_journal()
        for callback in self._callbacks:
            if isinstance(callback, CSVLogger):
                callback.append = True
        if not over:
            self._take_back([Written(**each) for each in saved])
        self._begin_journal()

    def note_event_files(self) -> None:
        """Notes which event files this process has made. Soon after it has."""
        made_here = f".{socket.gethostname()}.{os.getpid()}."
        found = {each for each in self._event_files() if made_here in each[1]}
        new = found - self._others - self._events
        if new:
            self._events |= new
            self._write_journal()

    def written(self) -> list[dict[str, Any]]:
        """Returns the present state of each file."""
        self.note_event_files()
        self._flush()
        known = self._now([*self._logs(), *sorted(self._events)])
        return [dataclasses.asdict(each) for each in known]

    def _begin_journal(self) -> None:
        self._others = self._event_files()
        self._events &= self._others
        self._write_journal()

    def _take_back(self, known: list[Written]) -> None:
        self._flush()
        for each in known:
            if self._is_own(each.callback, each.name):
                self._cut(each)
        kept = {(each.callback, each.name) for each in known}
        for index, name in self._events - kept:
            if self._is_own(index, name):
                path = self._path(index, name)
                if path.exists():
                    path.rename(free_name(_aside(path)))

    def _cut(self, written: Written) -> None:
        callback = self._callbacks[written.callback]
        path = self._path(written.callback, written.name)
        is_log = isinstance(callback, CSVLogger)
        if is_log and (path != _path_of_log(callback) or not callback.append):
            return  # Keras writes another file, or this one anew.
        length = written.length
        if not path.exists():
            if length:
                warn(f"{path}, to which this training has written, is missing.")
            return
        if path.stat().st_size < length or written.end != _digest(path, length):
            warn(
                f"{path} has been changed by others since this training wrote "
                "it. It is left as it is, so some entries may be missing in it "
                "or come twice."
            )
            return
        if path.stat().st_size > length:
            _keep_rest(path, length)
            os.truncate(path, length)

    def _is_own(self, index: Any, name: Any) -> bool:
        """Whether a callback may have written a file in a checkpoint."""
        if index not in range(len(self._callbacks)):
            return False
        if isinstance(self._callbacks[index], CSVLogger):
            return name == _path_of_log(self._callbacks[index]).name
        folder, _, file = str(name).partition("/")
        return (
            folder in _FOLDERS_OF_EVENTS
            and _EVENTS in file
            and "/" not in file
            and not self._path(index, name).is_symlink()
        )

    def _path(self, index: int, name: str) -> pathlib.Path:
        callback = self._callbacks[index]
        if isinstance(callback, CSVLogger):
            return _path_of_log(callback).parent / name
        return pathlib.Path(callback.log_dir).absolute() / name

    def _logs(self) -> list[tuple[int, str]]:
        return [
            (index, _path_of_log(callback).name)
            for index, callback in enumerate(self._callbacks)
            if isinstance(callback, CSVLogger)
        ]

    def _event_files(self) -> set[tuple[int, str]]:
        return {
            (index, f"{folder}/{path.name}")
            for index, callback in enumerate(self._callbacks)
            if isinstance(callback, TensorBoard)
            for folder in _FOLDERS_OF_EVENTS
            for path in self._path(index, folder).glob(f"*{_EVENTS}*")
        }

    def _flush(self) -> None:
        for callback in self._callbacks:
            if isinstance(callback, TensorBoard):
                private_callbacks.flush_tensorboard(callback)

    def _now(self, files: Iterable[tuple[int, str]]) -> list[Written]:
        found = []
        for index, name in files:
            path = self._path(index, name)
            length = path.stat().st_size if path.exists() else 0
            found.append(Written(index, name, length, _digest(path, length)))
        return found

    def _read_journal(self) -> None:
        try:
            with os_errors(self._journal):
                text = plain_files.read_text(
                    self._journal.parent, self._journal.name
                )
            found = json.loads(text)
            began = [Written(**each) for each in found["began"]]
            events = {(index, name) for index, name in found["events"]}
        except OSError:
            return
        except MALFORMED as error:
            self._why_no_journal = f"it is a file of others ({error})"
            return
        self._began, self._events = began, events

    def _write_journal(self) -> None:
        if not self._callbacks:
            return
        if self._why_no_journal:
            self._warn_of_journal(self._why_no_journal)
            return
        journal = {
            "began": [dataclasses.asdict(each) for each in self._began],
            "events": sorted(self._events),
        }
        try:
            storage_of(self._journal).put_text(
                self._journal, json.dumps(journal)
            )
        except OSError as error:
            self._warn_of_journal(error)

    def _warn_of_journal(self, why: object) -> None:
        warn(
            f"{self._journal} could not be written: {why}. If training "
            "is interrupted, the files of its callbacks may have some "
            "entries twice."
        )


def _path_of_log(callback: CSVLogger) -> pathlib.Path:
    return pathlib.Path(callback.filename).absolute()


def _aside(path: pathlib.Path) -> pathlib.Path:
    """Returns a place for parts taken back, where TensorBoard sees none."""
    if _EVENTS in path.name:
        name = path.name.replace(_EVENTS, "events")
        return path.with_name(f"{_UNDONE}.{name}")
    return path.with_name(f"{path.name}.{_UNDONE}")


def _digest(path: pathlib.Path, length: int) -> str:
    """Returns a digest of the last bytes of the first `length` of a file."""
    content = b""
    if length:
        with open(path, "rb") as file:
            file.seek(max(0, length - _COMPARED))
            content = file.read(min(length, _COMPARED))
    return hashlib.sha256(content).hexdigest()


def _keep_rest(path: pathlib.Path, length: int) -> None:
    """Copies the part that will be cut to a file beside.

    Another program may have appended it where a log is shared, or go on from a
    copy of the checkpoints.
    """
    with open(path, "rb") as file, open(_aside(path), "ab") as kept:
        file.seek(length)
        shutil.copyfileobj(file, kept)
