"""Arrays that `fit` shuffles in another order in each epoch."""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

from keras_conflux._compat import keras_arrays

_local = threading.local()


@contextlib.contextmanager
def reshuffling(wanted: bool) -> Iterator[None]:
    """Lets data sets that this thread makes of arrays be shuffled like that."""
    before = getattr(_local, "wanted", False)
    _local.wanted = wanted
    try:
        yield
    finally:
        _local.wanted = before


def make_dataset(original: Callable, adapter: Any) -> Any:
    """Makes a data set of the arrays of an adapter."""
    wanted = getattr(_local, "wanted", False)
    if wanted and keras_arrays.shuffles_samples(adapter):
        return keras_arrays.reshuffled(adapter)
    return original(adapter)
