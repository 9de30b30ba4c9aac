"""The checks of `keras-conflux check`, in the order in which they are run.

Each runs in a process of its own, and is a module of this folder with a
function `check(count)` for a number of devices. It returns a `Passed` or raises
a `Wrong`. Another check is one more module and one more row.
"""

import dataclasses
import json


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing that has to work."""

    name: str
    """The name of its module."""
    limit: float
    """After so many seconds it counts as hanging. The first import of
    TensorFlow in an environment takes minutes of these on a busy machine."""
    if_it_hangs: str
    """The advice for that case."""


_PEER_ACCESS = (
    "NCCL_P2P_DISABLE=1 keras-conflux check tells whether the direct access "
    "from GPU to GPU is to blame, NCCL_DEBUG=INFO keras-conflux check what "
    "NCCL does"
)
_BUSY = "look with `top` and `nvidia-smi` for other programs on this machine"

CHECKS = (
    Check("compute", 240, _BUSY),
    Check("equal", 420, _PEER_ACCESS),
    Check("faster", 300, _PEER_ACCESS),
)


@dataclasses.dataclass(frozen=True)
class Passed:
    """The result of a check that has passed."""

    text: str
    """The result in one line."""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    """Numbers that were measured."""
    slow: str | None = None
    """The advice if it works, but slower than it should."""


class Wrong(Exception):
    """The fault of a check that has failed, and the command that helps."""

    def __init__(self, text: str, todo: str) -> None:
        super().__init__(text)
        self.todo = todo


def doing(what: str) -> None:
    """Announces the next part of a check, for the case that it does not end."""
    print(json.dumps({"doing": what}), flush=True)
