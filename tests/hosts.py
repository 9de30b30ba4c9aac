"""Two hosts and the cable between them: network namespaces of Linux."""

import contextlib
import os
import subprocess
from collections.abc import Iterator

CABLE = "cable"
"""What the hosts call their end of it."""


@contextlib.contextmanager
def two_hosts() -> Iterator[dict[str, str]]:
    """Yields the addresses of two hosts, by the names of their namespaces."""
    hosts = {f"conflux-{os.getpid()}-{i}": f"10.213.0.{i + 1}" for i in (0, 1)}
    first, second = hosts
    with contextlib.ExitStack() as stack:
        for name in hosts:
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
        peer = ["peer", "name", CABLE, "netns", second]
        _ip("-n", first, "link", "add", CABLE, "type", "veth", *peer)
        for name, address in hosts.items():
            _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
            for each in (CABLE, "lo"):
                _ip("-n", name, "link", "set", each, "up")
        yield hosts


def are_allowed() -> bool:
    """Whether this user may make such hosts on this machine."""
    try:
        with two_hosts():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
