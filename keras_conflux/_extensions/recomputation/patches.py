"""The methods of Keras by which activations are computed again."""

from keras_conflux._compat.patching import patch_all
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.recomputation import compat
from keras_conflux._extensions.recomputation import remat
from keras_conflux._extensions.recomputation import runs

PATCHES = (
    (private_names.REMAT, remat.remat),
    (private_names.REMATERIALIZED_CALL, remat.choose),
    (private_names.VARIABLE_VALUE, runs.read),
    (private_names.VARIABLE_ASSIGN, runs.assign),
)


def install() -> None:
    """Puts the replacements in place, where Keras' own `remat` fails."""
    point = private_names.REMAT
    if not compat.has_own_remat(getattr(point.owner, point.attribute)):
        patch_all(PATCHES)
