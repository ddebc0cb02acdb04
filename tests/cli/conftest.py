"""What the tests of the command line share: running it as a user does, and seeing what it leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

KVBELAY = (sys.executable, "-m", "kvbelay")
PATIENCE_S = 60.0


class Started:
    """``kvbelay`` in a session, a temporary directory and with a mark of its own: all that it leaves can be found."""

    def __init__(
        self,
        *arguments: str,
        command: tuple[str, ...] = KVBELAY,
        cwd: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="kb"))
        self._mark = f"KVBELAY_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [*command, *(argument.format(near=self.near) for argument in arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            cwd=cwd,
            start_new_session=True,
            env={
                **os.environ,
                **(environment or {}),
                name: value,
                "TMPDIR": str(self.place),
                "PYTHONIOENCODING": "utf-8",
            },
            preexec_fn=_hear_all,  # noqa: PLW1509  # no thread of ours runs while it forks
        )

    @property
    def near(self) -> Path:
        """Where a test lets it listen."""
        return self.place / "near.sock"

    def read_until(self, words: str) -> str:
        """The first line of its standard output that has these words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if words in line:
                return line
        pytest.fail(f"it never said {words!r}; it said {self.process.stderr and self.process.stderr.read()!r}")

    def end(self) -> tuple[str, str]:
        """Wait until it has ended; returns the rest of what it says."""
        return self.process.communicate(timeout=PATIENCE_S)

    def alive(self) -> dict[int, str]:
        """Its processes that have not ended, and the state of each, a letter."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # gone meanwhile
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return found

    def worker(self, role: str) -> int:
        """The process id of a worker that runs."""
        for pid in self.alive():
            if f"kvbelay.cli.demo.{role}".encode() in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
                return pid
        pytest.fail(f"there is no {role} process")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Until it holds."""
        ends_at = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < ends_at, f"still waiting; alive: {self.alive()}"
            time.sleep(0.01)

    def clear(self) -> None:
        """Whatever the test has left."""
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.communicate()
        shutil.rmtree(self.place)


def _hear_all() -> None:
    """In a shell's background SIGINT is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture(scope="module")
def start() -> Iterator[Callable[..., Started]]:
    """Starts ``kvbelay``. What a test leaves running is killed when its module is done."""
    started: list[Started] = []

    def begin(*arguments: str, **options: object) -> Started:
        started.append(Started(*arguments, **options))  # type: ignore[arg-type]
        return started[-1]

    yield begin
    for each in started:
        each.clear()


@pytest.fixture
def signals() -> Iterator[None]:
    """For a test that calls ``main`` itself: the process's handlers are put back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
