"""The callbacks of a `fit` that can be resumed."""

from typing import Any

import keras

from keras_conflux._extensions.resume.compat import private_state
from keras_conflux._extensions.resume.resumable_fit import ResumableFit


class ResumableCallbacks(keras.callbacks.CallbackList):
    """Tells a `ResumableFit` of events, before or after all callbacks.

    Args:
        callbacks: The user's callbacks, and the ones that Keras adds.
        model: Callbacks get it when the training begins, as they do in `fit`.
        params: The parameters of callbacks, but the number of steps.
    """

    def __init__(
        self,
        callbacks: list[Any],
        model: keras.Model,
        params: dict[str, Any],
    ) -> None:
        super().__init__(callbacks, add_history=True)
        self._trained = model
        self._told = params
        self.training: ResumableFit | None = None
        """Set before `fit` begins."""

    def on_train_begin(self, logs: Any = None) -> None:
        """Restores, or begins."""
        assert self.training is not None
        self.set_model(self._trained)
        self.set_params({**self._told, "steps": self.training.steps_per_epoch})
        super().on_train_begin(logs)
        self.training.begin_training()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Restores values that callbacks and Keras have set anew."""
        super().on_epoch_begin(epoch, logs)
        assert self.training is not None
        self.training.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Saves, if it is time."""
        assert self.training is not None
        private_state.flush_callbacks(self)
        self.training.before_step(batch)
        super().on_train_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts the steps."""
        super().on_train_batch_end(batch, logs)
        assert self.training is not None
        self.training.after_step(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Saves, if it is time."""
        super().on_epoch_end(epoch, logs)
        assert self.training is not None
        self.training.end_epoch(epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the program, if that is due."""
        super().on_train_end(logs)
        assert self.training is not None
        self.training.end_training()
