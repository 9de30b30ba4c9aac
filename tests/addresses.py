"""Addresses of this host at which nobody listens, and how they are told."""

import json
import socket


def free_addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def address_outside() -> str | None:
    """Returns the address of this host for others, if it has any."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as nobody:
        try:
            nobody.connect(("192.0.2.99", 9))  # sends nothing
        except OSError:
            return None
        address = nobody.getsockname()[0]
    return None if address.startswith("127.") else address


def tf_config(addresses: list[str], index: int) -> str:
    """Returns the variable by which a process finds the others."""
    cluster, task = {"worker": addresses}, {"type": "worker", "index": index}
    return json.dumps({"cluster": cluster, "task": task})
