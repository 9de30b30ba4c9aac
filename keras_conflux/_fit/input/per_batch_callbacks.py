"""Which callbacks must see every batch, so that a call may run but one."""

from typing import Any

import keras

from keras_conflux._compat import keras_callbacks


def needs_every_batch(callback: Any) -> bool:
    """Whether a callback has something to do at each batch."""
    return any(_overrides(callback, hook) for hook in _HOOKS)


def may_steer_data(callback: Any) -> bool:
    """Whether code of the user's runs at each batch.

    It may tell a source of data what the next batch is to be.
    """
    return any(runs_users_code(callback, hook) for hook in _HOOKS)


def runs_users_code(callback: Any, hook: str) -> bool:
    """Whether a hook of a callback is neither Keras' nor this package's."""
    return _package(_owner(callback, hook)) not in ("keras", "keras_conflux")


_HOOKS = [
    f"on_{kind}batch_{when}"
    for kind in ("", "train_", "test_")
    for when in ("begin", "end")
]


def _overrides(callback: Any, hook: str) -> bool:
    owner = _owner(callback, hook)
    if owner is None:
        return True
    if owner in (
        keras.callbacks.ModelCheckpoint,
        keras.callbacks.BackupAndRestore,
    ):
        return getattr(callback, "save_freq", 1) not in ("epoch", False)
    if _package(owner) == "keras_conflux":
        return False  # ours look at batches where there are no replicas
    if owner is keras.callbacks.TensorBoard:
        return keras_callbacks.tensorboard_needs_batches(callback)
    return owner not in (
        keras.callbacks.Callback,
        keras.callbacks.ProgbarLogger,
    )


def _owner(callback: Any, hook: str) -> Any:
    """Returns the class that has a hook; `None` for the callback itself."""
    if hook in vars(callback):  # as LambdaCallback sets it
        return None
    return next(
        (kind for kind in type(callback).__mro__ if hook in vars(kind)),
        keras.callbacks.Callback,
    )


def _package(owner: Any) -> str | None:
    return None if owner is None else owner.__module__.split(".")[0]
