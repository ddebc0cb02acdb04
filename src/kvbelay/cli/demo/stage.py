"""The stage: starts the processes, hands requests on, kills and freezes, and cleans up."""

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

import msgspec

from kvbelay.cli.begun import in_one_go
from kvbelay.cli.demo.messages import LINE_LIMIT, FromWorker, Ready, Refused, Setup, decode, write
from kvbelay.connectors.registry import prepare
from kvbelay.core.model import Fingerprint
from kvbelay.errors import ConfigError, DeadlineExceeded, KvbelayError, PeerLost, ProtocolViolation
from kvbelay.net.sockets import Address, parse

MODULES = {role: f"kvbelay.cli.demo.{role}" for role in ("prefill", "decode", "alone")}
"""What the process of a role runs."""

ENVIRONMENT = {
    # BLAS threads wait for one another by spinning: three processes on two cores take six times as long with them.
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    # Python 3.11 and later: a random.py in the current directory is not ours.
    "PYTHONSAFEPATH": "1",
}

START_S = 120.0
END_S = 5.0
LOG_TAIL = 2000
"""Most characters of a worker's log that an error shows."""


class Worker:
    """One process, spoken to over its standard input and output."""

    def __init__(self, role: str, setup: Setup, log: Path) -> None:
        self.role = role
        self._log = log
        with log.open("ab") as stderr:
            self._process = subprocess.Popen(  # noqa: S603  # our own module
                [sys.executable, "-m", MODULES[role]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **ENVIRONMENT},
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
            if left <= 0:
                msg = f"the {self.role} process has said nothing for {within_s:.0f} s"
                raise DeadlineExceeded(msg)
            if len(self._buffer) > LINE_LIMIT:
                msg = f"the {self.role} process does not come to an end"
                raise ProtocolViolation(msg)
            self._buffer += self._read(left)
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
        """Stop it, as a hung machine would. Returns when all its threads stand still, or it is gone."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def finish(self, *, now: bool = False) -> None:
        """Close its input: it says what it has to say, and ends. ``now``: whatever it is doing."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if now:
            self._process.terminate()
        self.thaw()

    def end(self, within_s: float) -> None:
        """Make sure that it is gone."""
        self.finish()
        try:
            self._process.wait(within_s)
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
            self.end(END_S)
            tail = self._log.read_text(encoding="utf-8", errors="replace")[-LOG_TAIL:].strip()
            msg = f"the {self.role} process has ended (exit code {self._process.returncode})"
            raise PeerLost(f"{msg}: {tail}" if tail else msg)
        return data


class Stage(contextlib.AbstractContextManager["Stage"]):
    """The processes and the directory that they share. Nothing is left when the context exits.

    Raises `ConfigError` if a child's place cannot be used.
    """

    def __init__(self, *, model: str, near: str | None, store: Path | None, blocks: int, seed: int) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvbelay-demo-")
        root = Path(self._directory.name)
        self.weights = root / "weights"
        self.weights.mkdir()
        self._root = root
        self.setup = Setup(
            model=model,
            weights=str(self.weights),
            near=f"unix://{root / 'near.sock'}" if near is None else near,
            store=str(store or root / "store"),
            blocks=blocks,
            seed=seed,
        )
        self._workers: dict[str, Worker] = {}
        self.peak_nbytes = 0
        with in_one_go(), contextlib.ExitStack() as unless_done:
            unless_done.callback(self._directory.cleanup)
            self._near = _require_places(self.setup)
            unless_done.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with in_one_go():
            for worker in self._workers.values():
                worker.finish(now=kind is not None)
            ends_at = time.monotonic() + END_S
            for worker in self._workers.values():
                worker.end(max(0.0, ends_at - time.monotonic()))
            if self._near.path:  # a prefill process that was killed left it
                Path(self._near.path).unlink(missing_ok=True)
            self._directory.cleanup()

    def start(self, role: str, setup: Setup | None = None) -> Worker:
        """Start a worker, or start it again after it was killed. `ready` waits for it."""
        with in_one_go():
            before = self._workers.get(role)
            if before is not None:
                before.end(END_S)
            worker = self._workers[role] = Worker(role, setup or self.setup, self._root / f"{role}.log")
        return worker

    def ready(self, worker: Worker) -> None:
        """Wait until it has its model and its children."""
        message = worker.hear(START_S)
        if not isinstance(message, Ready):
            msg = f"the {worker.role} process began with {type(message).__name__}"
            raise ProtocolViolation(msg)

    def measure(self) -> None:
        """Note how much memory all processes of the demo take now: their proportional set sizes."""
        pids = [os.getpid(), *(worker.pid for worker in self._workers.values())]
        self.peak_nbytes = max(self.peak_nbytes, sum(_pss(pid) for pid in pids))


def _require_places(setup: Setup) -> Address:
    """Try the address and the directory before the model is loaded, which takes long. Returns the address."""
    nobody = Fingerprint(model="", revision="", layouts=())
    for name, option, (connector, config) in (
        ("near", "--near", setup.near_config()),
        ("store", "--store", setup.store_config()),
    ):
        prepare(name, connector, config, source=option).open(nobody).close()
    address = parse(setup.near, field="--near")
    if not (address.path or address.port):
        raise ConfigError("port 0 names no port", field="--near", remedy="choose one: the decode side has to know it")
    return address


def _pss(pid: int) -> int:
    """Proportional set size of a process in bytes, from the kernel's ``smaps_rollup``; 0 if it cannot be read."""
    try:
        with Path(f"/proc/{pid}/smaps_rollup").open(encoding="ascii") as file:
            line = next((line for line in file if line.startswith("Pss:")), "Pss: 0 kB")
    except OSError:
        return 0
    return int(line.split()[1]) * 1024
