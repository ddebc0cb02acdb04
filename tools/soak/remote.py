"""The peer's process as seen from here: asked, killed, frozen, started anew."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from kvbelay.core.model import Ticket
from kvbelay.core.wire import decode_tickets
from soak.blocks import Shape

TOOLS = Path(__file__).resolve().parents[1]


class Remote:
    """The peer that lives now, and those before it. Safe from any thread."""

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """A new life; returns when it serves."""
        paths = os.pathsep.join([str(TOOLS), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "soak.peer", str(self._scratch)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        self._line()

    def save(self, request: str, shape: Shape, seed: int) -> tuple[Ticket, ...]:
        """Tickets for a request that it has saved; none if it died meanwhile."""
        with self._lock:
            process = self._process
            if process is None or process.stdin is None:
                return ()
            try:
                process.stdin.write(json.dumps({"request": request, "shape": shape, "seed": seed}) + "\n")
                process.stdin.flush()
            except OSError:
                return ()
            line = self._line()
        return decode_tickets(line.encode()) if line.endswith("\n") else ()

    def kill(self) -> None:
        """At once, in whatever it is doing."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def restart(self) -> None:
        """Kill it, and start the next."""
        self.kill()
        with self._lock:  # whoever waited for an answer has seen the end of it
            self._close()
            self.start()

    def freeze(self) -> None:
        """Stop it where it is."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        if self._process is not None:
            os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Kill it, and nothing of it is left here."""
        self.kill()
        with self._lock:
            self._close()

    def _close(self) -> None:
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout) if process is not None else ():
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # an order that it never read
                    continue

    def _line(self) -> str:
        process = self._process
        return process.stdout.readline() if process is not None and process.stdout is not None else ""
