"""Waits until all processes have come, before TensorFlow connects them.

TensorFlow's first process waits for the others without an end, and Python with
it. So each process first tells process 0, at its address, its own index, and
hears when all have come, or an error.

Anybody can call. So process 0 listens to all callers at once, until one
deadline, and to a few bytes of each. A message is one line: a text, and a
digest of it by which those know each other who have the same token.
"""

import contextlib
import hmac
import ipaddress
import json
import os
import re
import select
import selectors
import socket
import time
from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

from keras_conflux._cluster import loopback
from keras_conflux._cluster.cluster import split_address

TOKEN = "CONFLUX_TOKEN"
"""The variable that the processes of a training have, and strangers do not."""

_START = "start"
_ATTEMPT_SECONDS = 2.0
"""How long one attempt to reach somebody takes at most."""
_LATE_SECONDS = 5.0
"""How much longer than process 0 the others wait for its answer."""
_INTRODUCTION = re.compile(rb"\w{64} ([1-9]\d{0,5}) ([1-9]\d{0,5})\n")
_INTRODUCTION_BYTES = 100
"""The longest introduction of a caller: a digest and two numbers."""
_ANSWER_BYTES = 100_000
"""The longest answer of process 0. It may name many processes."""
_TWICE = "Another program may use it, or this rank was started twice."
_UNKNOWN_CALLERS = 100
"""How many callers may be silent. Then the first of them has to go."""


def call_roll(addresses: Sequence[str], index: int, limit: float) -> str | None:
    """Waits so long until all have come; returns why not, if not."""
    names = [f"process {k} at {each}" for k, each in enumerate(addresses)]
    try:
        server = _listening_at(addresses[index])
    except OSError as error:
        return f"Its port cannot be used: {error}. {_TWICE}"
    with server:
        if loopback.are_local(addresses):
            loopback.bind_to_loopback(server)
        if index > 0:
            _, wrong = _reported(addresses[0], index, len(addresses), limit)
        else:
            _, wrong = _answered(server, names, limit)
        return wrong


def hosts_of_all(
    first: str, index: int, count: int, seconds: float
) -> tuple[list[str], str | None]:
    """Waits until all processes have come, and returns from which hosts.

    A host is the address from which its processes come, so it need not know a
    name of its own. Process 0 has the first. If none come, a message says why.
    """
    if index > 0:
        hosts, wrong = _reported(first, index, count, seconds)
    else:
        names = [f"process {each}" for each in range(count)]
        try:
            server = _listening_at(first)
        except OSError as error:
            return [], f"Its port cannot be used: {error}. {_TWICE}"
        with server:
            hosts, wrong = _answered(server, names, seconds)
    host, _ = split_address(first, "the address of process 0")
    return [each or host.strip("[]") for each in hosts], wrong


def _answered(
    server: socket.socket, names: Sequence[str], seconds: float
) -> tuple[list[str], str | None]:
    """Waits for the others, and answers all of them."""
    with _Callers(server) as callers:
        come, wrong = _wait(callers, names, seconds)
        hosts = ["", *(_host(come[each]) for each in sorted(come))]
        callers.answer(wrong or _START + json.dumps(hosts))
        return hosts, wrong


def _host(caller: Any) -> str:
    """Returns the host that a caller has come from; "" is process 0's own."""
    there, here = (
        ipaddress.ip_address(name[0].partition("%")[0])
        for name in (caller.getpeername(), caller.getsockname())
    )
    # From the own host, one comes from the address that one goes to.
    if there == here or there.is_loopback:
        return ""
    return str(getattr(there, "ipv4_mapped", None) or there)


def _listening_at(address: str) -> socket.socket:
    """Returns a server at the port of an address, on all interfaces."""
    _, port = split_address(address, "the address of this process")
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, dualstack_ipv6=True
        )
    return socket.create_server(("", port))


def _wait(
    callers: "_Callers", names: Sequence[str], seconds: float
) -> tuple[dict[int, socket.socket], str | None]:
    """Waits for the others, and returns their sockets, and an error if any."""
    end = time.monotonic() + seconds
    count = len(names)
    come: dict[int, socket.socket] = {}
    while len(come) < count - 1:
        if time.monotonic() > end:
            missing = [names[i] for i in range(1, count) if i not in come]
            return come, (
                f"Nobody has come in {seconds:g} s as {', '.join(missing)}."
                f"{callers.others}"
            )
        for caller, index, known in callers.introduced(end):
            if known != count:
                return come, (
                    f"Process {index} was told of {known} processes, and "
                    f"process 0 of {count}."
                )
            hung_up, _, _ = select.select([*come.values()], [], [], 0)
            come = {i: s for i, s in come.items() if s not in hung_up}
            if index in come:
                return come, (
                    f"Two processes were told that they are process {index}."
                )
            come[index] = caller
    return come, None


