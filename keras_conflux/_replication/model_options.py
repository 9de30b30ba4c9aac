"""Options of `replicate` that a model keeps, such as `data`."""

import weakref
from typing import Any
from typing import Literal
from typing import TypeAlias

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import keras_models
from keras_conflux._replication import running
from keras_conflux._replication import traced_functions
from keras_conflux._replication.strategy import check_microbatches

DataContract: TypeAlias = Literal["global", "local"]
"""Whether a process reads all batches and takes its rows, or its own part."""

_chosen: Any = weakref.WeakKeyDictionary()
"""By model, the options that `replicate` was given, by their names."""
_SAYS = {
    "data": "what `fit`, `evaluate` and `predict` of a model read",
    "reshuffle": "how `fit` of a model shuffles arrays",
    "microbatches": "in how many parts `fit` of a model runs a batch",
}


def check(
    target: Any, data: str | None, reshuffle: Any, microbatches: Any
) -> None:
    """Raises unless a target of `replicate` may have these options."""
    if data not in (None, "global", "local"):
        raise ValueError(
            '`data` is "global", if all processes read the same batches, '
            'or "local", if each process brings its own part of them. '
            f"Received: data={data!r}."
        )
    if reshuffle is not None and not isinstance(reshuffle, bool):
        raise ValueError(
            "`reshuffle` is True or False: whether `fit` shuffles arrays "
            "in another order in each epoch. Received: "
            f"reshuffle={reshuffle!r}."
        )
    if microbatches is not None:
        check_microbatches(microbatches)
    _assert_models(target, data=data, reshuffle=reshuffle)
    if target is not None:  # else a strategy has them
        _assert_models(target, microbatches=microbatches)


def _assert_models(target: Any, **options: Any) -> None:
    leaves = keras.tree.flatten(target)
    if leaves and all(isinstance(x, keras.Model) for x in leaves):
        return
    kinds = sorted({type(leaf).__name__ for leaf in leaves})
    for option, value in options.items():
        if value is not None:
            raise TypeError(
                f"`{option}` says {_SAYS[option]}, and has no meaning for: "
                f"{', '.join(kinds) or 'nothing'}. Write "
                f"`replicate(model, {option}={value!r})` for each model."
            )


def choose(
    model: Any,
    data: str | None,
    reshuffle: bool | None,
    microbatches: int | None,
) -> None:
    """Records the options of a model, unless it runs or they are `None`."""
    chosen = _chosen.setdefault(model, {})
    change = f"keras_conflux.replicate({model.name}, "
    if data is not None:
        if process_count() > 1 and data != data_contract_of(model):
            running.assert_not_running([model], f"{change}data={data!r})")
            traced_functions.forget(model)
        chosen["data"] = data
    if reshuffle is not None:
        chosen["reshuffle"] = reshuffle
    if microbatches is not None:
        if microbatches != microbatches_of(model):
            change = f"{change}microbatches={microbatches!r})"
            running.assert_not_running([model], change)
            traced_functions.forget(model)
        chosen["microbatches"] = check_microbatches(microbatches)


def forget(model: Any) -> None:
    """Forgets the options of a model."""
    _chosen.pop(model, None)


def _option(model: Any, name: str, default: Any) -> Any:
    return _chosen.get(model, {}).get(name, default)


def data_contract_of(model: keras.Model) -> str:
    """Returns the contract by which the next call of `fit` will read."""
    distribution = keras.distribution.distribution()
    shards = getattr(distribution, "auto_shard_dataset", True)
    return _option(model, "data", "global" if shards else "local")


def reads_own_part(model: keras.Model) -> bool:
    """Whether each of several processes brings its own part of the data."""
    return process_count() > 1 and data_contract_of(model) == "local"


def reshuffles(model: keras.Model) -> bool:
    """Whether `fit` shuffles arrays in another order in each epoch."""
    return _option(model, "reshuffle", False)


def microbatches_of(model: keras.Model) -> int:
    """The number of parts in which each replica runs its part of a batch."""
    of_scope = getattr(keras_models.strategy_of(model), "microbatches", 1)
    return _option(model, "microbatches", of_scope)


def warn_in_loop(step: Any, trained: list[Any]) -> None:
    """Warns of microbatches, which a step of the user's own does not run."""
    ids = set(map(id, trained))
    turns = getattr(tf.distribute.get_strategy(), "microbatches", 1)
    for model, chosen in list(_chosen.items()):
        own = chosen.get("microbatches", 1)
        if own > 1 and ids.intersection(map(id, model.trainable_variables)):
            turns = own
    if turns > 1 and "microbatches" not in step.warned:
        step.warned.add("microbatches")
        warn(
            f"{step.name}: `microbatches={turns}` has no effect in a loop of "
            "your own, where a replica runs its part of a batch at once. Train "
            "by `fit`, or give the optimizer `gradient_accumulation_steps`, "
            "and the loop smaller batches."
        )
