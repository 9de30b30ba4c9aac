"""Which callbacks must see every batch, so that a call may run but one."""

from typing import Any

import keras

from keras_conflux._compat import keras_internals


def needs_every_batch(callback: Any) -> bool:
    """Whether a callback has something to do at each batch."""
    return any(_overrides(callback, hook) for hook in _HOOKS)


_HOOKS = [
    f"on_{kind}batch_{when}"
    for kind in ("", "train_", "test_")
    for when in ("begin", "end")
]


def _overrides(callback: Any, hook: str) -> bool:
    if hook in vars(callback):  # as LambdaCallback sets it
        return True
    owner = next(
        (kind for kind in type(callback).__mro__ if hook in vars(kind)), None
    )
    if owner in (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.BackupAndRestore,
    ):
        return getattr(callback, "save_freq", 1) not in ("epoch", False)
    if owner is keras.callbacks.TensorBoard:
        return keras_internals.tensorboard_needs_batches(callback)
    return owner not in (
        keras.callbacks.Callback,
        keras.callbacks.ProgbarLogger,
    )
