"""The seed of `keras.random`, which all models of a thread have in common.

Models on different devices may take turns, also within the `fit` of another.
So the variable that the seed had on each set of devices is kept, with all that
was traced over it, and gets the value whenever it is taken there again.
"""

import weakref
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._compat import keras_variables
from keras_conflux._replication import running
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions
from keras_conflux._replication.strategy import ReplicatedStrategy

_former: Any = weakref.WeakKeyDictionary()
"""By seed generator and strategy, the TensorFlow variables of the seed. That
of models that are not replicated has the strategy `None`."""


def take(
    seeds: keras.random.SeedGenerator, strategy: ReplicatedStrategy
) -> bool:
    """Takes the seed from where it is, if it was ever on these devices.

    If not, it is on one device afterwards, as any variable that is to be
    replicated, and the result is `False`.
    """
    present = state.replicated_by([seeds.state])
    if present is strategy:
        return True
    former = _former.setdefault(seeds, {})
    former[present] = keras_variables.backing(seeds.state)
    if strategy in former:
        _move(seeds.state, former[present], former[strategy])
        return True
    if present is not None:
        state.remove_copies([seeds.state])
    return False


def give_back() -> None:
    """Gives the seed back to a running model that is not replicated.

    Nothing else would: the loop of Keras goes on with its trace. A
    model that is replicated takes the seed at each execution.
    """
    models = running.plain_models()
    if not models:
        return
    seeds = keras_variables.global_seed_generator()
    present = keras_variables.backing(seeds.state)
    plain = _former.get(seeds, {}).get(None)
    if plain is None or plain is present:
        return
    handles = {id(plain.handle)}
    if any(traced_functions.read_by_functions(m, handles) for m in models):
        _move(seeds.state, present, plain)


def _move(seed: Any, old: Any, new: Any) -> None:
    # Not `old` itself, which another scope than its own may be open for.
    value = state.copies(old)[0].read_value()
    with tf.init_scope():
        for copy in state.copies(new):
            copy.assign(value)
    state.swap_backing(seed, old, new)
