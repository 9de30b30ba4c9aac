"""Processes that `torchrun` has started, or what sets the same variables.

Kubeflow's PyTorchJob, Ray, AzureML and scripts for SkyPilot set them as well.

They name the host of process 0, a port there, and nobody else's address. If all
processes run on one host, that is enough. Otherwise each of them introduces
itself to process 0, which tells all from which hosts they have come.

MASTER_PORT itself is not used: beside process 0, the agent of `torchrun`
listens there as long as the processes run. Each process derives from it the
first of 64 other ports, which is the same one in all. The processes of a host
listen at this port and those after it, in the order of their ranks, and process
0 is met at the first one before TensorFlow takes that. Trainings that share a
host have different MASTER_PORTs, and so other ports. CONFLUX_PORT chooses
another one.

`torchrun` lets every process see all GPUs of its host, and counts on each
taking the one of its LOCAL_RANK. So a process takes its part of those that it
sees, unless there are fewer than processes: then somebody has dealt them out.
"""

import contextlib
from collections.abc import Mapping

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers import meeting
from keras_conflux._extensions.launchers.ports import first_port
from keras_conflux._extensions.launchers.variables import integer
from keras_conflux._extensions.launchers.variables import rank_and_count

_RUN = "TORCHELASTIC_RUN_ID"
"""Set by `torchrun` alone."""


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns what the variables of `torchrun` tell.

    Args:
        environ: The environment variables.

    Returns:
        An announcement, or `None` if they are not set.

    Raises:
        ClusterError: If only some are set.
    """
    task = rank_and_count(environ, "RANK", "WORLD_SIZE")
    if task is None:
        return None
    return Announcement(
        source="torchrun",
        count_from="WORLD_SIZE",
        count=task[1],
        find=lambda: _find(environ, *task),
    )


def is_inner(environ: Mapping[str, str]) -> bool:
    """Whether `torchrun` has started this process in a task of another one.

    One task for each host, which starts all processes of the host, is usual.
    """
    return _RUN in environ and "RANK" in environ


def _find(environ: Mapping[str, str], rank: int, count: int) -> Cluster:
    first = environ.get("MASTER_ADDR", "").strip()
    master_port = integer(environ, "MASTER_PORT")
    if not first or master_port is None:
        raise ClusterError(
            "WORLD_SIZE and RANK are set, but MASTER_ADDR and MASTER_PORT are "
            "not both. Set them to the host of process 0 and to a port, as "
            "`torchrun` does, or unset WORLD_SIZE and RANK."
        )
    port = first_port(environ, master_port, taken=master_port)
    if integer(environ, "LOCAL_WORLD_SIZE") == count:
        hosts = ["localhost"] * count
    else:
        run = f"{environ.get(_RUN, '')} {master_port}"
        hosts = meeting.hosts_of_all(
            first, port, rank, count, run, meeting.SECONDS
        )
    places = [hosts[:each].count(host) for each, host in enumerate(hosts)]
    _take_gpus(environ, places[rank], hosts.count(hosts[rank]))
    addresses = [
        f"[{host}]:{port + place}" if ":" in host else f"{host}:{port + place}"
        for host, place in zip(hosts, places, strict=True)
    ]
    return Cluster(tuple(addresses), rank, "torchrun")


def _take_gpus(environ: Mapping[str, str], place: int, count: int) -> None:
    """Lets this process see its part of the GPUs of its host."""
    import tensorflow as tf  # `keras-conflux run` does without it

    local_rank = integer(environ, "LOCAL_RANK")
    place = place if local_rank is None else local_rank
    count = integer(environ, "LOCAL_WORLD_SIZE") or count
    seen = tf.config.get_visible_devices("GPU")
    share = len(seen) // count
    if count > 1 and share > 0:
        # If TensorFlow has started, joining the others says so.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices(
                seen[place * share : (place + 1) * share], "GPU"
            )
