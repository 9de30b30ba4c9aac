"""Finds out which processes train together, from arguments or launchers.

There are no launchers by default. `ask` adds one.
"""

import dataclasses
import os
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.cluster import separated
from keras_conflux._common.errors import ClusterError

DEFAULT_SECONDS = 300.0
"""How long processes wait for each other."""


@dataclasses.dataclass(frozen=True)
class Announcement:
    """A launcher's statement that it has started processes.

    Their addresses are looked up for one announcement only.
    """

    source: str
    """The launcher, or the variable, such as `"Slurm"`."""
    count_from: str
    """The variable that tells the number of processes."""
    count: int
    """The number of processes."""
    find: Callable[[float], Cluster]
    """Returns the processes. It waits so many seconds for the others."""


Launcher = Callable[[Mapping[str, str]], Announcement | None]
"""Returns the announcement in environment variables, if there is one."""

_launchers: list[Launcher] = []
ask = _launchers.append
"""Has a launcher asked from now on, after those before it."""


def find_cluster(
    addresses: Sequence[str] | str | None = None,
    index: int | None = None,
    environ: Mapping[str, str] = os.environ,
    seconds: float = DEFAULT_SECONDS,
) -> Cluster | None:
    """Returns the processes that train together; `None` for one alone.

    The arguments decide, or the first launcher that tells of processes, if it
    does not contradict others. TensorFlow is not started.
    """
    if addresses is not None or index is not None:
        cluster = _from_arguments(addresses, index)
    else:
        cluster = _from_environ(environ, seconds)
    is_alone = cluster is None or len(cluster.addresses) == 1
    return None if is_alone else cluster


def _from_arguments(addresses: Any, index: int | None) -> Cluster:
    if addresses is None:
        raise ClusterError(
            f"Got the index {index}, but no addresses. Give the addresses of "
            'all processes, such as ["10.0.0.1:2222", "10.0.0.2:2222"].'
        )
    if isinstance(addresses, str):
        addresses = separated(addresses)
    if not isinstance(addresses, Sequence) or not all(
        isinstance(each, str) for each in addresses
    ):
        raise ClusterError(
            'Expected addresses such as ["10.0.0.1:2222", "10.0.0.2:2222"]. '
            f"Got {addresses!r}."
        )
    if index is None and len(addresses) > 1:
        raise ClusterError(
            f"Got {len(addresses)} addresses, but no index. Give the index of "
            "this process' address as `index`."
        )
    own = 0 if index is None else index
    return Cluster(tuple(addresses), own, "the arguments of initialize")


def _from_environ(environ: Mapping[str, str], seconds: float) -> Cluster | None:
    if not _launchers:
        raise ClusterError(
            "No launcher is asked for the other processes, as "
            "CONFLUX_EXTENSIONS=0 does without them. Give `initialize` the "
            "addresses of all processes and the index of this one, which is 0 "
            "if it is alone, or unset CONFLUX_EXTENSIONS."
        )
    found = [*filter(None, (announced(environ) for announced in _launchers))]
    for other in found[1:]:
        # `mpirun -n 1` may start the program that starts the processes.
        if other.count not in (1, found[0].count):
            raise ClusterError(
                f"{found[0].count_from} tells of {found[0].count} processes, "
                f"but {other.count_from} of {other.count}. Start the program "
                "through one launcher, or unset the variable that is not meant."
            )
    # MPI cannot find a process that is alone without mpi4py, and need not.
    return found[0].find(seconds) if found and found[0].count > 1 else None
