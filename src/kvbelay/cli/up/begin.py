"""Become another program, and end when the parent does: ``python -m kvbelay.cli.up.begin PARENT PROGRAM ...``."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Linux, ``prctl(2)``: the signal that a process gets when its parent dies; a new program in the process keeps it."""


def main() -> None:
    """See the module."""
    parent, *command = sys.argv[1:]
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has died already
        sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  # what we were started for


if __name__ == "__main__":
    main()
