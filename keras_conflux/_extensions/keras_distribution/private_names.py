"""Names inside of Keras and TensorFlow of `keras.distribution`."""

import keras

from keras_conflux._compat.private_keras_names import TF_OPTIMIZER
from keras_conflux._compat.private_keras_names import TF_TRAINER
from keras_conflux._compat.private_names import PrivateName
from keras_conflux._compat.private_names import version_numbers

_DISTRIBUTION = "keras.src.distribution.distribution_lib:"
_KNOWS_PROCESSES = (
    "Distribution"
    if version_numbers(keras.__version__) >= (3, 15)
    else "DataParallel"
)

OPTIMIZER_INIT = PrivateName(f"{TF_OPTIMIZER}.__init__", "self, args, kwargs")
TRAINER_INIT = PrivateName(f"{TF_TRAINER}.__init__", "self")
# Keras exports a second reference to this function.
SET_DISTRIBUTION = PrivateName("keras.distribution:set_distribution", "value")
SET_DISTRIBUTION_INSIDE = PrivateName(
    f"{_DISTRIBUTION}set_distribution", "value"
)
DATA_PARALLEL_INIT = PrivateName(
    f"{_DISTRIBUTION}DataParallel.__init__",
    "self, device_mesh, devices, auto_shard_dataset",
)

NAMES = (
    OPTIMIZER_INIT,
    TRAINER_INIT,
    SET_DISTRIBUTION,
    SET_DISTRIBUTION_INSIDE,
    DATA_PARALLEL_INIT,
    PrivateName(
        f"{_DISTRIBUTION}{_KNOWS_PROCESSES}.__init__",
        None,
        ("_is_multi_process",),
    ),
    PrivateName("keras.src.backend.tensorflow.distribution_lib:"),
)
