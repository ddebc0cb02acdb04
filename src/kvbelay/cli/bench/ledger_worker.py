"""A process with one ledger of so many live requests, so that nobody else's objects weigh on its measurements."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from kvbelay.cli.bench.child import serve
from kvbelay.cli.bench.traffic import Burst, Traffic


class Setup(msgspec.Struct, frozen=True):
    """What the process is for."""

    live: int
    weighed: int
    """Requests that are weighed at least, in as many ledgers as it takes: a page more or less must not matter."""
    seed: int


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Bring the requests in. The answer is `Filled`."""


class Round(msgspec.Struct, frozen=True, tag=True):
    """Handle ``steps`` reports and what comes with them. The answer is a `Burst`."""

    steps: int


class Collect(msgspec.Struct, frozen=True, tag=True):
    """Let the garbage collector go over everything. The answer is `Collected`."""


class Filled(msgspec.Struct, frozen=True):
    """What a live request takes."""

    nbytes_each: float


class Collected(msgspec.Struct, frozen=True):
    """How long nothing else happens whenever the collector does that, in processor time."""

    took_s: float


class Worker:
    """Answers questions."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._traffic = Traffic(setup.live, setup.seed)

    def answer(self, question: Fill | Round | Collect) -> Filled | Burst | Collected:
        """Do what is asked."""
        if isinstance(question, Round):
            return self._traffic.burst(question.steps)
        if isinstance(question, Fill):
            return self._fill()
        began = time.thread_time()
        gc.collect()
        return Collected(time.thread_time() - began)

    def _fill(self) -> Filled:
        count = max(1, self._setup.weighed // self._setup.live)
        extra = [Traffic(self._setup.live, self._setup.seed) for _ in range(count - 1)]
        before = resident_nbytes()
        for traffic in (self._traffic, *extra):
            traffic.fill()
        nbytes = resident_nbytes() - before
        self._traffic.settle()
        return Filled(nbytes / (count * self._setup.live))


def resident_nbytes() -> int:
    """Bytes of this process that are in memory, from the kernel's ``statm``."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def start(setup: Setup) -> Iterator[Callable[[Fill | Round | Collect], Filled | Burst | Collected]]:
    """For `serve`."""
    yield Worker(setup).answer


if __name__ == "__main__":
    serve(Setup, Fill | Round | Collect, start)
