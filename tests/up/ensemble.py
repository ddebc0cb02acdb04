"""``kvbelay up`` as a user has it, and what can happen to its servers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from kvbelay.cli.up.ports import free_ports

START_S = 200.0
READY = "Ctrl-C ends"
LINE = re.compile(r"  (\S+) +(http://\S+) +process (\d+),")
PROXY = Path(__file__).with_name("ordinary_proxy.py")


class Up(contextlib.AbstractContextManager["Up"]):
    """It serves when the context begins, and nothing of it is left when it ends."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self._folder = folder
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbelay", "up", "--port", "0", "--logs", str(folder), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._pids: dict[str, int] = {}
        self.urls: dict[str, str] = {}
        self._commands: dict[str, tuple[list[bytes], dict[bytes, bytes]]] = {}
        self._others: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Up:  # noqa: PYI034  # nobody derives from it
        for line in self._process.stdout or ():
            if found := LINE.match(line):
                self.urls[found[1]], self._pids[found[1]] = found[2], int(found[3])
            elif READY in line:
                break
        else:
            self.__exit__(None, None, None)
            msg = "it does not serve"
            raise RuntimeError(msg)
        for name, pid in self._pids.items():
            place = Path("/proc") / str(pid)
            pairs = [
                entry.partition(b"=")[::2] for entry in (place / "environ").read_bytes().split(b"\0") if b"=" in entry
            ]
            self._commands[name] = ((place / "cmdline").read_bytes().split(b"\0")[:-1], dict(pairs))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for other in self._others:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)
            other.wait()
        self._process.send_signal(signal.SIGINT)
        self._process.communicate(timeout=30)

    @property
    def exit_code(self) -> int | None:
        """None: it runs."""
        return self._process.poll()

    def kill(self, name: str) -> None:
        """All processes of a server, at once."""
        os.killpg(self._pids[name], signal.SIGKILL)

    def freeze(self, name: str) -> None:
        """All of it stands still."""
        os.killpg(self._pids[name], signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """It goes on."""
        os.killpg(self._pids[name], signal.SIGCONT)

    def restart(self, name: str) -> None:
        """Start what was killed once more, as whoever operates it would."""
        command, environment = self._commands[name]
        self._run(command, self._folder / f"{name}.again.log", environment)
        self._pids[name] = self._others[-1].pid

    def ordinary_proxy(self) -> str:
        """Another way to the same servers, without retries; returns its address."""
        (port,) = free_ports(1)
        command = [sys.executable, str(PROXY), "--port", str(port)]
        for name, url in self.urls.items():
            if name != "router":
                command += [f"--{name.partition('-')[0]}", url]
        self._run(command, self._folder / "ordinary.log", None)
        return f"http://127.0.0.1:{port}"

    def _run(self, command: list[bytes] | list[str], log: Path, environment: dict[bytes, bytes] | None) -> None:
        with log.open("ab") as output:
            self._others.append(
                subprocess.Popen(command, stdout=output, stderr=output, env=environment, start_new_session=True)
            )


def until(holds: Callable[[], bool], what: str, within_s: float = START_S) -> None:
    """Wait for a condition."""
    ends_at = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends_at:
            msg = f"{within_s:.0f} s were not enough until {what}"
            raise TimeoutError(msg)
        time.sleep(0.1)
