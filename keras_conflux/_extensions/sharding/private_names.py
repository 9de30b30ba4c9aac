"""Names inside of Keras and TensorFlow that the core does not list."""

from keras_conflux._compat.private_keras_names import OPTIMIZER
from keras_conflux._compat.private_keras_names import TF_OPTIMIZER
from keras_conflux._compat.private_names import PrivateName

APPLY_FILTERED = PrivateName(
    f"{OPTIMIZER}._backend_apply_gradients", "self, grads, trainable_variables"
)
UPDATE_AVERAGES = PrivateName(
    f"{OPTIMIZER}._update_model_variables_moving_average",
    "self, trainable_variables",
)
UPDATE_STEP = PrivateName(
    f"{TF_OPTIMIZER}._backend_update_step",
    "self, grads, trainable_variables, learning_rate",
)
PUSH_TAPE = PrivateName("tensorflow:GradientTape._push_tape", "self")
VARIABLE_VALUE = PrivateName(
    "keras.src.backend.common.variables:Variable.value", None, ("_value",)
)

NAMES = (
    APPLY_FILTERED,
    PUSH_TAPE,
    UPDATE_AVERAGES,
    UPDATE_STEP,
    VARIABLE_VALUE,
)
