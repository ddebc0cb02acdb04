"""The stage: starts the two processes, hands requests on, kills and freezes, and cleans up."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from kvbelay.cli.demo.messages import LINE_LIMIT, FromWorker, Ready, Refused, Setup, decode, write
from kvbelay.errors import DeadlineExceeded, KvbelayError, PeerLost

START_S = 60.0
ANSWER_S = 120.0
END_S = 5.0
LOG_TAIL = 2000
"""Most characters of a worker's log that an error shows."""


class Worker:
    """One process, spoken to over its standard input and output."""

    def __init__(self, module: str, setup: Setup, log: IO[bytes]) -> None:
        self.name = module.rpartition(".")[2]
        self._log = log
        self._process = subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
        )
        self.pid = self._process.pid
        self._buffer = b""
        self.send(setup)

    def send(self, message: msgspec.Struct) -> None:
        """Say something. A worker that is gone is noticed when it is listened to."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                write(self._process.stdin, message)

    def hear(self, within_s: float) -> FromWorker:
        """Its next word. Raises `PeerLost` if it is gone, `DeadlineExceeded` if it is silent, and its own refusal."""
        ends_at = time.monotonic() + within_s
        while b"\n" not in self._buffer:
            left = ends_at - time.monotonic()
            if left <= 0 or len(self._buffer) > LINE_LIMIT:
                msg = f"the {self.name} process has said nothing for {within_s:.0f} s"
                raise DeadlineExceeded(msg)
            self._buffer += self._read(min(left, 0.2))
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: FromWorker = decode(line, FromWorker)  # type: ignore[arg-type]  # a union is no class to mypy
        if isinstance(message, Refused):
            raise KvbelayError(message.sentence)
        return message

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """Stop it, as a hung machine would."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def finish(self) -> None:
        """Close its input: it says what it has to say, and ends."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def end(self) -> None:
        """Make sure that it is gone."""
        self.finish()
        with contextlib.suppress(ProcessLookupError):
            self.thaw()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _read(self, wait_s: float) -> bytes:
        stdout = self._process.stdout
        if stdout is None or not select.select([stdout], [], [], wait_s)[0]:
            return b""
        data = os.read(stdout.fileno(), 1 << 16)
        if not data:
            self._process.wait()
            self._log.flush()
            tail = Path(self._log.name).read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:]
            msg = f"the {self.name} process ended (exit code {self._process.returncode}){': ' if tail else ''}{tail}"
            raise PeerLost(msg)
        return data


class Stage(contextlib.AbstractContextManager["Stage"]):
    """Both workers and the directory that they share. Nothing is left when the context exits."""

    def __init__(self, *, model: str, near: str | None, store: Path | None, blocks: int, seed: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvbelay-demo-")
        root = Path(self._directory.name)
        self.weights = root / "weights"
        self.weights.mkdir()
        self._root = root
        self._logs = contextlib.ExitStack()
        self.setup = Setup(
            model=model,
            weights=str(self.weights),
            near=near or f"unix://{root / 'near.sock'}",
            store=str(store or root / "store"),
            blocks=blocks,
            seed=seed,
        )
        self._workers: dict[str, Worker] = {}
        self.peak_nbytes = 0

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers.values():
            worker.finish()
        for worker in self._workers.values():
            worker.end()
        self._logs.close()
        self._directory.cleanup()

    def start(self, role: str, setup: Setup | None = None) -> Worker:
        """Start a worker, or start it again after it was killed. `ready` waits for it."""
        log = self._logs.enter_context((self._root / f"{role}.log").open("ab"))
        worker = self._workers[role] = Worker(f"kvbelay.cli.demo.{role}", setup or self.setup, log)
        return worker

    def ready(self, worker: Worker) -> None:
        """Wait until it has its model and its children."""
        message = worker.hear(START_S)
        if not isinstance(message, Ready):
            msg = f"the {worker.name} process began with {type(message).__name__}"
            raise KvbelayError(msg)

    def measure(self) -> None:
        """Note how much memory all processes of the demo take now: their proportional set sizes."""
        pids = [os.getpid(), *(worker.pid for worker in self._workers.values())]
        self.peak_nbytes = max(self.peak_nbytes, sum(_pss(pid) for pid in pids))


def _pss(pid: int) -> int:
    """Proportional set size of a process in bytes, from the kernel's ``smaps_rollup``; 0 if it cannot be read."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open(encoding="ascii") as file:
            line = next((line for line in file if line.startswith("Pss:")), "Pss: 0 kB")
    except OSError:
        return 0
    return int(line.split()[1]) * 1024
