"""Values that processes give each other: each to all, or the first to all."""

import os
from typing import Any

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common.user_warnings import warn
from keras_conflux._extensions.resume import checkpoint_files
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.checkpoint_files import Saved
from keras_conflux._extensions.resume.checkpoint_files import directory_of


def read_newest(directory: str | os.PathLike[str]) -> Saved | None:
    """Returns the newest checkpoint that is whole; warns of those that are not.

    The first process reads it. The others may have no access to its files.
    """
    what = "reading a checkpoint"
    with errors_reported_to_all(what):
        saved = _newest(directory) if process_index() == 0 else None
        own = None if saved is None else (str(saved.path), saved.state)
        first, *_ = gathered(what, own)
    if process_index() == 0 or first is None:
        return saved
    return Saved(directory_of(first[0]), first[1])


def _newest(directory: str | os.PathLike[str]) -> Saved | None:
    passed = set()
    # Listed again each time: a training that writes there removes old ones.
    while left := [
        path
        for path in checkpoint_files.folders(directory)
        if path not in passed
    ]:
        passed.add(left[0])
        try:
            return checkpoint_files.read(left[0])
        except checkpoint_files.Damage as error:
            if left[0] not in checkpoint_files.folders(directory):
                continue
            before = "The one before it is used."
            warn(
                f"The checkpoint {left[0]} is not used: {error}. "
                f"{before if left[1:] else 'There is no other.'}"
            )
    return None


def gathered(what: str, own: Any) -> list[Any]:
    """Returns the plain values of all processes, in their order."""
    if process_count() == 1:
        return [own]
    content = plain_values.to_bytes(own)
    lengths = all_gather_json(what, len(content))
    return [
        plain_values.from_bytes(broadcast_bytes(index, content, length))
        for index, length in enumerate(lengths)
    ]
