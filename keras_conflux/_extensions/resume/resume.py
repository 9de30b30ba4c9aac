"""The callback by which a training goes on where it was interrupted."""

import os
import re
import time
from collections.abc import Callable

import keras

from keras_conflux._common import arguments
from keras_conflux._compat import patching
from keras_conflux._compat import versions
from keras_conflux._extensions.resume.checkpoint_files import directory_of
from keras_conflux._extensions.resume.signals import Preemption

_UNITS = {"s": 1, "m": 60, "h": 3600}


class Resume(keras.callbacks.Callback):
    """Lets `fit` go on exactly where an earlier run of the script was ended.

    A script that is killed at any moment and started again ends with the same
    weights, optimizer, random numbers, `History` and best checkpoint as one
    that was never interrupted: bit by bit on the same
    CPU devices, and to rounding on GPUs or on another number of devices or
    processes. The guide *Interruptions* lists the conditions.

    Checkpoints are written in a thread, from copies that are taken between two
    steps. Their `model.weights.h5` can be read by plain Keras. The data is
    drawn again from the beginning of its epoch when a training is resumed.

    On `SIGTERM` and `SIGUSR1`, by which machines say that they are about to
    stop, and on `SIGHUP`, by which a terminal says that it is closed, training
    writes a checkpoint after the current step and ends with the exit code 143,
    138 or 129. `SIGHUP` is not heard under `nohup`.

    Args:
        directory: The directory of the checkpoints, of this training alone.
        every: When to write one: a time such as `"10m"`, or a number of steps.
            One more is written when the training has ended.
        keep: The number of checkpoints that stay, at least 1.
        signals: Names of signals that end the training with a checkpoint.
        strict: Whether data that is another each time, such as a shuffle
            without a seed, is an error instead of a warning, and so are
            optimizers that only a step of the model's own builds.

    Raises:
        ValueError: If an argument is wrong; from `fit`, if the checkpoint
            belongs to another model, other data or other callbacks, or to
            another training of this process.
        RuntimeError: From `fit`, if another training writes to the directory.
        OSError: From `fit`, if nothing can be written there.

    Example:
        ```python
        keras.utils.set_random_seed(7)
        model = kc.replicate(build_model())
        model.compile("adam", "mse")
        model.fit(dataset, epochs=2, callbacks=[kc.Resume("runs/a")], verbose=0)
        ```
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        every: int | str = "10m",
        keep: int = 2,
        signals: tuple[str, ...] = ("SIGTERM", "SIGUSR1", "SIGHUP"),
        strict: bool = False,
    ) -> None:
        super().__init__()
        versions.assert_in_place("resume", "kc.Resume")
        patching.begin()
        arguments.assert_count("keep", keep, "how many checkpoints stay")
        self.directory = directory_of(directory)
        self.every = every
        self.keep = keep
        self.signals = signals
        self.strict = strict
        self.resumed_at: tuple[int, int] | None = None
        """`(epoch, step)`, from 0, where the last `fit` went on, if it did."""
        self.pauses: list[float] = []
        """The seconds for which each checkpoint has held up training."""
        SavingInterval(every)
        Preemption(signals)


class SavingInterval:
    """Counts steps or, where a time such as `"10m"` is given, seconds."""

    def __init__(self, every: int | str) -> None:
        self._now: Callable[[int], float] = lambda step: step
        matched = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", str(every))
        if matched:
            self._length = float(matched[1]) * _UNITS[matched[2]]
            self._now = lambda _: time.monotonic()
        elif type(every) is int and every > 0:
            self._length = every
        else:
            raise ValueError(
                "`every` is a number of steps of at least 1, or a time such as "
                f'"30s", "10m" or "2h". Received: every={every!r}'
            )
        self.restart(0)

    def restart(self, step: int) -> None:
        """Counts from here, where so many steps are done in all epochs."""
        self._since = self._now(step)

    def is_over(self, step: int) -> bool:
        """Whether a checkpoint is due."""
        return self._now(step) - self._since >= self._length
