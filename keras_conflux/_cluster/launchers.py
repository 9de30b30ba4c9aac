"""Launchers, which tell a process of the others that it trains with.

There are none by default, and only the arguments of `initialize` name other
processes. `ask` adds a launcher.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Mapping

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._common.errors import ClusterError


@dataclasses.dataclass(frozen=True)
class Announcement:
    """A launcher's statement that it has started processes.

    The number of processes is known at once. Their addresses are looked up for
    one announcement only, as processes may have to talk for it.
    """

    source: str
    """The launcher, or the variable, such as `"Slurm"`."""
    count_from: str
    """The variable that tells the number of processes."""
    count: int
    """The number of processes."""
    find: Callable[[float], Cluster]
    """Returns the processes. It waits so many seconds for the others."""


Launcher = Callable[[Mapping[str, str]], Announcement | None]
"""Returns the announcement in environment variables, if there is one."""

_launchers: list[Launcher] = []


def ask(launcher: Launcher) -> None:
    """Has a launcher asked from now on, after those before it."""
    _launchers.append(launcher)


def announcements(environ: Mapping[str, str]) -> list[Announcement]:
    """Returns all announcements, in the order in which launchers are asked.

    Args:
        environ: The environment variables.

    Raises:
        ClusterError: If a launcher's variables are wrong, or there is no
            launcher.
    """
    if not _launchers:
        raise ClusterError(
            "No launcher is asked for the other processes, as "
            "CONFLUX_EXTENSIONS=0 does without them. Give `initialize` the "
            "addresses of all processes and the index of this one, which is 0 "
            "if it is alone, or unset CONFLUX_EXTENSIONS."
        )
    told = [launcher(environ) for launcher in _launchers]
    return [each for each in told if each is not None]
