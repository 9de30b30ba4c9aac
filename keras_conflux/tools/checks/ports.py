"""Who can reach the processes that `keras-conflux run` starts on this host."""

import argparse
import os
import pathlib
import pwd
import socket

from keras_conflux._cluster import loopback
from keras_conflux.tools.checks.table import Passed

_FIRST_USER = 1000
_NOBODY = 65534
_NO_SHELLS = ("nologin", "false")
_TODO = (
    "keras-conflux run --private-network ..., for scripts that load nothing "
    "from elsewhere, or close the ports with a firewall"
)


def check(options: argparse.Namespace) -> Passed:
    """Looks for other users of this host, and for other hosts."""
    users = other_users()
    who = []
    if users:
        plural = "s" * (len(users) > 1)
        who.append(
            f"{len(users)} other user{plural} of this host, such as {users[0]},"
        )
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    if interfaces and not _other_hosts_are_refused():
        who.append(f"hosts that reach {interfaces[0]}")
    if not who:
        return Passed(
            "nobody else reaches the processes of `keras-conflux run`"
        )
    return Passed(
        f"{' and '.join(who)} can reach the processes of `keras-conflux run`, "
        "and so read and write your files and run programs as you",
        open_to_others=_TODO,
    )


def other_users() -> list[str]:
    """Returns the names of those who can log in, or run something now."""
    logins = {
        each.pw_uid
        for each in pwd.getpwall()
        if not each.pw_shell.endswith(_NO_SHELLS)
    }
    found = {
        user
        for user in logins | _running()
        if _FIRST_USER <= user != _NOBODY and user != os.getuid()
    }
    return sorted(map(_name, found))


def _running() -> set[int]:
    found = set()
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            found.add(path.stat().st_uid)
        except OSError:  # it has ended
            continue
    return found


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


def _other_hosts_are_refused() -> bool:
    with socket.socket() as server:
        return loopback.bind_to_loopback(server)
