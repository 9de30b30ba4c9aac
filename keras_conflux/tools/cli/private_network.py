"""Becomes a command in a network of its own, which nobody else can reach.

It is run by its path, without the package: `python private_network.py COMMAND`.
A process that has threads, such as NumPy's, cannot make such a network.

TensorFlow listens on all interfaces and does not ask who connects. A network
namespace of Linux has a loopback interface of its own. Users may make one
inside of a user namespace, where the system allows that.
"""

import ctypes
import fcntl
import os
import pathlib
import socket
import struct
import sys

OPTION = "--private-network"

_NEW_USER = 0x10000000  # of linux/sched.h
_NEW_NETWORK = 0x40000000
_GET_FLAGS, _SET_FLAGS = 0x8913, 0x8914  # of linux/sockios.h
_UP = 1  # of linux/if.h
_INTERFACE = "16sh14x"
"""The name of an interface and its flags, as in `struct ifreq`."""


def start_again() -> None:
    """Replaces this process by one with the same command line in there."""
    command = [sys.executable, *sys.orig_argv[1:]]
    command.remove(OPTION)
    own = [sys.executable, "-I", "-S", __file__]
    os.execv(sys.executable, [*own, *command])


def enter() -> None:
    """Moves this process to a new network. Its user stays the same.

    Raises:
        OSError: If the system does not allow it.
    """
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        _unshare(_NEW_NETWORK)
    else:
        _unshare(_NEW_USER | _NEW_NETWORK)
        own = pathlib.Path("/proc/self")
        (own / "setgroups").write_text("deny")
        (own / "uid_map").write_text(f"{user} {user} 1")
        (own / "gid_map").write_text(f"{group} {group} 1")
    _bring_up_loopback()


def _unshare(kinds: int) -> None:
    if sys.platform != "linux":
        raise OSError(0, f"this is {sys.platform}")
    if ctypes.CDLL(None, use_errno=True).unshare(kinds) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _bring_up_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack(_INTERFACE, b"lo", 0)
        found = fcntl.ioctl(any_socket, _GET_FLAGS, asked)
        name, flags = struct.unpack(_INTERFACE, found)
        wanted = struct.pack(_INTERFACE, name, flags | _UP)
        fcntl.ioctl(any_socket, _SET_FLAGS, wanted)


def main() -> None:
    """Replaces this process by the command."""
    try:
        enter()
    except OSError as error:
        sys.exit(
            f"keras-conflux run: {OPTION} needs Linux with user namespaces, "
            "which containers and some distributions forbid, or the root user. "
            f"The system says: {error.strerror}. Type `sysctl "
            "user.max_user_namespaces "
            "kernel.apparmor_restrict_unprivileged_userns`, which should be "
            f"more than 0, and 0, and ask the administrator. Leave {OPTION} "
            "out where nobody else uses this host."
        )
    os.execv(sys.argv[1], sys.argv[1:])


if __name__ == "__main__":
    main()
