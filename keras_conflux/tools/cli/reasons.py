"""Finds the error of a process in its output."""

import re

_TRACEBACK = b"Traceback (most recent call last):"
_ERROR = re.compile(rb"(?:[\w.<>]+\.)?(\w+(?:: .*)?)$", re.DOTALL)
_IN_USER_CODE = b": in user code:"
"""TensorFlow's words before an error that is raised while it traces."""
_ERROR_IN_USER_CODE = re.compile(rb"    (?=[\w.]+: )")
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
