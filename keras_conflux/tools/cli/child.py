"""Becomes a command, which ends when the process that started it is gone.

It is run by its path, without the package: `python child.py PID COMMAND...`.
This cannot be done between fork and exec, as the launcher has threads.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def main() -> None:
    """Replaces this process by the command."""
    launcher, *command = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # It may have ended before this was asked for.
    if os.getppid() != int(launcher):
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
