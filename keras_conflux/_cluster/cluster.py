"""The processes that train together, and what launchers tell of them."""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping

from keras_conflux._common.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of all processes, and which of them this one is.

    All processes hold equal addresses, in the same order.

    Raises:
        ClusterError: If there is no address, an address has no port or
            repeats, or the index is not that of an address.

    Example:
        ```python
        cluster = Cluster(("a:2222", "b:2222"), index=1, source="a test")
        cluster.addresses[cluster.index]  # "b:2222"
        ```
    """

    addresses: tuple[str, ...]
    """`host:port` of every process."""
    index: int
    """Which of them this process is."""
    source: str
    """Where this was found, such as `"TF_CONFIG"` or `"Slurm"`."""

    def __post_init__(self) -> None:
        """Refuses what no processes could connect with."""
        if not self.addresses:
            raise ClusterError(
                f"{self.source}: expected the address of every process, "
                'such as ["10.0.0.1:2222", "10.0.0.2:2222"], but got none.'
            )
        for address in self.addresses:
            split_address(address, self.source)
        self._refuse_repeated()
        if self.index not in range(len(self.addresses)):
            raise ClusterError(
                f"{self.source}: there are {len(self.addresses)} processes, "
                f"so the index of this one is one of 0 to "
                f"{len(self.addresses) - 1}. Got {self.index!r}."
            )

    def _refuse_repeated(self) -> None:
        for index, address in enumerate(self.addresses):
            first = self.addresses.index(address)
            if first < index:
                raise ClusterError(
                    f"{self.source}: processes {first} and {index} both have "
                    f"the address {address!r}. Give processes on one host "
                    "different ports."
                )


def split_address(address: str, source: str) -> tuple[str, int]:
    """Returns the host and the port of an address.

    Args:
        address: `"host:port"`. An IPv6 host stands in brackets.
        source: Where the address was found, for the message of an error.

    Returns:
        The host, as it is written, and the port.

    Raises:
        ClusterError: If the host or the port is missing, or the port is not
            one of 1 to 65535.
    """
    host, _, port = address.rpartition(":")
    is_bare_ipv6 = ":" in host and not host.endswith("]")
    digits = port.isascii() and port.isdecimal()
    if not host or is_bare_ipv6 or not digits or not 0 < int(port) < 65536:
        raise ClusterError(
            f"{source}: expected addresses such as '10.0.0.1:2222' or "
            f"'[fd00::1]:2222', with a port from 1 to 65535. Got {address!r}."
        )
    return host, int(port)


@dataclasses.dataclass(frozen=True)
class Announcement:
    """That a launcher has started some processes, and how to find them.

    The number of processes is known at once. What finds their addresses is
    called for one announcement only, as processes may have to talk for it.
    """

    source: str
    """The launcher, or the variable, such as `"Slurm"`."""
    count_from: str
    """The variable that tells the number of processes."""
    count: int
    """The number of processes."""
    find: Callable[[], Cluster]
    """Returns the processes."""


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the value of a variable that holds a number from 0.

    Args:
        environ: The environment variables.
        name: The variable.

    Returns:
        The number, or `None` if the variable is not set or empty.

    Raises:
        ClusterError: If the variable holds something else.
    """
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(
            f"Expected the environment variable {name} to be a number from "
            f"0. Got {text!r}."
        )
    return int(text)


def rank_and_count(
    environ: Mapping[str, str], rank_name: str, count_name: str
) -> tuple[int, int] | None:
    """Returns which process this is, and how many there are.

    Args:
        environ: The environment variables.
        rank_name: The variable that tells which process this is.
        count_name: The variable that tells how many processes there are.

    Returns:
        Both numbers, or `None` if neither variable is set.

    Raises:
        ClusterError: If only one is set, or the rank is not below the count.
    """
    rank = integer(environ, rank_name)
    count = integer(environ, count_name)
    if rank is None and count is None:
        return None
    if rank is None or count is None:
        given, missing = rank_name, count_name
        if rank is None:
            given, missing = count_name, rank_name
        raise ClusterError(
            f"The environment variable {given} is set, but {missing} is not. "
            "A launcher sets both: start the program through it, set "
            f"{missing} as well, or unset {given}."
        )
    if rank >= count:
        raise ClusterError(
            f"Expected {rank_name} to be below {count_name}. Got "
            f"{rank_name}={rank} and {count_name}={count}."
        )
    return rank, count
