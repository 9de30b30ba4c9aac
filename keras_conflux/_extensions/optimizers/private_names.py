"""Names inside of Keras and TensorFlow that faster updates need."""

from keras_conflux._compat.private_keras_names import OPTIMIZER
from keras_conflux._compat.private_keras_names import TF_OPTIMIZER
from keras_conflux._compat.private_names import PrivateName

DECAY_WEIGHTS = PrivateName(
    f"{TF_OPTIMIZER}._apply_weight_decay", "self, variables"
)
UPDATE_VARIABLES = PrivateName(
    f"{TF_OPTIMIZER}._distributed_tf_update_step",
    "self, distribution, grads_and_vars, learning_rate",
)

NAMES = (
    DECAY_WEIGHTS,
    UPDATE_VARIABLES,
    PrivateName(f"{OPTIMIZER}._use_weight_decay", "self, variable"),
)
