"""Hashes blocks in a thread of its own, so that no step of the engine waits for it."""

from __future__ import annotations

import threading
from collections import deque
from functools import partial
from queue import SimpleQueue

import torch

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.vllm.digest import Hasher
from kvbelay.vllm.readings import Reading, Sums

DIGEST = "digest"
"""The operation, where a failure names one."""


class Reader:
    """One rank's. `read` and `done` belong to the engine's thread. ``hasher`` may be the reason why there is none."""

    def __init__(self, hasher: Hasher | Failure, device: torch.device | None) -> None:
        self._hasher = hasher
        self._device = device
        self._orders: SimpleQueue[tuple[Reading, torch.Event | None] | None] = SimpleQueue()
        self._done: deque[tuple[Reading, Sums]] = deque()
        self._thread: threading.Thread | None = None

    def read(self, reading: Reading) -> None:
        """Hash these blocks as they are after all that has been begun on the device by now."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kvbelay digest", daemon=True)
            self._thread.start()
        self._orders.put((reading, self._mark()))

    def done(self) -> list[tuple[Reading, Sums]]:
        """What has been hashed since the last call."""
        found = []
        while self._done:
            found.append(self._done.popleft())
        return found

    def wipe(self, reading: Reading) -> None:
        """Set the blocks to zeros before anything else that is begun from now on."""
        hasher = self._hasher
        for group, run in enumerate(reading.runs):
            if not isinstance(hasher, Failure) and hasher.refusal(group) is None:
                hasher.wipe(group, run.blocks)

    def close(self) -> None:
        """Stop after what was ordered. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._orders.put(None)

    def _mark(self) -> torch.Event | None:
        """A point in the device's own order of things; a CPU has none to wait for."""
        if self._device is None or self._device.type == "cpu":
            return None
        mark = torch.Event(device=self._device)
        mark.record()
        return mark

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            reading, mark = order
            said = call(partial(self._sums, reading, mark), Where("", DIGEST, reading.request))
            self._done.append((reading, Sums(1, unverified=said.detail) if isinstance(said, Failure) else said))

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
