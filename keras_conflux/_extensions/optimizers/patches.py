"""Optimizers' methods in fewer operations, or once for all replicas."""

from keras_conflux._compat.patching import patch_all
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.optimizers import dealt_matrices
from keras_conflux._extensions.optimizers import shared_updates
from keras_conflux._extensions.optimizers import weight_decay

PATCHES = (
    (private_names.DECAY_WEIGHTS, weight_decay.decay),
    (private_names.UPDATE_STEP, dealt_matrices.update),
    (private_names.ITERATE, dealt_matrices.iterate),
    (private_names.UPDATE_VARIABLES, shared_updates.update),
)


def install() -> None:
    """Puts the replacements in place. Called once, at import."""
    patch_all(PATCHES)
