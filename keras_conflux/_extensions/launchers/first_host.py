"""Processes that know the host of process 0, and nobody else's address.

All meet there, at a port that is derived from a number of the training. The
processes of a host listen at this port and those after it, in the order of
their ranks. CONFLUX_PORT chooses another one.
"""

import contextlib
from collections.abc import Mapping

from keras_conflux._cluster import roll_call
from keras_conflux._cluster.cluster import Cluster
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers.environment_numbers import integer

PORT = "CONFLUX_PORT"

# Ports that the system gives to outgoing connections begin at 32768.
_FIRST_PORT = 16384
_PORTS = 64
_SLOTS = (32768 - _FIRST_PORT) // _PORTS


def hosts_of_all(
    first: str, port: int, rank: int, count: int, seconds: float
) -> list[str]:
    """Returns the host of each process. All call it in so many seconds."""
    host = f"[{first}]" if ":" in first else first
    at = f"{host}:{port}"
    hosts, wrong = roll_call.hosts_of_all(at, rank, count, seconds)
    if wrong:
        raise ClusterError(
            f"Process {rank} has not met the others. {wrong} Each must be "
            f"started, and reach process 0 at {at}. Set {PORT} to "
            "another port, in all processes, if something else uses this one."
        )
    return hosts


def cluster_of(hosts: list[str], port: int, rank: int, source: str) -> Cluster:
    """Returns processes that listen at consecutive ports of their hosts."""
    addresses = [
        f"[{host}]:{port + place}" if ":" in host else f"{host}:{port + place}"
        for host, place in zip(hosts, local_ranks(hosts), strict=True)
    ]
    return Cluster(tuple(addresses), rank, source)


def local_ranks(hosts: list[str]) -> list[int]:
    """Returns which of the processes of its host each process is."""
    return [hosts[:rank].count(host) for rank, host in enumerate(hosts)]


def first_port(
    environ: Mapping[str, str], number: int, taken: int | None = None
) -> int:
    """Returns the port of the first process of each host, of 64.

    Trainings that share a host get other ports, unless their numbers lie 128 or
    more apart. All processes have the same number. Others use a taken port.
    """
    given = integer(environ, PORT)
    if given is not None:
        return given
    first = _FIRST_PORT + number % _SLOTS * _PORTS
    if taken is not None and first <= taken < first + _PORTS:
        return first_port(environ, number + _SLOTS // 2)
    return first


def take_part(local_rank: int, count: int) -> None:
    """Lets this process see its part of the GPUs of its host.

    Where it sees fewer GPUs than there are processes, it takes all of them.
    """
    if count == 1:
        return
    import tensorflow as tf  # `keras-conflux run` does without it

    seen = tf.config.get_visible_devices("GPU")
    share = len(seen) // count
    if share > 0:
        # If TensorFlow has started, joining the others says so.
        with contextlib.suppress(RuntimeError):
            tf.config.set_visible_devices(
                seen[local_rank * share : (local_rank + 1) * share], "GPU"
            )


def take_part_of(hosts: list[str], rank: int) -> None:
    """Lets this process see its part, where processes run on these hosts."""
    take_part(local_ranks(hosts)[rank], hosts.count(hosts[rank]))
