"""A training that tells what it computes as soon as it is known.

It trains twice, saves, evaluates and predicts. At each of its places it calls
what it is given, so that a process can do something wrong there.
"""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from local_cases import Parts

import keras_conflux as kc

EPOCHS = 3
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "steps_per_execution": {"steps_per_execution": 2},
    "accumulation": {"gradient_accumulation_steps": 3},
}
SIZES = ([5, 4, 3], [16, 2, 9, 7, 1], [3, 8, 8, 1])
"""How many samples the batches of each process have."""
SIZES_OF_VALIDATION = ([4, 4], [3], [1, 2])


@dataclasses.dataclass
class Training:
    """What is trained, and whom it tells.

    Args:
        form: One of `FORMS`.
        parts: The data of this process, or those of all.
        tell: Called with a name and a value.
        at: Called with the name of a place, and the model. Where data are
            drawn, it returns whether they are to be others.
        directory: Where files go.
        resumes_with: What restores an earlier attempt, if anything does.
        fewer: How many batches of an epoch this process leaves out.
        other: What is made otherwise in this process.
    """

    form: str
    parts: Parts
    tell: Callable[[str, Any], None]
    at: Callable[..., Any] = lambda *_: None
    directory: pathlib.Path | None = None
    resumes_with: str | None = None
    fewer: int = 0
    other: str | None = None

    def run(self, replicate: Callable[[keras.Model], Any]) -> None:
        model = made(self.form, self.at, self.other)
        replicate(model)
        # Keras leaves the epoch where it has restored a training to the next
        # `fit` of the model, so a script that is restored has one.
        for call in range(1 if self.resumes_with == "BackupAndRestore" else 2):
            self.at("between fits", model)
            history = model.fit(
                self._data(SIZES, "data", self.fewer),
                epochs=EPOCHS,
                verbose=0,
                validation_data=self._data(
                    SIZES_OF_VALIDATION, "validation data"
                ),
                callbacks=[*self._saving(call), Watch(call, self)],
            )
            for name, values in history.history.items():
                for epoch, value in zip(history.epoch, values, strict=True):
                    self.tell(f"{name} of epoch {epoch} of fit {call}", value)
            data = self._data(SIZES, "validation data")
            shown = model.evaluate(data, verbose=0)
            self.tell(f"evaluated after fit {call}", shown)
        x = np.concatenate([x for x, _ in Parts(2).batches()])
        self.tell("predicted", model.predict(x, batch_size=9, verbose=0))
        variables = [*model.weights, *model.optimizer.variables]
        for position, variable in enumerate(variables):
            self.tell(f"variable {position}", variable.numpy())

    def _saving(self, call: int) -> list[Any]:
        if self.directory is None:
            return []
        path = self.directory / f"fit-{call}"
        if self.resumes_with == "Resume":
            return [kc.Resume(path, every=2)]
        if self.resumes_with == "BackupAndRestore":
            return [keras.callbacks.BackupAndRestore(path)]
        return [keras.callbacks.ModelCheckpoint(path.with_suffix(".keras"))]

    def _data(self, sizes: Any, place: str, fewer: int = 0) -> tf.data.Dataset:
        batches = self.parts.batches(sizes)
        batches = batches[: len(batches) - fewer]

        def drawn() -> Any:
            for x, y in batches:
                yield (x + 1, y) if self.at(place) else (x, y)

        spec = tf.TensorSpec([None, 8]), tf.TensorSpec([None, 1])
        data = tf.data.Dataset.from_generator(drawn, output_signature=spec)
        known = tf.data.experimental.assert_cardinality(len(batches))
        return data.apply(known)


class Watch(keras.callbacks.Callback):
    """Tells the logs, and is at the places of a `fit`."""

    def __init__(self, call: int, training: Training) -> None:
        super().__init__()
        self._call, self._training = call, training
        self._epoch = 0

    def state_dict(self):
        return {"epoch": self._epoch}

    def load_state_dict(self, state):
        self._epoch = state.get("epoch", self._epoch)

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        self._tell(f"batch {batch}", logs)
        self._training.at("train batch", self.model)

    def on_test_batch_end(self, batch, logs=None):
        self._tell(f"validation batch {batch}", logs)
        self._training.at("validation batch", self.model)

    def on_epoch_end(self, epoch, logs=None):
        self._tell("end", logs)
        self._training.at("epoch end", self.model)

    def _tell(self, place, logs):
        of = f"of epoch {self._epoch} of fit {self._call}"
        for name, value in logs.items():
            self._training.tell(f"{name} at {place} {of}", value)


class Checked(layers.Layer):
    """Is saved somewhere, and may do something else in the graph."""

    at: Callable[..., Any] = lambda *_: None

    def build(self, shape):
        self.is_bad = tf.Variable(False, trainable=False)
        self.has_branch = tf.Variable(False, trainable=False)

    def call(self, x):
        nan = tf.where(self.is_bad, float("nan"), 0.0)
        x = tf.cond(self.has_branch, lambda: x + 1.0, lambda: x)
        return tf.debugging.check_numerics(x + nan, "not finite")

    def save_own_variables(self, store):
        self.at("saving")
        super().save_own_variables(store)


def made(
    form: str, at: Callable[..., None], other: str | None = None
) -> keras.Model:
    keras.utils.set_random_seed(1)
    checked = Checked()
    checked.at = at
    model = keras.Sequential(
        [
            layers.Input((8,)),
            checked,
            layers.Dense(6, "relu" if other == "other activation" else "tanh"),
            layers.BatchNormalization(synchronized=True),
            layers.Dense(1),
        ]
    )
    model.layers[1].trainable = other != "frozen in one process"
    loss = "mae" if other == "other loss" else "mse"
    options = dict(FORMS[form])
    accumulated = options.pop("gradient_accumulation_steps", None)
    optimizer = keras.optimizers.SGD(
        0.05, momentum=0.9, gradient_accumulation_steps=accumulated
    )
    model.compile(
        optimizer, loss, metrics=["mae"], jit_compile=False, **options
    )
    return model
