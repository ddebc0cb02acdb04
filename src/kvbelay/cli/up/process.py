"""A server as a process: in a session of its own, with a log, and gone when it should be."""

from __future__ import annotations

import http.client
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from kvbelay.cli.up.cores import spread
from kvbelay.cli.up.ports import HOST
from kvbelay.cli.up.warden import Warden, kill

END_S = 4.0
"""How long what was told to end may take."""
ASK_S = 2.0
TAIL_LINES, TAIL_NBYTES = 5, 8192
"""Most of a log's end that is looked at, and shown."""
LINE = 240
"""Most characters of a line that is shown."""

_CAUSE = re.compile(r"\b\w*(?:Error|Exception|Refused)\b: .+")


class Server(msgspec.Struct, frozen=True):
    """What is started."""

    name: str
    port: int
    """Where it answers, on the loopback."""
    command: Sequence[str]
    environment: Mapping[str, str] = {}
    ready: str = "/health"
    """The path that answers with 200 when it serves."""
    spread: bool = False
    """Whether none of its threads may keep to one core, for others share them."""

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self.port}"


class Process:
    """A server that was started. The warden hears of it."""

    def __init__(self, server: Server, log: Path, warden: Warden) -> None:
        self.server = server
        self.log = log
        self.began = time.monotonic()
        self._warden = warden
        with log.open("ab") as output:
            self._process = subprocess.Popen(  # noqa: S603  # the servers that we were asked for
                [sys.executable, "-m", "kvbelay.cli.up.begin", str(os.getpid()), *server.command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **server.environment},
                start_new_session=True,  # Ctrl-C is ours to hear
            )
        self.pid = self._process.pid
        self._over = False
        warden.watch(self.pid)

    def serves(self) -> bool:
        """Whether it says that it is ready."""
        connection = http.client.HTTPConnection(HOST, self.server.port, timeout=ASK_S)
        try:
            connection.request("GET", self.server.ready)
            if connection.getresponse().status != http.client.OK:
                return False
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()
        if self.server.spread:  # what keeps to a core chooses it while it starts
            spread(self.pid)
        return True

    def ended(self) -> str | None:
        """How it ended, and what its log says; None: it runs. What it has started goes with it."""
        code = self._process.poll()
        if code is None:
            return None
        self._bury()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
        return f"{self.server.name} {how}{words(self.log)}"

    def told_to_end(self) -> None:
        """Tell it. It may be frozen, too."""
        for number in (signal.SIGTERM, signal.SIGCONT):
            if not self._over and self._process.poll() is None:
                os.killpg(self.pid, number)

    def end(self, within_s: float) -> None:
        """Make sure that it is gone, with all that it started."""
        try:
            self._process.wait(max(0.0, within_s))
        except subprocess.TimeoutExpired:
            kill(self.pid)
            self._process.wait()
        self._bury()

    def _bury(self) -> None:
        if not self._over:
            self._over = True
            kill(self.pid)
            self._warden.forget(self.pid)


def end_all(processes: Iterable[Process]) -> None:
    """All at once, the last one started first."""
    order = [*processes][::-1]
    for process in order:
        process.told_to_end()
    ends_at = time.monotonic() + END_S
    for process in order:
        process.end(ends_at - time.monotonic())


def words(log: Path) -> str:
    """The first error that a log's end tells of, and its last lines, as a part of a sentence."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - TAIL_NBYTES))
            lines = [line[:LINE] for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    if not lines:
        return f"; its log {log} is empty"
    causes = [found[0][:LINE] for line in lines if (found := _CAUSE.search(line))]
    cause = f" ({causes[0]})" if causes else ""
    return "\n  ".join([f"{cause}; the end of its log {log}:", *lines[-TAIL_LINES:]])
