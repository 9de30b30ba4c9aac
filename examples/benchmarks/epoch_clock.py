"""A clock that a run of `fit` starts and stops."""

import keras

from .measured import Clock


class EpochClock(keras.callbacks.Callback):
    """Takes the time of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        """Starts the clock."""
        self.clock.start()

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        """Stops it."""
        self.clock.stop()
