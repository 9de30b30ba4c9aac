"""The processes that train together."""

import dataclasses

from keras_conflux._common.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of all processes, alike in all, and the own index."""

    addresses: tuple[str, ...]
    """`host:port` of every process."""
    index: int
    """The index of this process."""
    source: str
    """The place where this was found, such as `"TF_CONFIG"` or `"Slurm"`."""

    def __post_init__(self) -> None:
        """Refuses addresses with which no processes could connect."""
        if not self.addresses:
            raise ClusterError(
                f"{self.source}: expected the address of every process, "
                'such as ["10.0.0.1:2222", "10.0.0.2:2222"], but got none.'
            )
        for address in self.addresses:
            split_address(address, self.source)
        for index, address in enumerate(self.addresses):
            first = self.addresses.index(address)
            if first < index:
                raise ClusterError(
                    f"{self.source}: processes {first} and {index} both have "
                    f"the address {address!r}. Give processes on one host "
                    "different ports."
                )
        own, count = self.index, len(self.addresses)
        if type(own) is not int or own not in range(count):
            raise ClusterError(
                f"{self.source}: there are {count} processes, so the index of "
                f"this one is one of 0 to {count - 1}. Got {own!r}."
            )


def separated(addresses: str) -> list[str]:
    """Returns the addresses of a text in which commas separate them."""
    return [each.strip() for each in addresses.split(",")]


def split_address(address: str, source: str) -> tuple[str, int]:
    """Returns the host, an IPv6 one in brackets, and the port."""
    host, _, port = address.rpartition(":")
    is_bare_ipv6 = ":" in host and not host.endswith("]")
    digits = port.isascii() and port.isdecimal()
    if not host or is_bare_ipv6 or not digits or not 0 < int(port) < 65536:
        raise ClusterError(
            f"{source}: expected addresses such as '10.0.0.1:2222' or "
            f"'[fd00::1]:2222', with a port from 1 to 65535. Got {address!r}."
        )
    return host, int(port)
