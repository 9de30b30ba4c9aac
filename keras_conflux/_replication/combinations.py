"""The options of `replicate` that work together, and their limits.

Whoever refuses options raises this file's messages, and whoever advises some
asks it first. So nothing is advised that is refused.
"""

from collections.abc import Sequence
from typing import Any

import keras

from keras_conflux._compat import versions
from keras_conflux._replication import parts


def refusal(
    shard: str | None, microbatches: int = 1, owners: Sequence[Any] = ()
) -> str | None:
    """Returns why options of `replicate` are refused, `None` if they work.

    The owners are the layers and optimizers of a model that is to have them.
    """
    found = None if shard is None else _refusal_of_shard(shard, owners)
    if found is not None or microbatches == 1:
        return found
    if shard is not None:
        return (
            f"`microbatches=` and `shard={shard!r}` do not work together in "
            "this version. Leave one of both out."
        )
    return refusal_of_states(owners, f"{microbatches=!r}")


def _refusal_of_shard(shard: str, owners: Sequence[Any]) -> str | None:
    refused = versions.refusal("sharding", f"shard={shard!r}")
    for each in owners:
        if isinstance(each, keras.optimizers.Optimizer) and not hasattr(
            each, "inner_optimizer"
        ):
            refused = refused or parts.refusal(each, shard)
    return refused


def refusal_of_states(layers: Sequence[Any], received: str) -> str | None:
    """Returns why layers with states of rows refuse what was received."""
    for layer in layers:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            return (
                f"the layer {layer.name!r} has `stateful=True` and "
                "keeps a state for each row of a batch, of which each replica, "
                f"and each turn, has other rows. Received: {received}. A "
                "`batch_shape` of one replica's rows would not help, as all "
                "copies of a weight are equal. Give the layer its "
                "`initial_state` as an input of the model, and take the next "
                "one from `return_state=True`, or train on one device and "
                "whole batches, with `keras_conflux.unreplicate(model)`."
            )
    return None
