"""Whole values of variables of which each process has some parts.

All processes read them together. Or the first one reads and writes them alone,
as to save or to restore a model, and the others follow.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._cluster.agreement import all_gather_bytes
from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._cluster.failures import errors_reported_to_all
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import trees
from keras_conflux._common.contexts import Setting
from keras_conflux._compat.replicated_extended import note_assigned
from keras_conflux._replication import common_state
from keras_conflux._replication import state

_READ = "read"
_places: Setting[dict[int, int] | None] = Setting(None)
"""The places of variables, by their ids, while the first process is alone."""


@contextlib.contextmanager
def led(target: Any) -> Iterator[None]:
    """See `parts.led`."""
    found = filter(state.is_in_parts, state.variables_of(target))
    variables = [*map(state.backing, found)]
    if process_count() == 1 or not variables or _places.get() is not None:
        yield
    elif process_index() == 0:
        places = {id(variable): i for i, variable in enumerate(variables)}
        try:
            with _places.to(places):
                yield
        finally:
            _told(None)
    else:
        yield
        while (told := _told(None)) is not None:
            _follow(variables[told[0]], told[1])


def joined(variable: Any, own: np.ndarray) -> np.ndarray:
    """Returns the entries of all processes, in the order of their ranks."""
    if process_count() == 1:
        return own
    _tell(variable, _READ)
    what = f"reading a sharded variable of shape {variable.shape}"
    with errors_reported_to_all(what):
        assert_same_place(what)
        joined = b"".join(all_gather_bytes(own.tobytes()))
        return np.frombuffer(joined, own.dtype)


def note_whole(variable: Any, value: Any, method: str = "assign") -> None:
    """Notes a whole value that a variable is given, outside of replicas.

    All processes give it the same: they compare it as assignments of copies.
    """
    if process_count() == 1 or not tf.executing_eagerly():
        return
    value = tf.convert_to_tensor(value)
    if _tell(variable, method):
        broadcast_bytes(0, value.numpy().tobytes(), trees.bytes_of(variable))
    ((total, norm),) = common_state.sums_of([value])
    if method != "assign":
        sign = 1 if method == "assign_add" else -1
        total = variable.assigned[0] + sign * total
        norm += variable.assigned[1]
    variable.assigned = [total, norm]
    note_assigned(variable)


def _tell(variable: Any, method: str) -> bool:
    """Tells the others what the first process does alone, if it does."""
    place = (_places.get() or {}).get(id(variable))
    if place is not None:
        _told([place, method])
    return place is not None


def _told(own: Any) -> Any:
    """Returns what the first process tells the others."""
    what = "what the first process does with sharded variables"
    with errors_reported_to_all(what):
        return all_gather_json(what, own)[0]


def _follow(variable: Any, method: str) -> None:
    """Does with a process' parts what the first one does with its own."""
    if method == _READ:
        variable.numpy()
        return
    told = broadcast_bytes(0, b"", trees.bytes_of(variable))
    value = np.frombuffer(told, variable.dtype.as_numpy_dtype)
    getattr(variable, method)(value.reshape(variable.layout.shape))
