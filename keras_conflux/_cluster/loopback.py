"""Closes the ports of processes that are all on one host to other hosts.

TensorFlow listens on all interfaces, whatever the address. Its socket can be
bound to the loopback interface afterwards. Users of the host still reach it.
"""

import contextlib
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from collections.abc import Sequence

from keras_conflux._cluster.cluster import split_address

_INTERFACE = b"lo"


def are_local(addresses: Sequence[str]) -> bool:
    """Whether addresses belong to the loopback interface, as written."""
    hosts = [split_address(each, "an address")[0] for each in addresses]
    return all(map(_is_local, hosts))


def _is_local(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def close_to_other_hosts(address: str) -> None:
    """Closes this process' port to others, if it can."""
    _, port = split_address(address, "the address of this process")
    for each in _listening(port):
        bind_to_loopback(each)


def bind_to_loopback(server: socket.socket) -> None:
    """Lets a socket be reached through the loopback only, if it can."""
    with contextlib.suppress(OSError, AttributeError):
        server.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)


def _listening(port: int) -> Iterator[socket.socket]:
    """Yields copies of the sockets of this process that listen at a port."""
    descriptors = []
    with contextlib.suppress(OSError):  # not on Linux
        descriptors = os.listdir("/proc/self/fd")
    for descriptor in map(int, descriptors):
        with contextlib.suppress(OSError):  # closed meanwhile
            if stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as copy:
                    if _listens_at(copy, port):
                        yield copy


def _listens_at(found: socket.socket, port: int) -> bool:
    if found.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    listens = found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(listens) and found.getsockname()[1] == port
