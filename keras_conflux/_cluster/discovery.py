"""Finds out which processes train together, and which this one is."""

import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.cluster import separated
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._cluster.launchers import announcements
from keras_conflux._common.errors import ClusterError

ARGUMENTS = "the arguments of initialize"
DEFAULT_SECONDS = 300.0
"""How long processes wait for each other."""


def find_cluster(
    addresses: Sequence[str] | str | None = None,
    index: int | None = None,
    environ: Mapping[str, str] = os.environ,
    seconds: float = DEFAULT_SECONDS,
) -> Cluster | None:
    """Returns the processes that train together.

    The arguments decide, or the first launcher that tells of processes.
    TensorFlow is not started, and nothing connects, except where processes tell
    each other of their addresses.

    Args:
        addresses: `"host:port"` of every process, equal in all of them; as a
            text, separated by commas.
        index: The position of this process' address.
        environ: The environment variables.
        seconds: The time that processes wait for each other.

    Returns:
        The processes, or `None` if this process trains alone.

    Raises:
        ClusterError: If addresses are wrong, only a part of a launcher's
            variables is set, launchers disagree on how many processes there
            are, or there is no launcher to ask.

    Example:
        ```python
        cluster = find_cluster(["a:2222", "b:2222"], index=1)
        cluster.addresses[cluster.index]  # "b:2222"
        ```
    """
    if addresses is not None or index is not None:
        cluster = _from_arguments(addresses, index)
    else:
        cluster = _from_environment(environ, seconds)
    is_alone = cluster is None or len(cluster.addresses) == 1
    return None if is_alone else cluster


def _from_arguments(
    addresses: Sequence[str] | str | None, index: int | None
) -> Cluster:
    if addresses is None:
        raise ClusterError(
            f"Got the index {index}, but no addresses. Give the addresses of "
            'all processes, such as ["10.0.0.1:2222", "10.0.0.2:2222"].'
        )
    if isinstance(addresses, str):
        addresses = separated(addresses)
    given: Any = addresses
    if not isinstance(given, Sequence) or not all(
        isinstance(each, str) for each in given
    ):
        raise ClusterError(
            'Expected addresses such as ["10.0.0.1:2222", "10.0.0.2:2222"]. '
            f"Got {addresses!r}."
        )
    if index is not None and type(index) is not int:
        raise ClusterError(
            f"Expected the index of this process, from 0. Got {index!r}."
        )
    if index is None and len(addresses) > 1:
        raise ClusterError(
            f"Got {len(addresses)} addresses, but no index. Give the index of "
            "this process' address as `index`."
        )
    return Cluster(tuple(addresses), index or 0, ARGUMENTS)


def _from_environment(
    environ: Mapping[str, str], seconds: float
) -> Cluster | None:
    found = announcements(environ)
    for other in found[1:]:
        _refuse_contradiction(found[0], other)
    # MPI cannot find a process that is alone without mpi4py, and need not.
    return found[0].find(seconds) if found and found[0].count > 1 else None


def _refuse_contradiction(one: Announcement, other: Announcement) -> None:
    # `mpirun -n 1` may start the program that starts the processes.
    if other.count not in (1, one.count):
        raise ClusterError(
            f"{one.count_from} tells of {one.count} processes, but "
            f"{other.count_from} of {other.count}. Start the program through "
            "one launcher, or unset the variable that is not meant."
        )
