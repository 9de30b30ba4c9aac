"""The methods of Keras that know the distribution that is set."""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._compat import patching
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.keras_distribution import compat
from keras_conflux._extensions.keras_distribution import keras_distribution
from keras_conflux._extensions.keras_distribution import model_parallel
from keras_conflux._replication.strategy import ask_for_distribution
from keras_conflux._replication.strategy import distribution_strategy


def make_distributed(original: Callable, *args: Any, **kwargs: Any) -> None:
    """Makes an optimizer or a model under Keras' distribution."""
    strategy = distribution_strategy()
    if strategy is None or tf.distribute.has_strategy():
        original(*args, **kwargs)
        return
    with strategy.scope():
        original(*args, **kwargs)


PATCHES = (
    (private_names.OPTIMIZER_INIT, make_distributed),
    (private_names.TRAINER_INIT, make_distributed),
    (Patched.SYMBOLIC_BUILD, model_parallel.build),
)
_SET = keras_distribution.set_distribution
DOORS = (
    (private_names.SET_DISTRIBUTION, _SET),
    (private_names.SET_DISTRIBUTION_INSIDE, _SET),
    (private_names.DATA_PARALLEL_INIT, keras_distribution.make_data_parallel),
)
"""The replacements that are in place from the import on."""


def install() -> None:
    """Puts the doors in place, and the rest at the first use."""
    ask_for_distribution(keras_distribution.distributed)
    compat.provide_distribution(
        distribute_tensor=keras_distribution.distribute_tensor,
        get_device_count=keras_distribution.get_device_count,
        initialize=keras_distribution.initialize,
        list_devices=keras_distribution.list_devices,
        num_processes=process_count,
        process_id=process_index,
    )
    patching.patch_all(DOORS)
    patching.when_used(functools.partial(patching.patch_all, PATCHES))
    if keras.distribution.distribution() is not None:
        patching.begin()
