"""Where checkpoints lie: a directory of this machine, or one with a URL.

A checkpoint is whole or not there. On this machine its folder is renamed when
all files are on the disk. Elsewhere folders have no renames that happen at
once, but each file is put in place at once. So the file that has the digests of
the others is put last, and taken away first.
"""

import contextlib
import fcntl
import os
import pathlib
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from keras_conflux._resume import checkpoint_files
from keras_conflux._resume.checkpoint_files import STATE

_OWNER = ".owner"


def storage_of(root: pathlib.Path) -> "Storage":
    """Returns the storage that a directory is in, from `directory_of`."""
    is_here = isinstance(root, pathlib.PosixPath)
    return Storage(root) if is_here else RemoteStorage(root)


class Storage:
    """A directory of this machine, which only one training writes to.

    Args:
        root: Where the checkpoints are.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root

    @contextlib.contextmanager
    def new_folder(self, final: pathlib.Path) -> Iterator[pathlib.Path]:
        """Puts a folder in place when its files have been written.

        Yields a folder of this machine.

        Args:
            final: What it will be. A former one is replaced.

        Raises:
            OSError: If it cannot be put there. Nothing remains of it then.
        """
        aside = final.with_name(f".{final.name}")
        self.remove(aside)
        aside.mkdir(parents=True)
        try:
            yield aside
            for path in (*aside.iterdir(), aside):
                _sync(path)
            self.remove(final)
            aside.rename(final)
            _sync(self.root)
        except BaseException:
            self.remove(aside)
            raise

    @contextlib.contextmanager
    def file(self, path: pathlib.Path) -> Iterator[pathlib.Path]:
        """Yields where this machine has a file."""
        yield path

    def put_text(self, path: pathlib.Path, text: str) -> None:
        """Writes a file, or replaces it at once.

        Raises:
            OSError: If it cannot be written.
        """
        aside = path.with_suffix(".new")
        aside.write_text(text)
        aside.replace(path)

    def remove(self, folder: pathlib.Path) -> None:
        """Removes a folder, if it is there.

        It loses its name first. With some of its files gone, it would look
        like a checkpoint that has been damaged.
        """
        nameless = folder.with_name(f".{folder.name.lstrip('.')}.old")
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(nameless)
        with contextlib.suppress(FileNotFoundError):
            folder.rename(nameless)
            shutil.rmtree(nameless)

    def remove_unfinished(self) -> None:
        """Removes what a process that was killed has left half-written."""
        for path in self.root.glob(".step-*"):
            self.remove(path)

    def put_aside(self, folder: pathlib.Path) -> pathlib.Path:
        """Makes a damaged checkpoint count no more.

        Returns:
            What can be removed; where it was, if this process may not do it.
        """
        aside = folder.with_name(f"damaged-{folder.name}")
        try:
            self.remove(aside)
            return folder.rename(aside)
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
            lock = os.open(self.root / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _not_writable(self.root, error) from error
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.read(lock, 20).decode() or "unknown"
                raise RuntimeError(
                    f"Another training, process {pid}, writes its checkpoints "
                    f"to {self.root}. End it, or give this one another "
                    "directory."
                ) from None
            os.ftruncate(lock, 0)
            os.pwrite(lock, str(os.getpid()).encode(), 0)
            yield
        finally:
            os.close(lock)


class RemoteStorage(Storage):
    """A directory that is named by a URL, such as one in a bucket.

    Args:
        root: A `upath.UPath`.
    """

    def __init__(self, root: Any) -> None:
        super().__init__(root)
        self._owner: str | None = None

    @contextlib.contextmanager
    def new_folder(self, final: pathlib.Path) -> Iterator[pathlib.Path]:
        """See `Storage`."""
        with tempfile.TemporaryDirectory(prefix="keras_conflux-") as folder:
            aside = pathlib.Path(folder)
            yield aside
            with _os_errors():
                owner = self._owner and (self.root / _OWNER).read_text()
            if owner != self._owner:
                raise RuntimeError(
                    "Another training has begun to write its checkpoints to "
                    f"{self.root}. End it, or give this one another directory."
                )
            with _os_errors():
                self._put(aside, final)

    @contextlib.contextmanager
    def file(self, path: pathlib.Path) -> Iterator[pathlib.Path]:
        """See `Storage`."""
        with tempfile.TemporaryDirectory(prefix="keras_conflux-") as folder:
            here = pathlib.Path(folder, path.name)
            _copy(path, here)
            yield here

    def put_text(self, path: pathlib.Path, text: str) -> None:
        """See `Storage`."""
        with _os_errors():
            path.write_text(text)

    def remove(self, folder: pathlib.Path) -> None:
        """See `Storage`."""
        with contextlib.suppress(FileNotFoundError):
            (folder / STATE).unlink()
        if folder.is_dir():
            for path in folder.iterdir():
                path.unlink()
            # Buckets have no folders; one goes with its last file.
            with contextlib.suppress(OSError, NotImplementedError):
                folder.rmdir()

    def remove_unfinished(self) -> None:
        """See `Storage`."""
        for folder in checkpoint_files.named_folders(self.root):
            if not any((folder / name).exists() for name in (STATE, _DAMAGED)):
                self.remove(folder)

    def put_aside(self, folder: pathlib.Path) -> pathlib.Path:
        """See `Storage`."""
        with contextlib.suppress(OSError), _os_errors():
            _copy(folder / STATE, folder / _DAMAGED)
            (folder / STATE).unlink()
        return folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Makes the directory, and notes whose it is.

        There are no locks. Who comes later takes it, and who was there before
        is told when it writes the next checkpoint.

        Raises:
            OSError: If nothing can be written there.
        """
        self._owner = secrets.token_hex(8)
        try:
            with _os_errors():
                self.root.mkdir(parents=True, exist_ok=True)
                (self.root / _OWNER).write_text(self._owner)
        except OSError as error:
            raise _not_writable(self.root, error) from error
        yield

    def _put(self, folder: pathlib.Path, final: pathlib.Path) -> None:
        self.remove(final)
        try:
            final.mkdir(parents=True, exist_ok=True)
            others = {*folder.iterdir()} - {folder / STATE}
            for path in (*others, folder / STATE):
                _copy(path, final / path.name)
        except BaseException:
            with contextlib.suppress(Exception):
                self.remove(final)
            raise


_DAMAGED = f"damaged-{STATE}"


@contextlib.contextmanager
def _os_errors() -> Iterator[None]:
    """Raises what a file system raises of its own kinds as `OSError`."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _copy(source: pathlib.Path, target: pathlib.Path) -> None:
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, 2**24)


def _sync(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_writable(root: pathlib.Path, error: OSError) -> OSError:
    return OSError(
        f"Checkpoints cannot be written to {root}: {error}. Pass `Resume` a "
        "directory that this user may write to."
    )
