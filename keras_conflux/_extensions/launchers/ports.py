"""Ports that all processes of a training derive alike."""

from collections.abc import Mapping

from keras_conflux._extensions.launchers.variables import integer

PORT = "CONFLUX_PORT"

# Ports that the system gives to outgoing connections begin at 32768.
_FIRST_PORT = 16384
_PORTS = 64
_SLOTS = (32768 - _FIRST_PORT) // _PORTS


def first_port(
    environ: Mapping[str, str], number: int, taken: int | None = None
) -> int:
    """Returns the port of the first process of each host.

    Trainings that share a host get other ports, unless their numbers lie 128 or
    more apart.

    Args:
        environ: The environment variables, of which CONFLUX_PORT decides.
        number: A number of the training, equal in all of its processes.
        taken: A port that somebody else uses.

    Returns:
        The first of 64 ports.
    """
    given = integer(environ, PORT)
    if given is not None:
        return given
    first = _FIRST_PORT + number % _SLOTS * _PORTS
    if taken is not None and first <= taken < first + _PORTS:
        return first_port(environ, number + _SLOTS // 2)
    return first
