"""Puts the extensions in place, each where the core offers a place."""

import os

from keras_conflux._extensions.common import xla_flags
from keras_conflux._extensions.keras_distribution import (
    patches as keras_distribution,
)
from keras_conflux._extensions.kernels import patches as kernels
from keras_conflux._extensions.launchers import order as launchers
from keras_conflux._extensions.memory import notes as memory
from keras_conflux._extensions.optimizers import patches as optimizers
from keras_conflux._extensions.program_cache import cached_program
from keras_conflux._extensions.program_cache import setup
from keras_conflux._extensions.recomputation import patches as recomputation
from keras_conflux._extensions.resume import fit as resume
from keras_conflux._extensions.sharding import patches as sharding
from keras_conflux._extensions.throughput import slow_input

VARIABLE = "CONFLUX_EXTENSIONS"
"""An environment variable, which is 0 to do without them."""


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
    kernels.install()
    sharding.install()
    optimizers.install()
    launchers.install()
    keras_distribution.install()
    recomputation.install()
    memory.install()
    slow_input.install()
    resume.install()
