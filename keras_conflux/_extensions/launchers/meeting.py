"""Processes that know only the first one learn from it where the others are."""

import contextlib
import ipaddress
import json
import selectors
import socket
import time
from collections.abc import Iterable
from typing import Any

from keras_conflux._common.errors import ClusterError

SECONDS = 300.0
"""How long processes wait for each other."""
_ATTEMPT_SECONDS = 2.0
_LONGEST = 1000
"""How many bytes a process says at most."""


def hosts_of_all(
    first: str, port: int, rank: int, count: int, run: str, seconds: float
) -> list[str]:
    """Returns the host of each process; all processes call it.

    The first process listens. A host is the address from which its processes
    come, so it need not know a name of its own.

    Args:
        first: The host of the first process.
        port: A port there that is free.
        rank: Which process this is.
        count: How many there are.
        run: Names the training, so that no process of another one is taken.
        seconds: How long the others are waited for.

    Raises:
        ClusterError: If they do not come, or the port is in use.
    """
    if rank > 0:
        return _asked(first, port, [run, count, rank], seconds)
    try:
        server = _server(port)
    except OSError as error:
        raise ClusterError(
            f"Process 0 cannot listen at port {port}, where the others look "
            f"for it: {error}. Set CONFLUX_PORT to another port, in all "
            "processes."
        ) from error
    with server, contextlib.ExitStack() as stack:
        callers = _Callers(server, run, count, stack)
        come = callers.wait(seconds)
        others = [_host(come[each], first) for each in range(1, count)]
        _answer(come.values(), [first, *others])
    return [first, *others]


class _Callers:
    """Who comes to the first process. None of them can hold it up."""

    def __init__(
        self,
        server: socket.socket,
        run: str,
        count: int,
        stack: contextlib.ExitStack,
    ) -> None:
        self._server = server
        self._run = run
        self._count = count
        self._stack = stack
        self._ready = stack.enter_context(selectors.DefaultSelector())
        self._ready.register(server, selectors.EVENT_READ)
        self._come: dict[int, socket.socket] = {}

    def wait(self, seconds: float) -> dict[int, socket.socket]:
        """Waits until all have come, and returns them by their ranks."""
        end = time.monotonic() + seconds
        while missing := set(range(1, self._count)) - self._come.keys():
            left = end - time.monotonic()
            if left <= 0:
                raise ClusterError(
                    f"Process 0 has waited for {seconds:g} s at port "
                    f"{self._server.getsockname()[1]} for the processes "
                    f"{', '.join(map(str, sorted(missing)))}. Each must be "
                    "started and reach this port; CONFLUX_PORT chooses another "
                    "one."
                )
            for key, _ in self._ready.select(left):
                with contextlib.suppress(OSError):
                    if key.data is None:
                        self._accept()
                    else:
                        self._listen(key.fileobj, key.data)
        return self._come

    def _accept(self) -> None:
        caller = self._stack.enter_context(self._server.accept()[0])
        caller.setblocking(False)
        self._ready.register(caller, selectors.EVENT_READ, bytearray())

    def _listen(self, caller: Any, said: bytearray) -> None:
        try:
            chunk = caller.recv(_LONGEST)
        except OSError:
            chunk = b""
        said += chunk
        if chunk and b"\n" not in said and len(said) < _LONGEST:
            return
        self._ready.unregister(caller)
        match _parsed(said):
            case [self._run, self._count, int(rank)]:
                self._come[rank] = caller
            case _:  # somebody else, such as a check whether the port is open
                caller.close()


def _host(caller: Any, first: str) -> str:
    """Returns the host from which a caller of the first process has come."""
    there, here = (
        ipaddress.ip_address(name[0].partition("%")[0])
        for name in (caller.getpeername(), caller.getsockname())
    )
    # From the own host, one comes from the address that one goes to.
    if there == here or there.is_loopback:
        return first
    return str(getattr(there, "ipv4_mapped", None) or there)


def _answer(callers: Iterable[socket.socket], hosts: list[str]) -> None:
    for caller in callers:
        with contextlib.suppress(OSError):
            caller.settimeout(_ATTEMPT_SECONDS)
            caller.sendall(json.dumps(hosts).encode() + b"\n")
    for caller in callers:
        # They hang up first, so that the port is free at once.
        with contextlib.suppress(OSError):
            caller.recv(1)


def _asked(
    first: str, port: int, own: list[object], seconds: float
) -> list[str]:
    """Introduces this process to the first one, and returns what it answers."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with contextlib.suppress(OSError):
            with socket.create_connection(
                (first, port), min(left, _ATTEMPT_SECONDS)
            ) as server:
                server.settimeout(left)
                server.sendall(json.dumps(own).encode() + b"\n")
                with server.makefile("rb") as file:
                    answer = _parsed(file.readline())
            if isinstance(answer, list):
                return answer
        time.sleep(0.1)
    raise ClusterError(
        f"Process {own[2]} has not reached process 0 at {first}:{port} in "
        f"{seconds:g} s. Process 0 must be started, and its port be reachable; "
        "CONFLUX_PORT chooses another one."
    )


def _server(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _parsed(text: bytes | bytearray) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
