"""The directory of checkpoints, of which each is whole or not there.

A folder is renamed when all of its files are on the disk. A folder that has
files of others is not removed.
"""

import contextlib
import errno
import fcntl
import itertools
import os
import pathlib
import re
import socket
import stat
from collections.abc import Iterator

from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import signals

_LOCK = ".lock"
_LOCKED = re.compile(rb"\d+ on [^\n]*")
"""The content of the file of the lock: a process and its host."""
_FORMER = ".former"
_OLD = ".old"
_NAME = re.compile(r"\.?step-\d{12}-\d{6}(\.former)?(\.old)?")


class Storage:
    """A directory of checkpoints that only one training writes to."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def new_folder(self, final: pathlib.Path) -> Iterator[pathlib.Path]:
        """Yields a folder, and puts it in place when its files are written.

        A former one is replaced. Nothing remains of it after an `OSError`.
        """
        aside = final.with_name(f".{final.name}")
        self.remove(aside)
        aside.mkdir(parents=True)
        try:
            yield aside
            for path in (*aside.iterdir(), aside):
                _sync(path)
            self._replace(final, aside)
        except BaseException:
            self.remove(aside)
            raise

    def _replace(self, final: pathlib.Path, new: pathlib.Path) -> None:
        """Puts a folder in place of one that is kept until it is there."""
        former = final.with_name(f".{final.name}{_FORMER}")
        self.restore_former()
        self._remove_former(former)
        with contextlib.suppress(FileNotFoundError):
            final.rename(former)
        try:
            new.rename(final)
        except BaseException:
            self.restore_former()
            raise
        _sync(self.root)
        with contextlib.suppress(OSError):  # it is removed at the next start
            self._remove_former(former)

    def _remove_former(self, former: pathlib.Path) -> None:
        """Removes the replaced folder, or shows files of others there."""
        self.remove(former)
        if former.exists() and own_files(former) is None:
            name = former.name[1:].removesuffix(_FORMER)
            former.rename(_free_name(former.with_name(f"replaced-{name}")))

    def remove(self, folder: pathlib.Path) -> None:
        """Removes a folder, if it is there and only has files of this package.

        It loses its name first. With some of its files gone, it would look like
        a checkpoint that has been damaged.
        """
        name = folder.name.removeprefix(".").removesuffix(_OLD)
        nameless = folder.with_name(f".{name}{_OLD}")
        with contextlib.suppress(FileNotFoundError):
            _remove_own(nameless)
        with contextlib.suppress(FileNotFoundError):
            if own_files(folder) is not None:
                folder.rename(nameless)
                _remove_own(nameless)

    def restore_former(self) -> None:
        """Puts back folders that a killed process was about to replace."""
        for former in self.root.glob(f".step-*{_FORMER}"):
            final = former.with_name(former.name[1:].removesuffix(_FORMER))
            if _NAME.fullmatch(former.name) and not final.exists():
                with contextlib.suppress(OSError):  # to be read only
                    former.rename(final)

    def remove_unfinished(self) -> None:
        """Removes folders that a killed process has left half-written."""
        self.restore_former()
        for path in self.root.glob(".step-*"):
            self.remove(path)

    def put_aside(self, folder: pathlib.Path) -> pathlib.Path:
        """Renames a damaged checkpoint, if it can; returns where it is then."""
        if folder.is_symlink():
            return folder
        try:
            return folder.rename(
                _free_name(folder.with_name(f"damaged-{folder.name}"))
            )
        except OSError:
            return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory, and keeps other processes from it.

        Raises:
            OSError: If nothing can be written there.
            RuntimeError: If another training writes there.
        """
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(self.root / _LOCK, flags, 0o644)
        except OSError as error:
            raise self._not_writable(error) from error
        with open(lock, "rb+", buffering=0) as file:
            self._assert_own_lock(lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                other = os.pread(lock, 300, 0).decode("utf-8", "replace")
                other = other or "unknown"
                raise RuntimeError(
                    f"Another training, process {other}, writes its "
                    f"checkpoints to {self.root}. End it, or give this one "
                    "another directory."
                ) from None
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"A training locks the directory of its checkpoints, and "
                    f"the file system of {self.root} cannot ({error.strerror})"
                    ". Mount it with locks, or choose another directory.",
                ) from error
            os.ftruncate(lock, 0)
            here = f"{os.getpid()} on {socket.gethostname()}"
            os.pwrite(lock, here.encode(), 0)
            with signals.not_in_children(file.close):
                yield

    def _assert_own_lock(self, lock: int) -> None:
        is_regular = stat.S_ISREG(os.fstat(lock).st_mode)
        content = os.pread(lock, 300, 0) if is_regular else b"a device"
        if content and not _LOCKED.fullmatch(content):
            path = str(self.root / _LOCK)
            raise self._not_writable(
                FileExistsError(errno.EEXIST, "A file of others", path)
            )

    def _not_writable(self, error: OSError) -> OSError:
        return OSError(
            f"Checkpoints cannot be written to {self.root}: {error}. Pass "
            "`Resume` a directory that this user may write to."
        )


def own_files(folder: pathlib.Path) -> list[pathlib.Path] | None:
    """Returns the files of a checkpoint, `None` if it has anything else.

    Hidden folders are those that are written or removed.
    """
    if not _NAME.fullmatch(folder.name) or folder.is_symlink():
        return None
    found = [*folder.iterdir()] if folder.is_dir() else []
    files = [x for x in found if x.is_file() and not x.is_symlink()]
    names = {path.name for path in files}
    is_own = folder.name.startswith(".") or checkpoint_files.has_state(folder)
    known = names <= checkpoint_files.FILES and len(names) == len(found)
    return found if folder.is_dir() and is_own and known else None


def _remove_own(folder: pathlib.Path) -> None:
    """Removes a folder, unless it has files of others."""
    files = own_files(folder)
    if files is not None:
        for path in files:
            path.unlink()
        folder.rmdir()


def _free_name(path: pathlib.Path) -> pathlib.Path:
    """Returns a path where nothing is yet, like the given one."""
    if not os.path.lexists(path):
        return path
    numbered = (path.with_name(f"{path.name}.{i}") for i in itertools.count(1))
    return next(each for each in numbered if not os.path.lexists(each))


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
