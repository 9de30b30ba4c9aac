"""Which layers and weights are trained, where a callback freezes some."""

from typing import Any

import keras

from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models


class TrainableLayers:
    """Tells what is no longer trained as at the begin, and sets that."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before = self._now()
        self.note_traced()

    def note_made(self) -> None:
        """Notes what has been made since, before callbacks change it."""
        now, (function, traced) = self._now(), self._traced
        self._before = now | self._before
        self._traced = function, now | traced

    def note_traced(self) -> None:
        """Notes what the steps traced next train."""
        self._traced = self._model.train_function, self._now()

    def changed(self) -> list[bool] | None:
        """Returns what is trained, `None` if it is the same as at the begin."""
        now = self._now()
        function, traced = self._traced
        if self._model.train_function is not function:
            self.note_traced()
        elif _differ(traced, now):
            warn(
                "A callback has set `trainable` of a layer or weight, and the "
                "steps are those that were traced before, so this training "
                "cannot be resumed exactly. Call "
                "model.make_train_function(force=True) after it."
            )
        return [*now.values()] if _differ(self._before, now) else None

    def restore(self, saved: list[bool] | None) -> None:
        """Freezes and frees layers and weights, as `changed` has told."""
        now = self._now()
        if saved is None:
            wanted = now | self._before
        elif len(saved) == len(now):
            wanted = dict(zip(now, saved, strict=True))
        else:
            raise ValueError(
                "A callback had changed what is trained, and the checkpoint "
                f"was saved with {len(saved)} layers and weights; here are "
                f"{len(now)}. Train the model that was saved, or use another "
                "directory."
            )
        if wanted == now:
            return
        # Layers inside of others, and weights, come after them, and are set
        # by them, too.
        for each in self._parts():
            each.trainable = wanted[id(each)]
        self._model.make_train_function(force=True)
        self.note_traced()

    def _now(self) -> dict[int, bool]:
        return {id(each): bool(each.trainable) for each in self._parts()}

    def _parts(self) -> list[Any]:
        return [*keras_models.all_layers(self._model), *self._model.weights]


def _differ(before: dict[int, bool], now: dict[int, bool]) -> bool:
    """Whether a part has changed. More of them may have been made since."""
    return any(before.get(each, flag) != flag for each, flag in now.items())