class _Callers:
    """The callers of process 0."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._selector = selectors.DefaultSelector()
        self._unknown: dict[socket.socket, bytes] = {}
        """The bytes received from them so far."""
        self._known: list[socket.socket] = []
        self.others = ""
        """Tells of callers that are not known."""

    def __enter__(self) -> "_Callers":
        """Begins to listen."""
        self._server.setblocking(False)
        self._selector.register(self._server, selectors.EVENT_READ)
        return self

    def __exit__(self, *error: object) -> None:
        """Hangs up."""
        self._selector.close()
        for each in (*self._unknown, *self._known):
            each.close()

    def introduced(self, end: float) -> Iterable[tuple[Any, int, int]]:
        """Yields each caller, its index, and how many it knows of."""
        left = max(0.0, end - time.monotonic())
        for key, _ in self._selector.select(left):
            caller: Any = key.fileobj
            if caller is self._server:
                self._accept()
            elif caller in self._unknown:
                found = self._listen(caller)
                if found is not None:
                    yield caller, *found

    def answer(self, text: str) -> None:
        """Answers all who are known."""
        for each in self._known:
            each.settimeout(_ATTEMPT_SECONDS)
            with contextlib.suppress(OSError):
                each.sendall(_message(text))
        # They hang up first, so that the port is free at once.
        end = time.monotonic() + _ATTEMPT_SECONDS
        for each in self._known:
            with contextlib.suppress(OSError):
                _line(each, end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # who has gone again
            caller = self._server.accept()[0]
            caller.setblocking(False)
            self._unknown[caller] = b""
            self._selector.register(caller, selectors.EVENT_READ)
            if len(self._unknown) > _UNKNOWN_CALLERS:
                first = next(iter(self._unknown))
                self._selector.unregister(first)
                del self._unknown[first]
                first.close()

    def _listen(self, caller: socket.socket) -> tuple[int, int] | None:
        """Returns the introduction of a caller, when it is complete."""
        said = self._unknown[caller]
        more = b""
        with contextlib.suppress(OSError):
            more = caller.recv(_INTRODUCTION_BYTES - len(said))
        said += more
        if more and b"\n" not in said and len(said) < _INTRODUCTION_BYTES:
            self._unknown[caller] = said
            return None
        self._selector.unregister(caller)
        del self._unknown[caller]
        found = _INTRODUCTION.fullmatch(said)
        if found is None or not int(found[1]) < int(found[2]):
            caller.close()  # somebody else, such as a check of the port
            return None
        if _text(said) is None:
            self.others = (
                f" Somebody has come with another {TOKEN}, which must be the "
                "same in all processes."
            )
            caller.close()
            return None
        self._known.append(caller)
        return int(found[1]), int(found[2])


def _reported(
    address: str, index: int, count: int, seconds: float
) -> tuple[list[str], str | None]:
    """Introduces this process. Returns the hosts of all, and an error."""
    seconds += _LATE_SECONDS
    host, port = split_address(address, "the address of process 0")
    introduction = _message(f"{index} {count}")
    end = time.monotonic() + seconds
    refused = ""
    while (left := end - time.monotonic()) > 0:
        try:
            first = socket.create_connection(
                (host.strip("[]"), port), min(left, _ATTEMPT_SECONDS)
            )
        except OSError:
            time.sleep(0.1)
            continue
        with first, contextlib.suppress(OSError):
            first.sendall(introduction)
            answer = _text(_line(first, end))
            if answer is not None:
                hosts = answer.removeprefix(_START)
                is_start = hosts != answer
                return (json.loads(hosts), None) if is_start else ([], answer)
        refused = (
            " Somebody there hangs up, as process 0 does on those who have "
            f"another {TOKEN}."
        )
        time.sleep(0.1)
    return [], (
        f"Process 0 does not answer at {address}, in {seconds:g} s.{refused}"
    )


def _line(other: socket.socket, end: float) -> bytes:
    """Returns a line that somebody says before a time."""
    line = b""
    while len(line) < _ANSWER_BYTES and not line.endswith(b"\n"):
        other.settimeout(max(0.001, end - time.monotonic()))
        more = other.recv(_ANSWER_BYTES - len(line))
        if not more:
            break
        line += more
    return line


def _message(text: str) -> bytes:
    return f"{_digest(text)} {text}\n".encode()


def _text(message: bytes) -> str | None:
    """Returns the text of a message by somebody who has the same token."""
    digest, _, text = message.decode(errors="replace").partition(" ")
    text = text.removesuffix("\n")
    is_ours = hmac.compare_digest(digest.encode(), _digest(text).encode())
    return text if is_ours else None


def _digest(text: str) -> str:
    token = os.fsencode(os.environ.get(TOKEN, ""))
    return hmac.new(token, text.encode(), "sha256").hexdigest()
