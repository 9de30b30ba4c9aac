"""`initialize`: joins the processes that train together."""

import logging
import os
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any

from keras_conflux._cluster import processes
from keras_conflux._cluster.discovery import DEFAULT_SECONDS
from keras_conflux._cluster.discovery import find_cluster
from keras_conflux._common import arguments
from keras_conflux._common.errors import ProcessError
from keras_conflux._common.waiting import step_timeout
from keras_conflux._compat import patching
from keras_conflux._compat import tensorflow_internals

_log = logging.getLogger("keras_conflux")


def initialize(
    addresses: Sequence[str] | str | None = None,
    index: int | None = None,
    *,
    heartbeat: float = processes.DEFAULT_HEARTBEAT_SECONDS,
    timeout: float = DEFAULT_SECONDS,
) -> None:
    """Joins the other processes of a training, on this host or on others.

    All processes run the same program, which calls this first, before any
    model or tensor is made. From then on `replicate` and
    `keras.distribution.DataParallel` mean the devices of all processes, and
    `fit` computes on them what one device computes.

    The other processes are found, in this order, from the arguments, from the
    variables `KERAS_DISTRIBUTION_*`, from `TF_CONFIG`, from Slurm, from MPI and
    from torchrun. If nothing tells of others, this process is alone, and
    nothing happens. A second call does nothing.

    All processes get the same random seed, unless the program has set one with
    `keras.utils.set_random_seed`.

    Args:
        addresses: `"host:port"` of each process, the same list in all, or a
            string of them with commas between. Every process must be reachable
            at its address from all others. Whoever reaches the port of a
            process can read and write your files, and run programs as you:
            see "Ports" in the guide *Several processes and hosts*.
        index: The position of this process among the addresses, from 0.
        heartbeat: After so many seconds of silence a process counts as dead,
            and all others end with a `ProcessError`.
        timeout: How many seconds to wait for the other processes, whoever has
            started them. If one dies during the connection, process 0 exits
            after 5 s more.

    Raises:
        ClusterError: If the addresses or the variables are wrong or incomplete,
            or nothing is asked for them, with `CONFLUX_EXTENSIONS=0`.
        ProcessError: If the others do not come in time or were told of another
            number of processes, if the port is in use, or if TensorFlow has
            started already.

    Example:
        ```python
        import keras_conflux as kc

        kc.initialize()
        model = kc.replicate(build_model())
        model.compile("adam", "mse")
        model.fit(dataset, verbose=0)
        ```
    """
    arguments.assert_seconds("heartbeat", heartbeat)
    arguments.assert_seconds("timeout", timeout)
    step_timeout()  # an error now, and not after hours
    if processes.source() is not None:
        return
    cluster = find_cluster(addresses, index, seconds=timeout)
    _join(cluster, heartbeat, timeout)


def initialize_from_environment() -> None:
    """Joins others where `TF_CONFIG` or `KERAS_DISTRIBUTION_*` names them.

    Called before a strategy is made, for programs that do not call
    `initialize`. A process that trained alone, though its variables name
    others, would not be noticed.

    Raises:
        ProcessError: If TensorFlow has started already.
    """
    names = "TF_CONFIG", "KERAS_DISTRIBUTION_"
    join_others({k: v for k, v in os.environ.items() if k.startswith(names)})


def join_others(environ: Mapping[str, str]) -> None:
    """Joins the processes that some variables name, if this is still to do.

    Args:
        environ: See `discovery.find_cluster`.

    Raises:
        ProcessError: If TensorFlow has started already.
    """
    if environ and processes.source() is None:
        _join(
            find_cluster(environ=environ),
            processes.DEFAULT_HEARTBEAT_SECONDS,
            DEFAULT_SECONDS,
        )


def _join(cluster: Any, heartbeat: float, timeout: float) -> None:
    if cluster is None:
        return
    patching.begin()
    if len(cluster.addresses) > 1 and tensorflow_internals.has_started():
        raise ProcessError(
            f"{len(cluster.addresses)} processes are named by "
            f"{cluster.source}, but TensorFlow has started, after which they "
            "cannot be joined. Call `keras_conflux.initialize()` at the start "
            "of the program, before any model or tensor is made."
        )
    processes.connect(
        cluster.addresses, cluster.index, cluster.source, heartbeat, timeout
    )
    _log.info(
        "Process %d of %d, at %s, as %s says.",
        cluster.index,
        len(cluster.addresses),
        cluster.addresses[cluster.index],
        cluster.source,
    )
