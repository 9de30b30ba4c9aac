"""Finds out which processes train together, and which this one is."""

import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_conflux._cluster import keras_variables
from keras_conflux._cluster import mpi
from keras_conflux._cluster import slurm
from keras_conflux._cluster import tf_config
from keras_conflux._cluster.cluster import Announcement
from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.resolver import resolve
from keras_conflux._common.errors import ClusterError

ARGUMENTS = "the arguments of initialize"


def find_cluster(
    addresses: Sequence[str] | str | None = None,
    index: int | None = None,
    resolver: Any = None,
    environ: Mapping[str, str] = os.environ,
) -> Cluster | None:
    """Returns the processes that train together.

    The first of these that is there decides: the arguments; the variables of
    `keras.distribution`; `TF_CONFIG`; a step of Slurm; MPI. TensorFlow is not
    started, and nothing connects, except where MPI exchanges addresses.

    Args:
        addresses: `"host:port"` of every process, equal in all of them; as a
            text, separated by commas.
        index: Which of the addresses is this process'.
        resolver: A `tf.distribute.cluster_resolver.ClusterResolver`, in place
            of addresses.
        environ: The environment variables.

    Returns:
        The processes, or `None` if this process trains alone.

    Raises:
        ClusterError: If addresses are wrong, only a part of a launcher's
            variables is set, or launchers disagree on how many processes
            there are.

    Example:
        ```python
        cluster = find_cluster(["a:2222", "b:2222"], index=1)
        cluster.addresses[cluster.index]  # "b:2222"
        ```
    """
    if addresses is not None or index is not None:
        cluster = _from_arguments(addresses, index, resolver)
    elif resolver is not None:
        cluster = resolve(resolver)
    else:
        cluster = _from_environment(environ)
    is_alone = cluster is None or len(cluster.addresses) == 1
    return None if is_alone else cluster


def _from_arguments(
    addresses: Sequence[str] | str | None, index: int | None, resolver: object
) -> Cluster:
    if resolver is not None:
        raise ClusterError(
            "Expected addresses and an index, or a resolver. Got both."
        )
    if addresses is None:
        raise ClusterError(
            f"Got the index {index}, but no addresses. Give the addresses of "
            'all processes, such as ["10.0.0.1:2222", "10.0.0.2:2222"].'
        )
    if isinstance(addresses, str):
        addresses = keras_variables.separated(addresses)
    if index is None and len(addresses) > 1:
        raise ClusterError(
            f"Got {len(addresses)} addresses, but no index. Give the index of "
            "this process' address as `index`."
        )
    return Cluster(tuple(addresses), index or 0, ARGUMENTS)


def _from_environment(environ: Mapping[str, str]) -> Cluster | None:
    sources = (keras_variables, tf_config, slurm, mpi)
    found = [
        announcement
        for source in sources
        if (announcement := source.announced(environ)) is not None
    ]
    found = _without_outer_slurm(found)
    for other in found[1:]:
        _refuse_contradiction(found[0], other)
    # MPI cannot find a process that is alone without mpi4py, and need not.
    return found[0].find() if found and found[0].count > 1 else None


def _without_outer_slurm(found: list[Announcement]) -> list[Announcement]:
    """Leaves out the step of Slurm in which `mpirun` has started processes.

    `mpirun` starts one daemon per node as a step of Slurm, and the processes
    inherit the variables of that step. `srun --mpi=pmi2` sets the variables
    of both, with equal numbers.
    """
    of_slurm = [each for each in found if each.source == "Slurm"]
    of_mpi = [each for each in found if each.source == "MPI"]
    for outer, inner in zip(of_slurm, of_mpi, strict=False):
        is_by_slurm = inner.count_from == mpi.PMI_SIZE
        if not (is_by_slurm and inner.count == outer.count):
            return [each for each in found if each is not outer]
    return found


def _refuse_contradiction(one: Announcement, other: Announcement) -> None:
    # `mpirun -n 1` may start what starts the processes.
    if other.count not in (1, one.count):
        raise ClusterError(
            f"{one.count_from} tells of {one.count} processes, but "
            f"{other.count_from} of {other.count}. Start the program through "
            "one launcher, or unset the variable that is not meant."
        )
