"""The index of this process and the number of all, and how it joins them."""

import contextlib
import dataclasses
import faulthandler
import logging
import os
import random
import socket
import threading
import time
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence

import keras
import tensorflow as tf

from keras_conflux._cluster import loopback
from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import DEFAULT_SECONDS
from keras_conflux._cluster.launchers import find_cluster
from keras_conflux._cluster.roll_call import call_roll
from keras_conflux._common import arguments
from keras_conflux._common.errors import ProcessError
from keras_conflux._common.waiting import step_timeout
from keras_conflux._compat import keras_variables
from keras_conflux._compat import patching
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_processes

_log = logging.getLogger("keras_conflux")

DEFAULT_HEARTBEAT_SECONDS = 10.0
_LATE_SECONDS = 5.0
"""The seconds after TensorFlow's own limit at which waiting calls are ended."""
_SEED = "conflux/seed"
_STDERR = 2


@dataclasses.dataclass
class _Present:
    """This process, as it knows itself."""

    index: int = 0
    count: int = 1
    source: str | None = None
    """The place where the addresses were found, after `connect`."""
    drawn_seed: int | None = None
    """The seed that the processes have drawn, if the program has set none."""


_present = _Present()


def process_index() -> int:
    """Returns the index of this process among those that train together.

    A program writes a file of its own, or does anything else once, where this
    is 0. `fit`, `model.save` and the callbacks of Keras see to that themselves.

    Returns:
        The index, from 0; 0 if this process is alone.

    Example:
        ```python
        if kc.process_index() == 0:
            print("training on", kc.process_count(), "processes")
        ```
    """
    return _present.index


def process_count() -> int:
    """Returns how many processes train together.

    Returns:
        The number, 1 if this process is alone.

    Example:
        ```python
        part = kc.shard(x, kc.process_index(), kc.process_count())
        ```
    """
    return _present.count


def initialize(
    addresses: Sequence[str] | str | None = None,
    index: int | None = None,
    *,
    heartbeat: float = DEFAULT_HEARTBEAT_SECONDS,
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
            started them. If one dies meanwhile, process 0 exits 5 s later.

    Raises:
        ClusterError: If the addresses or the variables are wrong or incomplete,
            or nothing is asked for them, with `CONFLUX_EXTENSIONS=0`.
        ProcessError: If the others do not come in time or were told of another
            number of processes, the port is in use, or TensorFlow has started.

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
    if _present.source is not None:
        return
    cluster = find_cluster(addresses, index, seconds=timeout)
    _join(cluster, heartbeat, timeout)


def initialize_from_environment() -> None:
    """Joins processes that variables name, if `initialize` did not."""
    names = "TF_CONFIG", "KERAS_DISTRIBUTION_"
    join_others({k: v for k, v in os.environ.items() if k.startswith(names)})


def join_others(environ: Mapping[str, str]) -> None:
    """Joins the processes that some variables name, if this is still to do."""
    if environ and _present.source is None:
        cluster = find_cluster(environ=environ)
        _join(cluster, DEFAULT_HEARTBEAT_SECONDS, DEFAULT_SECONDS)


def _join(cluster: Cluster | None, heartbeat: float, timeout: float) -> None:
    if cluster is None:
        return
    patching.begin()
    if tensorflow_internals.has_started():
        raise ProcessError(
            f"{len(cluster.addresses)} processes are named by "
            f"{cluster.source}, but TensorFlow has started, after which they "
            "cannot be joined. Call `keras_conflux.initialize()` at the start "
            "of the program, before any model or tensor is made."
        )
    _connect(cluster, heartbeat, timeout)
    _log.info(
        "Process %d of %d, at %s, as %s says.",
        cluster.index,
        len(cluster.addresses),
        cluster.addresses[cluster.index],
        cluster.source,
    )


def _connect(cluster: Cluster, heartbeat: float, timeout: float) -> None:
    """Joins the other processes, and gives all of them one seed."""
    addresses, index = cluster.addresses, cluster.index
    error = call_roll(addresses, index, timeout)
    error = error or _connected(addresses, index, heartbeat, timeout)
    if error is not None:
        raise ProcessError(
            f"Process {index} at {addresses[index]} could not join the "
            f"{len(addresses)} processes that {cluster.source} names: "
            f"{', '.join(addresses)}. {error} Each must be started, be "
            "reachable from the others at its own address, and have that "
            "port to itself."
        )
    _present.index, _present.count = index, len(addresses)
    _present.source = cluster.source
    _seed_alike(timeout)


def _connected(
    addresses: tuple[str, ...], index: int, heartbeat: float, timeout: float
) -> str | None:
    """Joins the processes; returns why that fails, or `None`."""
    # The servers of the others come first: see `roll_call`.
    silent = _silent(addresses[1:], timeout) if index == 0 else []
    if silent:
        return f"Nobody answers at: {', '.join(silent)}."
    try:
        late = timeout + _LATE_SECONDS
        with contextlib.nullcontext() if index else _ending_after(late):
            tensorflow_processes.connect(addresses, index, heartbeat, timeout)
        if loopback.are_local(addresses):
            loopback.close_to_other_hosts(addresses[index])
    except (tf.errors.OpError, RuntimeError) as error:
        return f"TensorFlow says: {getattr(error, 'message', error)}."
    return None


@contextlib.contextmanager
def _ending_after(seconds: float) -> Iterator[None]:
    """Ends this process, the first, with a traceback, if it takes longer.

    It may wait for a dead one without an end, and holds Python's lock
    meanwhile. A timer of `faulthandler` does not need that.
    """
    seconds = min(seconds, threading.TIMEOUT_MAX)
    faulthandler.dump_traceback_later(seconds, exit=True, file=_STDERR)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _silent(addresses: Iterable[str], seconds: float) -> list[str]:
    """Returns the addresses at which nobody listens, after some seconds."""
    end = time.monotonic() + seconds
    silent = list(addresses)
    while silent and time.monotonic() < end:
        silent = [
            address
            for address in silent
            if time.monotonic() >= end or not _answers(address)
        ]
        time.sleep(0.1 if silent else 0)
    return silent


def _answers(address: str) -> bool:
    """Whether somebody listens at an address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), 2).close()
    except OSError:
        return False
    return True


def _seed_alike(timeout: float) -> None:
    """Gives the first process' seed to all that have not set one."""
    mine = keras_variables.random_seed()
    if _present.index == 0:
        seed = random.SystemRandom().randrange(2**31) if mine is None else mine
        tensorflow_processes.put_text(_SEED, str(seed))
    seed = tensorflow_processes.wait_for_text(_SEED, timeout)
    if mine is None:
        _present.drawn_seed = int(seed)
        keras.utils.set_random_seed(_present.drawn_seed)


def seed_is_drawn() -> bool:
    """Whether the seed in force is another at each start of the program."""
    drawn = _present.drawn_seed
    return drawn is not None and drawn == keras_variables.random_seed()
