"""Processes of `torchrun`, or of programs that set the same variables.

Kubeflow's PyTorchJob, Ray, AzureML and scripts for SkyPilot set them as well.
The agent of `torchrun` listens at MASTER_PORT as long as the processes run, so
these meet at a port that is derived from it. All of them see all GPUs of their
host, and each is to take the one of its LOCAL_RANK.
"""

import functools
from collections.abc import Mapping

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers import environment_numbers as numbers
from keras_conflux._extensions.launchers import first_host

_RUN = "TORCHELASTIC_RUN_ID"
"""Set by `torchrun` alone."""


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns the announcement in the variables of `torchrun`, if any."""
    task = numbers.rank_and_count(environ, "RANK", "WORLD_SIZE")
    if task is None:
        return None
    find = functools.partial(_find, environ, *task)
    return Announcement("torchrun", "WORLD_SIZE", task[1], find)


def is_inner(environ: Mapping[str, str]) -> bool:
    """Whether `torchrun` has started this process in a task of another one.

    One task for each host, which starts all processes of the host, is usual.
    """
    return _RUN in environ and "RANK" in environ


def _find(
    environ: Mapping[str, str], rank: int, count: int, seconds: float
) -> Cluster:
    first = environ.get("MASTER_ADDR", "").strip()
    master_port = numbers.integer(environ, "MASTER_PORT")
    if not first or master_port is None:
        raise ClusterError(
            "WORLD_SIZE and RANK are set, but MASTER_ADDR and MASTER_PORT are "
            "not both. Set them to the host of process 0 and to a port, as "
            "`torchrun` does, or unset WORLD_SIZE and RANK."
        )
    port = first_host.first_port(environ, master_port, taken=master_port)
    local_count = numbers.integer(environ, "LOCAL_WORLD_SIZE")
    if local_count == count:
        hosts = ["localhost"] * count
    else:
        hosts = first_host.hosts_of_all(first, port, rank, count, seconds)
    local_rank = numbers.integer(environ, "LOCAL_RANK")
    if local_rank is None:
        local_rank = first_host.local_ranks(hosts)[rank]
    first_host.take_part(local_rank, local_count or hosts.count(hosts[rank]))
    return first_host.cluster_of(hosts, port, rank, "torchrun")
