"""One batch worked at by several threads: stripe i has chunks i, i + stripes, and so on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from kvbelay.connectors.spans import CHUNK, combine
from kvbelay.errors import Closed, KvbelayError

Work = Callable[[int], None]


def stripes_for(nbytes: int, most: int) -> int:
    """Over how many stripes a batch goes: each has a chunk at least."""
    return max(1, min(most, -(-nbytes // CHUNK)))


class Stripes:
    """What the threads at one batch share: the digests of its chunks, and the first cause if one of them fails.

    ``stop`` is called when one has failed, from its thread, and must let the others end at once.
    """

    def __init__(self, chunks: int, stop: Callable[[], None] = lambda: None) -> None:
        self.digests = [b""] * chunks
        self._stop = stop
        self._causes: list[KvbelayError] = []

    @property
    def failed(self) -> bool:
        """Whether one of them has failed: the others need not go on."""
        return bool(self._causes)

    def run(self, work: Work, stripes: int, crew: ThreadPoolExecutor) -> bytes:
        """Do ``work`` for each stripe, the first one here and the others on the crew, or here where all of it is
        busy; returns the digest of the batch. Raises the first cause. Once it has returned or raised, nobody works.
        """
        helped: list[Future[None]] = []
        over = False
        try:
            helped.extend(self._submit(crew, work, stripe) for stripe in range(1, stripes))
            self._guarded(work, 0)
            for stripe, future in enumerate(helped, 1):
                if future.cancel():
                    self._guarded(work, stripe)
            over = True
        finally:
            if not over:
                self._stop()
            begun = [future for future in helped if not future.cancel()]
            wait(begun)
        for future in begun:
            future.result()
        if self._causes:
            first = self._causes[0]
            self._causes.clear()  # else the error, through its frames, and this would keep each other alive
            raise first
        return combine(self.digests)

    def _guarded(self, work: Work, stripe: int) -> None:
        if self._causes:
            return
        try:
            work(stripe)
        except KvbelayError as exc:
            self._causes.append(exc)
            self._stop()

    def _submit(self, crew: ThreadPoolExecutor, work: Work, stripe: int) -> Future[None]:
        try:
            return crew.submit(self._guarded, work, stripe)
        except RuntimeError as exc:  # the crew was dismissed
            raise Closed("the connector was closed") from exc
