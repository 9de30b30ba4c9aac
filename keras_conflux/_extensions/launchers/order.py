"""The order in which launchers are asked."""

from keras_conflux._cluster import launchers
from keras_conflux._extensions.launchers import keras_variables
from keras_conflux._extensions.launchers import mpi
from keras_conflux._extensions.launchers import slurm
from keras_conflux._extensions.launchers import tf_config
from keras_conflux._extensions.launchers.resolver import resolve

LAUNCHERS = (keras_variables, tf_config, slurm, mpi)


def install() -> None:
    """Has all of them asked. Called once, at import."""
    for each in LAUNCHERS:
        launchers.ask(each.announced)
    launchers.resolve_by(resolve)
