"""Puts the extensions in place, each where the core offers a place."""

import os

from keras_conflux._compat.patching import patch_all
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.keras_distribution import (
    patches as keras_distribution,
)
from keras_conflux._extensions.kernels import attention
from keras_conflux._extensions.kernels import dense_products
from keras_conflux._extensions.kernels import gelu
from keras_conflux._extensions.kernels import pointwise
from keras_conflux._extensions.kernels import replacements
from keras_conflux._extensions.launchers import order as launchers
from keras_conflux._extensions.memory import notes as memory
from keras_conflux._extensions.optimizers import dealt_matrices
from keras_conflux._extensions.optimizers import shared_updates
from keras_conflux._extensions.optimizers import weight_decay
from keras_conflux._extensions.program_cache import cached_program
from keras_conflux._extensions.program_cache import setup
from keras_conflux._extensions.recomputation import remat
from keras_conflux._extensions.recomputation import runs
from keras_conflux._extensions.recomputation.compat import has_own_remat
from keras_conflux._extensions.resume import fit as resume
from keras_conflux._extensions.sharding import patches as sharding
from keras_conflux._extensions.throughput import slow_input
from keras_conflux._replication import steps

VARIABLE = "CONFLUX_EXTENSIONS"
"""An environment variable, which is 0 to do without them."""

KERNELS = (
    (private_names.ATTENTION, attention.dot_product_attention),
    (private_names.GELU, gelu.gelu),
    (private_names.EINSUM, dense_products.einsum),
    (private_names.EINSUM_DENSE_CALL, dense_products.einsum_dense),
    (private_names.CONV, pointwise.conv),
    (private_names.SEPARABLE_CONV, pointwise.separable_conv),
)
"""The methods of Keras' layers that run faster kernels."""

OPTIMIZERS = (
    (private_names.DECAY_WEIGHTS, weight_decay.decay),
    (private_names.UPDATE_STEP, dealt_matrices.update),
    (private_names.ITERATE, dealt_matrices.iterate),
    (private_names.UPDATE_VARIABLES, shared_updates.update),
)
"""Optimizers' methods in fewer operations, or once for all replicas."""

RECOMPUTATION = (
    (private_names.REMAT, remat.remat),
    (private_names.REMATERIALIZED_CALL, remat.choose),
    (private_names.VARIABLE_VALUE, runs.read),
    (Patched.ASSIGN, runs.assign),
)
"""The methods of Keras by which activations are computed again."""


def install(version: str) -> None:
    """Puts all of them in place, unless the environment forbids it.

    Args:
        version: The version of this package.
    """
    if os.environ.get(VARIABLE) == "0":
        return
    xla_flags.choose_products()
    setup.enable(version)
    cached_program.install()
    patch_all(KERNELS)
    steps.finish_by(replacements.replace)
    sharding.install()
    patch_all(OPTIMIZERS)
    launchers.install()
    keras_distribution.install()
    point = private_names.REMAT
    if not has_own_remat(getattr(point.owner, point.attribute)):
        patch_all(RECOMPUTATION)
    memory.install()
    slow_input.install()
    resume.install()
