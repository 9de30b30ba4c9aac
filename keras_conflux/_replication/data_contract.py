"""Whether processes read the same data, or each its own part."""

import weakref
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras

from keras_conflux._cluster.processes import process_count
from keras_conflux._replication import running
from keras_conflux._replication import traced_functions
from keras_conflux._replication.model_options import assert_models

DataContract: TypeAlias = Literal["global", "local"]
"""Whether the batches of a process are those of all processes, of which it
takes its rows, or its own part of them."""

_CONTRACTS = ("global", "local")
_chosen: Any = weakref.WeakKeyDictionary()
"""By model, what `replicate` was told."""
_followed: Any = weakref.WeakKeyDictionary()
"""By model, what its functions were made for."""


def check(data: str | None, target: Any) -> None:
    """Raises unless a target of `replicate` may have this contract.

    Raises:
        TypeError: If the target is no model, nor a tree of models.
        ValueError: If there is no such contract.
    """
    if data is None:
        return
    if data not in _CONTRACTS:
        raise ValueError(
            '`data` is "global", if all processes read the same batches, or '
            '"local", if each process brings its own part of them. Received: '
            f"data={data!r}."
        )
    says = "what `fit`, `evaluate` and `predict` of a model read"
    assert_models(target, "data", data, says)


def choose(model: Any, data: str | None) -> None:
    """Notes what `replicate` was told; `None` leaves it as it is.

    Raises:
        StrategyError: If the model is running by another one.
    """
    if data is not None:
        if process_count() > 1 and data != of(model):
            change = f"keras_conflux.replicate({model.name}, data={data!r})"
            running.assert_not_running([model], change)
        _chosen[model] = data


def forget(model: Any) -> None:
    """Forgets what `replicate` was told."""
    _chosen.pop(model, None)


def follow(model: keras.Model) -> None:
    """Drops functions of a model that were made for the other contract."""
    if process_count() == 1:
        return
    data = of(model)
    if _followed.setdefault(model, data) != data:
        traced_functions.forget(model)
        _followed[model] = data


def of(model: keras.Model) -> str:
    """Returns what the next call of `fit` will follow."""
    return _chosen.get(model) or _of_distribution()


def is_local(model: keras.Model) -> bool:
    """Whether each of several processes brings its own part of the data."""
    return _followed.get(model) == "local"


def _of_distribution() -> str:
    distribution = keras.distribution.distribution()
    shards = getattr(distribution, "auto_shard_dataset", True)
    return "global" if shards else "local"
