"""Kills what is left when ``kvbelay up`` is gone, however that went: also the processes that its servers started.

It reads lines from its standard input: ``+N`` for a process group that lives, ``-N`` for one that is over. At the end
of the input the groups that are left get SIGKILL, and it ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


def main() -> None:
    """The warden's process."""
    groups: set[int] = set()
    for line in sys.stdin:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        kill(group)


def kill(group: int) -> None:
    """All of a process group, at once."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class Warden:
    """Our side of it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbelay.cli.up.warden"],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is not for it
        )

    def watch(self, group: int) -> None:
        """From now on."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Nothing of it is left, and its number may become another's."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """Let it do its work."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        self._process.wait()

    def _tell(self, line: str) -> None:
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody has killed it
                self._process.stdin.write(line)
                self._process.stdin.flush()


if __name__ == "__main__":
    main()
