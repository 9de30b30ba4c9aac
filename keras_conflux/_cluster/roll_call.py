"""Waits until all processes have come, before TensorFlow connects them.

TensorFlow's first process waits for the others without an end, and Python with
it. If one of them could not start, for example because another program has its
port, nobody would ever say so. So each process first says to process 0, at the
address of that one, which it is. Process 0 answers when all have come, or with
what is wrong, and all go on or raise alike.
"""

import contextlib
import json
import select
import socket
import time
from collections.abc import Sequence

from keras_conflux._cluster.cluster import split_address

_START = "start"
_ATTEMPT_SECONDS = 2.0
"""How long one attempt to reach somebody takes at most."""
_LATE_SECONDS = 5.0
"""How much longer than process 0 the others wait for its answer."""
_LONGEST = 1000
"""How many characters a message has at most."""


def call_roll(
    addresses: Sequence[str], index: int, seconds: float
) -> str | None:
    """Waits until all processes have come.

    Args:
        addresses: `"host:port"` of each.
        index: The index of this process.
        seconds: The time that process 0 waits for the others.

    Returns:
        `None` when all are there, else what is wrong.
    """
    try:
        server = _listening_at(addresses[index])
    except OSError as error:
        return f"Its port cannot be used: {error}."
    with server:
        if index == 0:
            return _answered(server, addresses, seconds)
    return _reported(addresses, index, seconds + _LATE_SECONDS)


def _listening_at(address: str) -> socket.socket:
    """Returns a server at the port of an address, on all interfaces."""
    _, port = split_address(address, "the address of this process")
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _answered(
    server: socket.socket, addresses: Sequence[str], seconds: float
) -> str | None:
    """Waits for the others, and answers all of them with what is wrong."""
    callers: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        wrong = _wait(server, addresses, seconds, callers, stack)
        for each in callers:
            _send(each, wrong or _START)
        # They hang up first, so that the port is free at once.
        for each in callers:
            _receive(each)
    return wrong


def _wait(
    server: socket.socket,
    addresses: Sequence[str],
    seconds: float,
    callers: list[socket.socket],
    stack: contextlib.ExitStack,
) -> str | None:
    """Waits for the others, collects callers, and returns what is wrong."""
    count = len(addresses)
    come: dict[int, socket.socket] = {}
    end = time.monotonic() + seconds
    while len(come) < count - 1:
        server.settimeout(max(end - time.monotonic(), 0.001))
        try:
            caller = stack.enter_context(server.accept()[0])
        except TimeoutError:
            missing = [
                f"process {index} at {address}"
                for index, address in enumerate(addresses)
                if index and index not in come
            ]
            return f"Nobody has come in {seconds:g} s as {', '.join(missing)}."
        caller.settimeout(_ATTEMPT_SECONDS)
        introduced = _caller_of(_receive(caller))
        if introduced is None:
            continue  # somebody else, such as a check whether the port is open
        callers.append(caller)
        index, known = introduced
        if known != count:
            return (
                f"Process {index} was told of {known} processes, and process 0 "
                f"of {count}."
            )
        for gone in [each for each in come if _has_hung_up(come[each])]:
            del come[gone]
        if index in come:
            return f"Two processes were told that they are process {index}."
        come[index] = caller
    return None


def _reported(
    addresses: Sequence[str], index: int, seconds: float
) -> str | None:
    """Introduces this process to process 0, and returns what is wrong."""
    host, port = split_address(addresses[0], "the address of process 0")
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            first = socket.create_connection(
                (host.strip("[]"), port), min(left, _ATTEMPT_SECONDS)
            )
        except OSError:
            time.sleep(0.1)
            continue
        with first:
            first.settimeout(max(end - time.monotonic(), 0.1))
            _send(first, [index, len(addresses)])
            answer = _receive(first)
        if isinstance(answer, str):
            return None if answer == _START else answer
        time.sleep(0.1)
    return f"Process 0 does not answer at {addresses[0]}, in {seconds:g} s."


def _send(to: socket.socket, message: object) -> None:
    with contextlib.suppress(OSError):
        to.sendall(json.dumps(message).encode() + b"\n")


def _receive(other: socket.socket) -> object:
    """Returns a message; `None` if the other side is not a process of ours."""
    try:
        with other.makefile("rb") as file:
            return json.loads(file.readline(_LONGEST))
    except (OSError, ValueError):
        return None


def _caller_of(message: object) -> tuple[int, int] | None:
    """Returns the index of a caller, and the count that it knows, if any."""
    match message:
        case [int(index), int(count)] if 0 < index < count:
            return index, count
    return None


def _has_hung_up(other: socket.socket) -> bool:
    readable, _, _ = select.select([other], [], [], 0)
    return bool(readable)
