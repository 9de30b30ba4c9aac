"""Processes that are told in the variables of `keras.distribution`.

`keras.distribution.initialize` describes them. On JAX the address of the first
process is enough. TensorFlow's processes need all, to connect each to each.
"""

from collections.abc import Mapping
from collections.abc import Sequence

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.cluster import separated
from keras_conflux._cluster.cluster import split_address
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers.environment_numbers import integer

ADDRESSES = "KERAS_DISTRIBUTION_JOB_ADDRESSES"
COUNT = "KERAS_DISTRIBUTION_NUM_PROCESSES"
INDEX = "KERAS_DISTRIBUTION_PROCESS_ID"


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns the announcement in `keras.distribution`'s variables, if any."""
    given = environ.get(ADDRESSES, "")
    count = integer(environ, COUNT)
    index = integer(environ, INDEX)
    if not given.strip():
        _refuse_without_addresses(count, index)
        return None
    addresses = _addresses(separated(given), count)
    if index is None and len(addresses) > 1:
        raise ClusterError(
            f"{ADDRESSES} is set, but {INDEX} is not. Set it to a number from "
            f"0 to {len(addresses) - 1}, another in each process."
        )
    cluster = Cluster(addresses, index or 0, ADDRESSES)
    source = "the variables of keras.distribution"
    told_by = ADDRESSES if count is None else COUNT
    return Announcement(source, told_by, len(addresses), lambda _: cluster)


def _addresses(addresses: Sequence[str], count: int | None) -> tuple[str, ...]:
    """Returns one address per process; one may stand for ports of a host."""
    if count is None or len(addresses) == count:
        return tuple(addresses)
    if len(addresses) == 1 and count > 1:
        host, port = split_address(addresses[0], ADDRESSES)
        return tuple(f"{host}:{port + k}" for k in range(count))
    raise ClusterError(
        f"{ADDRESSES}: expected the addresses of all {count} processes, "
        "separated by commas, or one address if all run on one host. Got "
        f"{len(addresses)}: {', '.join(addresses)}. The processes of "
        "TensorFlow connect each to each, unlike JAX's, so each "
        "must know all addresses."
    )


def _refuse_without_addresses(count: int | None, index: int | None) -> None:
    """Refuses variables that speak of processes without saying where."""
    is_alone = count == 1 and index in (None, 0)
    if is_alone or (count is None and index is None):
        return
    given = INDEX if count is None else COUNT
    raise ClusterError(
        f"{given} is set, but {ADDRESSES} is not. Set it to the addresses of "
        f"all processes, such as 10.0.0.1:2222,10.0.0.2:2222, or unset {given}."
    )
