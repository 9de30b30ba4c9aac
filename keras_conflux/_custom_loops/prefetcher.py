"""Moves batches ahead of use, a bounded number of them."""

import functools
import queue
import threading
from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
from typing import Any
from typing import TypeVar

from keras_conflux._common import arguments
from keras_conflux._compat import keras_iterators
from keras_conflux._data.batches import Batches
from keras_conflux._data.transfer import move_at_once
from keras_conflux._devices.device import devices as find_devices

V = TypeVar("V")

_JOIN_TIMEOUT = 5
"""The seconds for which a closed iterator waits for its thread."""


def prefetch(
    batches: Iterable[V], device: int | str, *, ahead: int = 2
) -> Batches[V]:
    """Moves batches to a device before they are asked for.

    A thread draws and moves them while the program works on the ones before. It
    begins with the first batch of an epoch, and ends with the last one, with an
    error or when the iterator is closed or forgotten, as after a `break`, and
    frees its batches. For a model's replicas see `keras_conflux.distribute`.

    An error of `batches` is raised where its batch would have come. An
    iterable that keeps settings by thread, as Keras does with its
    distribution, does not see the program's.

    Args:
        batches: A `tf.data.Dataset`, a list or any other iterable of trees,
            see `keras_conflux.to_device`. A generator, or another iterator, has
            one epoch.
        device: An index or a name, see `keras_conflux.devices`.
        ahead: The number of batches that may wait on the device, besides the
            ones that the program holds; at least 1.

    Returns:
        An iterable over the batches. Iterate over it once per epoch. `len` is
        the number of batches, where `batches` tells it.

    Raises:
        DeviceError: If the device does not exist.
        TypeError: If `batches` cannot be iterated over. While it is, if a
            model, optimizer, metric or dataset is in a batch.
        ValueError: If `ahead` is below 1. While it is iterated over, if
            `batches` is an iterator that has ended.

    Example:
        ```python
        model = build_model()
        for inputs, targets in kc.prefetch(dataset, kc.devices()[0]):
            print(loss_fn(targets, model(inputs)).numpy())
        ```
    """
    arguments.assert_batches(batches)
    arguments.assert_count("ahead", ahead, "a number of batches")
    (chosen,) = find_devices([device])
    move = functools.partial(move_at_once, device=chosen)
    ready = functools.partial(run_ahead, function=move, ahead=ahead)
    return Batches(batches, ready)


def run_ahead(
    source: Iterable[Any], function: Callable[[Any], Any], ahead: int
) -> Iterator[Any]:
    """Yields `function` of items, which a thread computes ahead."""
    worker = _Worker(source, function, ahead)
    # It holds the worker, not this generator, which can so be forgotten.
    thread = threading.Thread(
        target=worker.run, name="conflux-prefetch", daemon=True
    )
    thread.start()
    try:
        while result := worker.results.get():
            worker.room.release()
            yield result.pop()  # a name would keep it after its use
        if worker.error is not None:
            raise worker.error
    finally:
        worker.stop()
        if thread is not threading.current_thread():
            thread.join(_JOIN_TIMEOUT)


class _Worker:
    """Computes results for as long as there is room for them."""

    def __init__(
        self, source: Iterable[Any], function: Callable[[Any], Any], ahead: int
    ) -> None:
        self._source = source
        self._function = function
        self._stopped = False
        self.room = threading.Semaphore(ahead)
        """The number of further results that may wait."""
        self.results: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        """Lists of one result, and an empty one behind the last."""
        self.error: BaseException | None = None
        """Why there are no more, if something was raised."""

    def run(self) -> None:
        try:
            # An item that is put belongs to the reader, who empties the list:
            # whether there is more is not to be read from it.
            for item in self._items():
                self.results.put([self._function(item)])
                del item  # or it would be kept until the next one comes
        except BaseException as error:
            self.error = error
        self.results.put([])

    def stop(self) -> None:
        """Ends `run` after the result that it is at, and frees the others."""
        self._stopped = True
        self.room.release()
        while not self.results.empty():
            self.results.get()

    def _items(self) -> Iterator[Any]:
        """Draws an item when there is room for its result."""
        items = iter(self._source)
        while self.room.acquire() and not self._stopped:
            try:
                yield keras_iterators.next_of(items)
            except StopIteration:
                return
