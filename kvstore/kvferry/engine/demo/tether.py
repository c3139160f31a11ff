"""Starts a command that ends when its parent ends, however the parent ends.

Run by path, as ``python -I -S tether.py PARENT_PID COMMAND…``, so that nothing but the standard
library is loaded: the process asks the kernel for SIGKILL at its parent's death, checks that the
parent is still there (it may have died before the request) and becomes the command. A signal handler
in the parent could not do that for ``kill -9``, and code between fork and exec would not be safe in a
process with threads.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

__all__ = ["tethered"]

_PR_SET_PDEATHSIG = 1


def tethered(command: list[str]) -> list[str]:
    """The command line that runs ``command`` tied to the life of this process.

    The kernel counts the *thread* that starts the process as the parent: start it from a thread that
    lives as long as the process shall.
    """
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main(arguments: list[str]) -> None:
    """Tie this process to its parent and become the command; returns only when it cannot."""
    parent, command = int(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        print(f"cannot tie the process to its parent: {os.strerror(ctypes.get_errno())}", file=sys.stderr)
        return
    if os.getppid() != parent:
        return
    os.execvp(command[0], command)  # noqa: S606 - the command is the caller's own, no shell


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.exit(1)
