"""The methods of Keras that do otherwise where variables lie in parts."""

from keras_conflux._compat import patching
from keras_conflux._compat.patching import patch
from keras_conflux._compat.patching import patch_all
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._compat.private_tensorflow_names import TAPE_GRADIENT
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.sharding import cutting
from keras_conflux._extensions.sharding import gathered_weights
from keras_conflux._extensions.sharding import sharded_updates
from keras_conflux._extensions.sharding import whole_models
from keras_conflux._extensions.sharding import whole_values
from keras_conflux._fit.numerics import tape
from keras_conflux._replication import parts

PATCHES = (
    (private_names.APPLY_FILTERED, gathered_weights.apply),
    (private_names.UPDATE_AVERAGES, sharded_updates.average),
    (private_names.UPDATE_STEP, sharded_updates.update_step),
    (private_names.VARIABLE_VALUE, gathered_weights.value),
    # In front of the core's work on copies.
    (Patched.OPTIMIZER_SCALE_LOSS, sharded_updates.scale_loss),
    (Patched.LOSS_SCALE_SCALE_LOSS, sharded_updates.scale_loss),
    (Patched.CLIP_GRADIENTS, sharded_updates.clip),
    (Patched.CHECK_FINITE, sharded_updates.check_finite),
    (Patched.ASSIGN, gathered_weights.assign),
    (Patched.VARIABLE_INITIALIZE, cutting.initialize),
    (Patched.ADD_OPTIMIZER_VARIABLE, cutting.add_optimizer_variable),
    (Patched.EXPORT, whole_models.export),
)


def install() -> None:
    """Has the replacements put in place at the first use."""
    parts.cut_by(cutting)
    tape.differentiate_in(gathered_weights.differentiating)
    patching.when_used(_replace)


def _replace() -> None:
    patch(private_names.PUSH_TAPE, gathered_weights.begin_tape)
    patch(TAPE_GRADIENT, whole_values.gradient)
    patch(TAPE_GRADIENT, whole_models.gradient)
    patch_all(PATCHES)
