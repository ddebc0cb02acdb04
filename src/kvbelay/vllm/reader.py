"""Hashes blocks: a few at once, many in a thread of its own, so that no step of the engine waits for long."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from queue import SimpleQueue

import torch

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.vllm.digest import HOST, Hasher
from kvbelay.vllm.readings import Reading, Sums

BUSY_NBYTES = 4 << 20
"""Of KV in a CPU's memory that are hashed within one step of an engine that computes: some 2 ms."""
IDLE_NBYTES = 16 << 20
"""The same where the step computes nothing. A thread would need the interpreter back after each of its hundreds of
operations, and wait for it as often while the engine polls for its loads.
"""
DIGEST = "digest"
"""The operation, where a failure names one."""


class Reader:
    """One rank's. `read` and `done` belong to the engine's thread. ``hasher`` may be the reason why there is none."""

    def __init__(self, hasher: Hasher | Failure, device: torch.device | None) -> None:
        self._hasher = hasher
        self._device = device
        self._orders: SimpleQueue[tuple[Reading, torch.Event | None] | None] = SimpleQueue()
        self._ordered = 0
        """What the thread was given, and `done` has not collected."""
        self._done: deque[tuple[Reading, Sums]] = deque()
        self._thread: threading.Thread | None = None
        self._at_once: list[tuple[Reading, Sums]] = []
        self._left_nbytes = 0
        """Of what this step has time for."""

    def begin(self, *, idle: bool) -> None:
        """A step begins; ``idle``: it computes nothing."""
        self._left_nbytes = IDLE_NBYTES if idle else BUSY_NBYTES

    def read(self, reading: Reading) -> None:
        """Hash these blocks as they are after all that has been begun on the device by now."""
        if self._is_little(reading):
            self._at_once.append((reading, self._said(reading, None)))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvbelay digest", daemon=True)
            self._thread.start()
        self._ordered += 1
        self._orders.put((reading, self._mark()))

    def done(self) -> list[tuple[Reading, Sums]]:
        """What has been hashed since the last call."""
        found, self._at_once = self._at_once, []
        while self._done:
            found.append(self._done.popleft())
            self._ordered -= 1
        return found

    def wipe(self, reading: Reading) -> None:
        """Set the blocks to zeros before anything else that is begun from now on. Of what cannot be, `read` will say
        why.
        """
        if not isinstance(self._hasher, Failure):
            call(partial(_wipe, self._hasher, reading), Where("", DIGEST, reading.request))

    def close(self) -> None:
        """Stop after what was ordered. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._orders.put(None)

    def _is_little(self, reading: Reading) -> bool:
        """Whether there is time for it in this step. While the thread hashes it has the hasher for itself."""
        hasher = self._hasher
        if self._ordered or isinstance(hasher, Failure) or self._device is None or self._device.type != HOST:
            return False
        nbytes = call(partial(_nbytes, hasher, reading), Where("", DIGEST, reading.request))
        if isinstance(nbytes, Failure):
            return False
        self._left_nbytes -= nbytes
        return self._left_nbytes >= 0

    def _mark(self) -> torch.Event | None:
        """A point in the device's own order of things; a CPU has none to wait for."""
        if self._device is None or self._device.type == HOST:
            return None
        mark = torch.Event(device=self._device)
        mark.record()
        return mark

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            reading, mark = order
            self._done.append((reading, self._said(reading, mark)))

    def _said(self, reading: Reading, mark: torch.Event | None) -> Sums:
        said = call(partial(self._sums, reading, mark), Where("", DIGEST, reading.request))
        return Sums(1, unverified=said.detail) if isinstance(said, Failure) else said

    def _sums(self, reading: Reading, mark: torch.Event | None) -> Sums:
        hasher = self._hasher
        if isinstance(hasher, Failure):
            return Sums(1, unverified=hasher.detail)
        if mark is not None:
            mark.synchronize()
        groups = [
            (hasher.coverage(group), *hasher.digests(group, run.blocks, run.first, run.tokens)) if run.blocks else ()
            for group, run in enumerate(reading.runs)
        ]
        return Sums(1, tuple(groups), tuple(hasher.form(group) for group in range(len(groups))))


def _nbytes(hasher: Hasher, reading: Reading) -> int:
    return sum(hasher.nbytes(group, len(run.blocks)) for group, run in enumerate(reading.runs))


def _wipe(hasher: Hasher, reading: Reading) -> None:
    for group, run in enumerate(reading.runs):
        if hasher.refusal(group) is None:
            hasher.wipe(group, run.blocks)
