"""Names inside of Keras and TensorFlow that faster updates need."""

from keras_conflux._compat.private_keras_names import OPTIMIZER
from keras_conflux._compat.private_keras_names import TF_OPTIMIZER
from keras_conflux._compat.private_names import PrivateName

VARIABLE_KEY = PrivateName(f"{TF_OPTIMIZER}._var_key", "self, variable")
DECAY_WEIGHTS = PrivateName(
    f"{TF_OPTIMIZER}._apply_weight_decay", "self, variables"
)
UPDATE_VARIABLES = PrivateName(
    f"{TF_OPTIMIZER}._distributed_tf_update_step",
    "self, distribution, grads_and_vars, learning_rate",
)
OPTIMIZER_ASSIGN = PrivateName(
    f"{TF_OPTIMIZER}.assign", "self, variable, value"
)

NAMES = (
    VARIABLE_KEY,
    DECAY_WEIGHTS,
    UPDATE_VARIABLES,
    OPTIMIZER_ASSIGN,
    PrivateName(f"{OPTIMIZER}._get_variable_index", "self, variable"),
    PrivateName(f"{OPTIMIZER}._use_weight_decay", "self, variable"),
    PrivateName(
        "keras.src.backend.common.stateless_scope:StatelessScope.__enter__",
        "self",
        ("set_global_attribute",),
    ),
)
