"""Processes that `mpirun` or `mpiexec` has started.

MPI tells each process its rank, but nobody's address. The processes exchange
their addresses with mpi4py, and tell each other which GPUs they see.
"""

import functools
import socket
import time
from collections.abc import Mapping
from typing import Any

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers import environment_numbers as numbers
from keras_conflux._extensions.launchers import first_host
from keras_conflux._extensions.launchers import torchrun
from keras_conflux._extensions.launchers.job_addresses import ADDRESSES
from keras_conflux._extensions.launchers.job_addresses import INDEX

PMI_SIZE = "PMI_SIZE"
"""The one of these variables that Slurm sets as well."""

_VARIABLES = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),  # Open MPI
    ("PMI_RANK", PMI_SIZE),  # MPICH, Intel MPI, srun --mpi=pmi2
)


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns the announcement of MPI, if any.

    There is none where its processes have started `torchrun`.
    """
    if torchrun.is_inner(environ):
        return None
    for rank_name, count_name in _VARIABLES:
        task = numbers.rank_and_count(environ, rank_name, count_name)
        if task is not None:
            find = functools.partial(_find, environ, *task)
            return Announcement("MPI", count_name, task[1], find)
    return None


def _find(
    environ: Mapping[str, str], rank: int, count: int, seconds: float
) -> Cluster:
    """Exchanges the addresses; all processes call it."""
    world = _world()
    if (world.Get_rank(), world.Get_size()) != (rank, count):
        raise ClusterError(
            f"MPI started this process as {rank} of {count}, but mpi4py "
            f"finds that it is {world.Get_rank()} of {world.Get_size()}. It "
            "was probably built for another MPI: install it anew with "
            "`python -m pip install --no-binary mpi4py mpi4py`."
        )
    _wait_for_all(world, seconds)
    # No other process of this host gets the port while it is bound.
    with socket.socket() as bound:
        bound.bind(("", 0))
        port = bound.getsockname()[1]
        own = socket.gethostname(), port, environ.get("CUDA_VISIBLE_DEVICES")
        found = world.allgather(own)
    hosts = [host for host, _, _ in found]
    seen = {gpu for host, _, gpu in found if host == hosts[rank]}
    if len(seen) == 1:  # else somebody has dealt them out
        first_host.take_part_of(hosts, rank)
    addresses = [
        # A host need not know its own name.
        f"{host if {*hosts} - {host} else 'localhost'}:{port}"
        for host, port, _ in found
    ]
    return Cluster(tuple(addresses), rank, "MPI")


def _wait_for_all(world: Any, seconds: float) -> None:
    """Waits until all processes have called it."""
    end = time.monotonic() + seconds
    barrier = world.Ibarrier()
    while not barrier.Test():
        if time.monotonic() > end:
            raise ClusterError(
                f"MPI: not all of {world.Get_size()} processes have called "
                f"`keras_conflux.initialize()` in {seconds:g} s. All must run "
                "the same program; `keras_conflux.initialize(timeout=900)` "
                "waits longer."
            )
        time.sleep(0.01)


def _world() -> Any:
    """Returns the communicator of all processes of MPI."""
    try:
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        if error.name != "mpi4py":
            raise
        raise ClusterError(
            "MPI started this process, but does not tell the addresses of "
            "the others. Install mpi4py, with which they tell each other: "
            "`python -m pip install mpi4py`. Or give the addresses in "
            f"{ADDRESSES} and this process' number in {INDEX}."
        ) from error
    return MPI.COMM_WORLD
