"""Finds which of several processes failed first, by their output."""

import dataclasses
import re
from collections.abc import Sequence

_TRACEBACK = b"Traceback (most recent call last):"
_ERROR = re.compile(rb"(?:[\w.<>]+\.)?(\w+(?:: .*)?)$", re.DOTALL)
_IN_USER_CODE = b": in user code:"
"""TensorFlow's words before an error that is raised while it traces."""
_ERROR_IN_USER_CODE = re.compile(rb"    (?=[\w.]+: )")
_NAMED = re.compile(r"ProcessError: .*, because process (\d+(?:, \d+)*) ")
_LENGTH = 500


class LastError:
    """The error of the last traceback that one process prints."""

    def __init__(self) -> None:
        self.text = ""
        """Its type and first line, such as `"ValueError: no"`, or nothing."""
        self._is_in_traceback = False
        self._is_in_user_code = False

    def hear(self, line: bytes) -> None:
        """Takes a line of standard error."""
        if line == _TRACEBACK:
            self._is_in_traceback = True
        elif self._is_in_traceback and line and not line.startswith(b" "):
            self._is_in_traceback = False
            self._is_in_user_code = line.endswith(_IN_USER_CODE)
            self._take(line)
        elif self._is_in_user_code and _ERROR_IN_USER_CODE.match(line):
            self._is_in_user_code = False
            self._take(line.strip())

    def _take(self, line: bytes) -> None:
        found = _ERROR.match(line)
        shown = found[1][:_LENGTH].decode(errors="replace") if found else ""
        self.text = " ".join(shown.split())

    @property
    def named(self) -> set[int]:
        """The processes that have caused it, if it is a `ProcessError`.

        `_cluster/failures.py` tells the others the error of a process.
        """
        found = _NAMED.match(self.text)
        return {int(each) for each in found[1].split(", ")} if found else set()


@dataclasses.dataclass(frozen=True)
class Ended:
    """A process has ended."""

    index: int
    """Which one."""
    status: int
    """Its exit status, or 128 and the number of the signal that ended it."""


def first(
    failed: Sequence[Ended], left: Sequence[Ended], errors: Sequence[LastError]
) -> Ended | None:
    """Returns the process that failed first, as far as anybody knows.

    A process that fails because of another one may have ended before it.

    Args:
        failed: Processes that ended by themselves, and not well, in this order.
        left: Processes that ended well before; others may have waited for them.
        errors: The last error that each process has printed.
    """
    named = [index for each in failed for index in errors[each.index].named]
    of_failed = [errors[each.index] for each in failed]
    if any(error.text and not error.named for error in of_failed):
        left = ()  # one of them has an error of its own
    causes = [
        each
        for each in [*failed, *left]
        if each.index in named and not errors[each.index].named
    ]
    causes.sort(key=lambda each: -named.count(each.index))
    return next(iter(causes or failed), None)
