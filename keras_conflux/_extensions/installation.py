"""Puts the extensions in place, each where the core offers a place."""

import functools
import os
from collections.abc import Mapping

from keras_conflux._common import errors
from keras_conflux._common.user_warnings import warn
from keras_conflux._compat import versions
from keras_conflux._compat.patching import patch_all
from keras_conflux._compat.patching import when_used
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._compat.private_tensorflow_names import TAPE_GRADIENT
from keras_conflux._extensions import self_check
from keras_conflux._extensions.common import private_names
from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.keras_distribution import (
    patches as keras_distribution,
)
from keras_conflux._extensions.kernels import dense_products
from keras_conflux._extensions.kernels import dispatch
from keras_conflux._extensions.kernels import gelu
from keras_conflux._extensions.kernels import pointwise
from keras_conflux._extensions.kernels import replacements
from keras_conflux._extensions.launchers import known as launchers
from keras_conflux._extensions.memory import notes as memory
from keras_conflux._extensions.optimizers import dealt_matrices
from keras_conflux._extensions.optimizers import shared_updates
from keras_conflux._extensions.program_cache import setup
from keras_conflux._extensions.program_cache.cached_program import CachedProgram
from keras_conflux._extensions.recomputation import regions
from keras_conflux._extensions.recomputation import remat
from keras_conflux._extensions.resume import fit as resume
from keras_conflux._extensions.sharding import cutting
from keras_conflux._extensions.sharding import gathered_weights
from keras_conflux._extensions.sharding import sharded_updates
from keras_conflux._extensions.sharding import whole_values
from keras_conflux._extensions.throughput import slow_input
from keras_conflux._fit import trainer
from keras_conflux._fit.execution import traced_program
from keras_conflux._fit.numerics import tape
from keras_conflux._replication import parts
from keras_conflux._replication import steps

VARIABLE = "CONFLUX_EXTENSIONS"
"""An environment variable, which is 0 to do without them."""

KERNELS = (
    (private_names.ATTENTION, dispatch.dot_product_attention),
    (private_names.GELU, gelu.gelu),
    (private_names.EINSUM, dense_products.einsum),
    (private_names.EINSUM_DENSE_CALL, dense_products.einsum_dense),
    (private_names.CONV, pointwise.conv),
)
"""The methods of Keras' layers that run faster kernels."""

OPTIMIZERS = (
    (private_names.DECAY_WEIGHTS, shared_updates.decay),
    (private_names.UPDATE_STEP, dealt_matrices.update),
    (private_names.ITERATE, dealt_matrices.iterate),
    (private_names.UPDATE_VARIABLES, shared_updates.update),
)
"""Optimizers' methods in fewer operations, or once for all replicas."""

REMAT = (
    (private_names.REMAT, remat.remat),
    (private_names.REMATERIALIZED_CALL, remat.choose),
)
"""The functions of Keras by which a program asks for recomputation."""

RECOMPUTATION = (
    (Patched.SYMBOLIC_BUILD, remat.build),
    (private_names.DIFFERENTIATE, regions.gradient),
)
"""The end of a build, and the function by which tapes differentiate."""

SHARDING = (
    (private_names.PUSH_TAPE, gathered_weights.begin_tape),
    (TAPE_GRADIENT, whole_values.gradient),
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
    (Patched.EXPORT, whole_values.export),
)
"""The methods that do otherwise where variables lie in parts."""


def _cut_variables() -> None:
    parts.cut_by(cutting)
    of_step = gathered_weights.GatheredWeights.of
    tape.differentiate_in(lambda step, *x: of_step(step).differentiating(*x))
    when_used(functools.partial(patch_all, SHARDING))


def _recompute() -> None:
    point = private_names.REMAT
    keras_own = getattr(point.owner, point.attribute)
    if "recompute_grad" in keras_own.__code__.co_names:  # the one which fails
        patch_all(REMAT)
        when_used(functools.partial(patch_all, RECOMPUTATION))


def _run_kernels() -> None:
    steps.finish_by(replacements.replace)
    when_used(functools.partial(patch_all, KERNELS))


_INSTALLS = {
    "program_cache": functools.partial(
        traced_program.makers.append, CachedProgram
    ),
    "kernels": _run_kernels,
    "sharding": _cut_variables,
    "optimizers": lambda: when_used(functools.partial(patch_all, OPTIMIZERS)),
    "launchers": launchers.install,
    "keras_distribution": keras_distribution.install,
    "recomputation": _recompute,
    "memory": functools.partial(errors.add_notes_by, memory.explain),
    "throughput": functools.partial(trainer.after_fit, slow_input.tell),
    "resume": resume.install,
}
"""The functions that put each in place, in order."""
_LOST = {
    "keras_distribution": "`keras.distribution` has no effect",
    "memory": "errors of memory have no notes, `kc.memory` is refused",
    "program_cache": "programs are compiled anew at each start",
    "recomputation": "`keras.remat` is what Keras makes of it",
    "resume": "`kc.Resume`, `kc.save` and `kc.load` are refused",
    "sharding": "`shard=` is refused",
}
"""The losses of a user; the others make steps faster."""


def install(version: str, misfits: Mapping[str, str]) -> None:
    """Puts all of them in place that fit, unless the environment forbids it.

    Args:
        version: The version of this package.
        misfits: The extensions that do not fit, and why.
    """
    when_used(functools.partial(self_check.compare_once, version))
    if os.environ.get(VARIABLE) == "0":
        for extension in _INSTALLS:
            versions.leave_out(
                extension,
                f"`{VARIABLE}=0` has left all of them out. Unset that variable "
                "of the environment, or do without.",
            )
        return
    xla_flags.choose_products()
    for extension, put_in_place in _INSTALLS.items():
        wrong = misfits.get(extension)
        if wrong:
            lost = _LOST.get(extension, "steps are slower")
            versions.leave_out(extension, f"{wrong}. {versions.advice()}")
            warn(f"The extension `{extension}` is left out, so {lost}: {wrong}")
            continue
        if extension == "program_cache":
            setup.enable(version)
        put_in_place()
