"""Options of `replicate` that a model keeps, such as `data`."""

import weakref
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras

from keras_conflux._cluster.processes import process_count
from keras_conflux._compat import keras_models
from keras_conflux._replication import running
from keras_conflux._replication import traced_functions
from keras_conflux._replication.strategy import check_microbatches

DataContract: TypeAlias = Literal["global", "local"]
"""Whether a process reads the batches of all processes, of which it takes its
rows, or its own part of them."""

_CONTRACTS = ("global", "local")
_data: Any = weakref.WeakKeyDictionary()
"""By model, the `data` that `replicate` was given."""
_applied: Any = weakref.WeakKeyDictionary()
"""By model, the `data` that its functions were made for."""
_reshuffle: Any = weakref.WeakKeyDictionary()
"""By model, the `reshuffle` that `replicate` was given."""
_microbatches: Any = weakref.WeakKeyDictionary()
"""By model, the `microbatches` that `replicate` was given."""


def check(
    target: Any, data: str | None, reshuffle: Any, microbatches: Any
) -> None:
    """Raises unless a target of `replicate` may have these options.

    Raises:
        TypeError: If one is given, and the target is no model, nor a tree of
            models.
        ValueError: If one has a value that it cannot have.
    """
    if data is not None:
        if data not in _CONTRACTS:
            raise ValueError(
                '`data` is "global", if all processes read the same batches, '
                'or "local", if each process brings its own part of them. '
                f"Received: data={data!r}."
            )
        says = "what `fit`, `evaluate` and `predict` of a model read"
        _assert_models(target, "data", data, says)
    if reshuffle is not None:
        if not isinstance(reshuffle, bool):
            raise ValueError(
                "`reshuffle` is True or False: whether `fit` shuffles arrays "
                "in another order in each epoch. Received: "
                f"reshuffle={reshuffle!r}."
            )
        says = "how `fit` of a model shuffles arrays"
        _assert_models(target, "reshuffle", reshuffle, says)
    if microbatches is not None:
        check_microbatches(microbatches)
        if target is not None:
            says = "in how many parts `fit` of a model runs a batch"
            _assert_models(target, "microbatches", microbatches, says)


def _assert_models(target: Any, option: str, value: Any, says: str) -> None:
    leaves = keras.tree.flatten(target)
    if not leaves or not all(isinstance(x, keras.Model) for x in leaves):
        kinds = sorted({type(leaf).__name__ for leaf in leaves})
        raise TypeError(
            f"`{option}` says {says}, and has no meaning for: "
            f"{', '.join(kinds) or 'nothing'}. Write "
            f"`replicate(model, {option}={value!r})` for each model."
        )


def choose(
    model: Any,
    data: str | None,
    reshuffle: bool | None,
    microbatches: int | None,
) -> None:
    """Records the options of a model; `None` leaves one as it is.

    Raises:
        StrategyError: If the model is running by another contract.
    """
    if data is not None:
        if process_count() > 1 and data != data_contract_of(model):
            change = f"keras_conflux.replicate({model.name}, data={data!r})"
            running.assert_not_running([model], change)
        _data[model] = data
    if reshuffle is not None:
        _reshuffle[model] = reshuffle
    if microbatches is not None and microbatches != microbatches_of(model):
        change = (
            f"keras_conflux.replicate({model.name}, "
            f"microbatches={microbatches!r})"
        )
        running.assert_not_running([model], change)
        traced_functions.forget(model)
    if microbatches is not None:
        _microbatches[model] = check_microbatches(microbatches)


def forget(model: Any) -> None:
    """Forgets the options of a model."""
    _data.pop(model, None)
    _reshuffle.pop(model, None)
    _microbatches.pop(model, None)


def apply_data_contract(model: keras.Model) -> None:
    """Drops functions of a model that were made for the other contract."""
    if process_count() == 1:
        return
    data = data_contract_of(model)
    if _applied.setdefault(model, data) != data:
        traced_functions.forget(model)
        _applied[model] = data


def data_contract_of(model: keras.Model) -> str:
    """Returns the contract by which the next call of `fit` will read."""
    distribution = keras.distribution.distribution()
    shards = getattr(distribution, "auto_shard_dataset", True)
    return _data.get(model) or ("global" if shards else "local")


def reads_own_part(model: keras.Model) -> bool:
    """Whether each of several processes brings its own part of the data."""
    return _applied.get(model) == "local"


def reshuffles(model: keras.Model) -> bool:
    """Whether `fit` shuffles arrays in another order in each epoch."""
    return _reshuffle.get(model, False)


def microbatches_of(model: keras.Model) -> int:
    """The number of parts in which each replica runs its part of a batch."""
    strategy = keras_models.strategy_of(model)
    of_scope = getattr(strategy, "microbatches", 1)
    return _microbatches.get(model, of_scope)
