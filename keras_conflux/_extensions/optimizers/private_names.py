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

UPDATE_STEP = PrivateName(
    f"{TF_OPTIMIZER}._backend_update_step",
    "self, grads, trainable_variables, learning_rate",
)
ITERATE = PrivateName(
    "keras.optimizers:Muon.zeropower_via_newtonschulz5",
    "self, x, steps",
)

NAMES = (
    DECAY_WEIGHTS,
    ITERATE,
    UPDATE_STEP,
    UPDATE_VARIABLES,
    PrivateName(f"{OPTIMIZER}._use_weight_decay", "self, variable"),
)
