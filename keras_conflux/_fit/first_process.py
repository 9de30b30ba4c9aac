"""Processes begin a training where the first one does.

Callbacks restore a model when training begins, each process for itself, from
files that the first one has written. The others may not see these files.
"""

from typing import Any

import keras

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._compat import keras_models
from keras_conflux._fit.input.per_batch_callbacks import runs_users_code
from keras_conflux._replication import synchronization


class FirstProcessLeads(keras.callbacks.Callback):
    """Gives all processes the first epoch and the weights of the first one.

    Args:
        model: What is trained.
        callbacks: Those of the user, which come before this one.
    """

    def __init__(self, model: keras.Model, callbacks: list[Any]) -> None:
        super().__init__()
        self._trained = model
        self._may_restore = any(map(_may_restore, callbacks))

    def on_train_begin(self, logs: Any = None) -> None:
        """Looks at what the callbacks before have left."""
        own = [keras_models.initial_epoch(self._trained), self._may_restore]
        told = all_gather_json("the first epoch", own)
        keras_models.set_initial_epoch(self._trained, told[0][0])
        if any(may_restore for _, may_restore in told):
            synchronization.synchronize(self._trained)


def led(model: keras.Model, callbacks: list[Any]) -> list[Any]:
    """Returns the callbacks of `fit`, with what has to come last."""
    given = [x for x in callbacks if not isinstance(x, FirstProcessLeads)]
    return [*given, FirstProcessLeads(model, given)]


def _may_restore(callback: Any) -> bool:
    is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
    return is_backup or runs_users_code(callback, "on_train_begin")
