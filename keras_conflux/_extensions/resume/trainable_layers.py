"""Which layers are trained, where a callback freezes or frees some."""

import keras

from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models


class TrainableLayers:
    """Tells which layers are no longer as at the begin, and sets them."""

    def __init__(self, model: keras.Model) -> None:
        self._model = model
        self._before = self._now()
        self.note_traced()

    def note_traced(self) -> None:
        """Notes the layers that the steps traced next train."""
        self._traced = self._model.train_function, self._now()

    def changed(self) -> list[bool] | None:
        """Returns which layers are trained, `None` if those at the begin."""
        now = self._now()
        function, traced = self._traced
        if self._model.train_function is not function:
            self.note_traced()
        elif _differ(traced, now):
            warn(
                "A callback has set `trainable` of a layer, and the steps are "
                "those that were traced before, so this training cannot be "
                "resumed exactly. Call model.make_train_function(force=True) "
                "after it."
            )
        return [*now.values()] if _differ(self._before, now) else None

    def restore(self, saved: list[bool] | None) -> None:
        """Freezes and frees layers, as `changed` has told."""
        now = self._now()
        if saved is None:
            wanted = now | self._before
        elif len(saved) == len(now):
            wanted = dict(zip(now, saved, strict=True))
        else:
            raise ValueError(
                "A callback had changed which layers are trained, and the "
                f"checkpoint was saved with {len(saved)} layers; here are "
                f"{len(now)}. Train the model that was saved, or use another "
                "directory."
            )
        if wanted == now:
            return
        # Layers inside of others come after them, and are set by them, too.
        for layer, is_trained in wanted.items():
            layer.trainable = is_trained
        self._model.make_train_function(force=True)
        self.note_traced()

    def _now(self) -> dict[keras.layers.Layer, bool]:
        layers = keras_models.all_layers(self._model)
        return {layer: bool(layer.trainable) for layer in layers}


def _differ(
    before: dict[keras.layers.Layer, bool], now: dict[keras.layers.Layer, bool]
) -> bool:
    """Whether a layer has changed. More of them may have been made since."""
    return any(before.get(each, flag) != flag for each, flag in now.items())
