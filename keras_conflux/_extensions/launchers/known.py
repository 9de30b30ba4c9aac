"""The launchers that there are, in the order in which they are asked."""

import dataclasses
from collections.abc import Mapping

from keras_conflux._cluster import launchers
from keras_conflux._extensions.launchers import job_addresses
from keras_conflux._extensions.launchers import mpi
from keras_conflux._extensions.launchers import slurm
from keras_conflux._extensions.launchers import tf_config
from keras_conflux._extensions.launchers import torchrun


@dataclasses.dataclass(frozen=True)
class Launcher:
    """A launcher, or another way to name processes."""

    name: str
    """The name of its variables in a sentence."""
    announced: launchers.Launcher
    """Returns its announcement."""
    variables: tuple[str, ...]
    """Its variables, or their beginnings, up to a `_`."""
    starts_commands: bool = False
    """Whether it starts the command itself in each process."""

    def variables_in(self, environ: Mapping[str, str]) -> list[str]:
        """Returns the names of its variables that are set."""
        beginnings = tuple(each for each in self.variables if each[-1] == "_")
        return sorted(
            each
            for each in environ
            if each in self.variables or each.startswith(beginnings)
        )


_KERAS = "KERAS_DISTRIBUTION_"
LAUNCHERS = (
    Launcher(f"{_KERAS}*", job_addresses.announced, (_KERAS,)),
    Launcher("TF_CONFIG", tf_config.announced, ("TF_CONFIG",)),
    Launcher(
        "the variables of Slurm",
        slurm.announced,
        # Not the variables of the whole job, which scripts read.
        ("SLURM_STEP_", "SLURM_STEPID", "SLURM_PROCID", "SLURM_LOCALID"),
        starts_commands=True,
    ),
    Launcher(
        "the variables of MPI",
        mpi.announced,
        ("OMPI_COMM_WORLD_", "PMI_", "PMIX_"),
        starts_commands=True,
    ),
    Launcher(
        "the variables of torchrun",
        torchrun.announced,
        (
            *("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
            *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"),
            *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
            *("ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_", "PET_"),
        ),
        starts_commands=True,
    ),
)


def without_launchers(environ: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment variables without the launchers' variables."""
    others = {name for each in LAUNCHERS for name in each.variables_in(environ)}
    return {k: v for k, v in environ.items() if k not in others}


def install() -> None:
    """Has all of them asked. Called once, at import."""
    for each in LAUNCHERS:
        launchers.ask(each.announced)
