"""Hosts and the network between them: namespaces of Linux, a delay, a rate.

A thread of this process carries what a host sends to where it belongs.
"""

import contextlib
import fcntl
import os
import queue
import select
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Iterator

CABLE = "cable"
"""What the hosts call their end of it."""
_SET_NAME = 0x400454CA
_PACKETS = 0x1001  # of IP, without a header


class Network:
    """Carries packets between hosts.

    Attributes:
        hosts: The addresses of the hosts by the names of their namespaces.
        delay: The seconds that a packet is on its way.
        rate: The bytes that a host sends in a second, if not any number.
        sent: The bytes that have been sent.
    """

    def __init__(self, delay: float, rate: float) -> None:
        self.hosts: dict[str, str] = {}
        self.delay = delay
        self.rate = rate
        self.sent = 0
        self._ends: dict[bytes, int] = {}
        self._threads: list[threading.Thread] = []
        self._is_closed = False

    def add(self, name: str, address: str) -> None:
        """Lays the cable of a host."""
        end = os.open("/dev/net/tun", os.O_RDWR)
        made = struct.pack("16sH", f"tun{os.getpid()}".encode(), _PACKETS)
        fcntl.ioctl(end, _SET_NAME, made)
        _ip("link", "set", f"tun{os.getpid()}", "name", CABLE, "netns", name)
        _ip("-n", name, "address", "add", f"{address}/24", "dev", CABLE)
        for each in (CABLE, "lo"):
            _ip("-n", name, "link", "set", each, "up")
        self.hosts[name] = address
        self._ends[socket.inet_aton(address)] = end

    def carry(self) -> None:
        """Starts to carry packets."""
        for end in self._ends.values():
            due: queue.SimpleQueue = queue.SimpleQueue()
            self._threads += [
                threading.Thread(target=self._take, args=(end, due)),
                threading.Thread(target=self._deliver, args=(due,)),
            ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends what has been started."""
        self._is_closed = True
        for thread in self._threads:
            thread.join()
        for end in self._ends.values():
            os.close(end)

    def _take(self, end: int, due: queue.SimpleQueue) -> None:
        free = 0.0
        with contextlib.suppress(OSError):  # of a cable that is cut
            while not self._is_closed:
                if not select.select([end], [], [], 0.1)[0]:
                    continue
                packet = os.read(end, 1 << 16)
                self.sent += len(packet)
                free = max(free, time.monotonic()) + len(packet) / self.rate
                due.put((free + self.delay, packet))
        due.put(None)

    def _deliver(self, due: queue.SimpleQueue) -> None:
        while taken := due.get():
            when, packet = taken
            time.sleep(max(0.0, when - time.monotonic()))
            target = self._ends.get(packet[16:20])
            if target is not None:
                with contextlib.suppress(OSError):
                    os.write(target, packet)


@contextlib.contextmanager
def network(
    count: int = 2, delay: float = 0.0, rate: float = float("inf")
) -> Iterator[Network]:
    """Yields so many hosts that are joined."""
    made = Network(delay, rate)
    with contextlib.ExitStack() as stack:
        stack.callback(made.close)
        for index in range(count):
            name = f"conflux-{os.getpid()}-{index}"
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "delete", name)
            made.add(name, f"10.213.0.{index + 1}")
        made.carry()
        yield made


def are_allowed() -> bool:
    """Whether this user may make such hosts on this machine."""
    try:
        with network():
            return True
    except (OSError, subprocess.CalledProcessError):
        return False


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
