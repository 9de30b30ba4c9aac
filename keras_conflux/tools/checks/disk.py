"""How fast a checkpoint is written and read."""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

from keras_conflux.tools.checks.progress import doing
from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong

_MEGABYTES = 256


def check(options: argparse.Namespace) -> Passed:
    """Writes a file aside, renames it, and reads it."""
    directory: Path = options.directory
    doing(f"a file of {_MEGABYTES} MB in {directory}")
    other = "keras-conflux check --directory ... with another directory"
    block = os.urandom(10**6)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="conflux-check-", dir=directory))
    except OSError as error:
        raise Wrong(f"{directory}: {error.strerror or error}", other) from None
    aside, final = folder / "new", folder / "file"
    try:
        began = time.perf_counter()
        with open(aside, "wb") as file:
            for _ in range(_MEGABYTES):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(final)
        written = time.perf_counter() - began
        began = time.perf_counter()
        with open(final, "rb") as file:
            same = all(
                file.read(len(block)) == block for _ in range(_MEGABYTES)
            )
        read = time.perf_counter() - began
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise Wrong(f"{directory}: {error.strerror or error}", other) from None
    finally:
        aside.unlink(missing_ok=True)
        final.unlink(missing_ok=True)
        folder.rmdir()
    if not same:
        raise Wrong(
            f"{directory}: what is read differs from what was written", other
        )
    speeds = [_MEGABYTES / 1e3 / seconds for seconds in (written, read)]
    return Passed(
        f"{directory} writes {speeds[0]:.1f} GB/s, reads {speeds[1]:.1f} GB/s, "
        f"has {free / 1e9:.0f} GB left",
        {"write_gb_per_second": speeds[0], "read_gb_per_second": speeds[1]},
    )
