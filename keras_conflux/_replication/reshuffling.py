"""Which models train on arrays in another order in each epoch."""

import weakref
from typing import Any

import keras

from keras_conflux._replication.model_options import assert_models

_chosen: Any = weakref.WeakKeyDictionary()
"""By model, what `replicate` was told."""


def check(reshuffle: Any, target: Any) -> None:
    """Raises unless a target of `replicate` may be told this.

    Raises:
        TypeError: If the target is no model, nor a tree of models.
        ValueError: If it is neither `True` nor `False`.
    """
    if reshuffle is None:
        return
    if not isinstance(reshuffle, bool):
        raise ValueError(
            "`reshuffle` is True, if `fit` shuffles arrays in another order in "
            "each epoch, or False, if it does what Keras does. Received: "
            f"reshuffle={reshuffle!r}."
        )
    says = "how `fit` of a model shuffles arrays"
    assert_models(target, "reshuffle", reshuffle, says)


def choose(model: Any, reshuffle: bool | None) -> None:
    """Notes what `replicate` was told; `None` leaves it as it is."""
    if reshuffle is not None:
        _chosen[model] = reshuffle


def forget(model: Any) -> None:
    """Forgets what `replicate` was told."""
    _chosen.pop(model, None)


def of(model: keras.Model) -> bool:
    """Whether `fit` shuffles arrays in another order in each epoch."""
    return _chosen.get(model, False)
