"""`Throughput`: the speed of `fit`, and its waits, in the logs."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_conflux._cluster.agreement import assert_same_place
from keras_conflux._cluster.agreement import gather_rows
from keras_conflux._common import arguments
from keras_conflux._common.user_warnings import warn
from keras_conflux._fit.input import execution_plan
from keras_conflux._fit.input import measurements
from keras_conflux._fit.input.calls import LogSource
from keras_conflux._fit.input.measurements import Measurements

KEYS = ("samples_per_second", "step_ms", "input_wait", "compile_s", "peak_gib")
_Logs = dict[str, Any] | None
_USUAL = tuple(key for key in KEYS if key != "compile_s")
_FAST = ("samples_per_second",)
"""Keys of values that are large where a process is fast."""


class Throughput(LogSource):
    """Adds to the logs of each epoch how fast it was.

    So `History`, the progress bar, `CSVLogger`, `TensorBoard` and other loggers
    show it, wherever this callback stands among the others. `fit` measures it
    in any case: the callback does nothing at a batch, and costs no time there.

    The first execution of a program compiles it. Its time is `compile_s`,
    which only `keys` adds, and its samples do not count, unless all executions
    of the epoch are of this kind. Validation does not count either.

    | key | meaning |
    |---|---|
    | `samples_per_second` | samples of global batches |
    | `step_ms` | milliseconds of a step, without the wait for its batch |
    | `input_wait` | the fraction of the time that `fit` waits for batches |
    | `compile_s` | seconds of executions that compile a program |
    | `peak_gib` | the most memory that a GPU has needed so far, in GiB |

    `peak_gib` is missing on CPU devices. Without replicas nothing is measured,
    as a warning says: `kc.replicate(model, devices=1)` is enough.

    Where several processes train together, all of them need the callback, and
    each value is the slowest process', or the largest one.

    Args:
        keys: The values to add; by default all but `compile_s`.
        prefix: The beginning of the names in the logs, such as `"speed/"`.

    Raises:
        ValueError: If there is no such key.

    Example:
        ```python
        model = kc.replicate(build_model())
        model.compile("adam", "mse")
        speed = kc.Throughput()
        history = model.fit(dataset, epochs=2, verbose=0, callbacks=[speed])
        print(history.history["samples_per_second"])
        ```
    """

    def __init__(self, keys: Sequence[str] = _USUAL, prefix: str = "") -> None:
        super().__init__()
        arguments.assert_is(keys, Iterable, f"keys of {', '.join(KEYS)}")
        keys = (keys,) if isinstance(keys, str) else tuple(keys)
        unknown = [key for key in keys if key not in KEYS]
        if unknown:
            raise ValueError(
                f"Expected keys of {', '.join(KEYS)}. Got: {', '.join(unknown)}"
            )
        self.keys = keys
        self.prefix = prefix
        self._measured: Measurements | None = None
        self._strategy: Any = None
        self._began = 0.0
        self._values: dict[str, float | None] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Finds the measurements of this call of `fit`.

        Args:
            logs: Not used.
        """
        assert self.model is not None  # Keras has set it
        found = execution_plan.measured(self.model)
        self._measured, self._strategy = found or (None, None)
        if found is None:
            warn(
                f"{self.model.name}: `Throughput` measures training on "
                "replicas, and adds nothing to the logs here. "
                "`keras_conflux.replicate(model, devices=1)` is enough."
            )

    def on_epoch_begin(self, epoch: int, logs: _Logs = None) -> None:
        """Starts the clock.

        Args:
            epoch: The number of the epoch, from 0.
            logs: Not used.
        """
        if self._measured:
            self._measured.reset()
        self._began, self._values = measurements.clock(), None

    def on_test_begin(self, logs: _Logs = None) -> None:
        """Stops the clock where validation begins.

        Args:
            logs: Not used.
        """
        if self._measured:
            self._stop(self._measured)

    def on_epoch_end(self, epoch: int, logs: _Logs = None) -> None:
        """Adds the values to the logs.

        Args:
            epoch: The number of the epoch, from 0.
            logs: The logs to which the values are added.
        """
        if self._measured is None:
            return
        values = self._stop(self._measured)
        if self._strategy.communicator.spans_processes:
            assert_same_place(f"the throughput of epoch {epoch}")
            values = _of_processes(values)
        if logs is not None:
            logs.update(
                (self.prefix + key, values[key])
                for key in self.keys
                if values[key] is not None
            )

    def _stop(self, measured: Measurements) -> dict[str, float | None]:
        """Returns the values of the epoch, without all that follows.

        A value is `None` where it is not known.
        """
        # Steps of validation would be added.
        if self._values is not None:
            return self._values
        seconds = measurements.clock() - self._began
        work = measured.other
        if work.steps:
            seconds -= measured.first.seconds
        else:
            work = measured.first
        peaks = [
            tf.config.experimental.get_memory_info(each)["peak"] / 2**30
            for each in self._strategy.devices
            if each.kind == "GPU"
        ]
        self._values = {
            "samples_per_second": _ratio(work.samples, seconds) or None,
            "step_ms": 1e3 * _ratio(seconds - measured.waited, work.steps),
            "input_wait": _ratio(measured.waited, seconds),
            "compile_s": measured.first.seconds,
            "peak_gib": max(peaks, default=None),
        }
        return self._values


def _ratio(amount: float, of: float) -> float:
    return float(amount / of) if of > 0 else 0.0


def _of_processes(values: dict[str, float | None]) -> dict[str, float | None]:
    """Returns the values of the slowest process, the same in all."""
    rows = gather_rows(np.array([values[key] or 0.0 for key in KEYS]))
    least, most = rows.min(0).tolist(), rows.max(0).tolist()
    return {
        key: None if values[key] is None else low if key in _FAST else high
        for key, low, high in zip(KEYS, least, most, strict=True)
    }
