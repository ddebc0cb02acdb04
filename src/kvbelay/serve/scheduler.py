"""Whose turn it is: one thread computes, a piece of one request after a piece of another.

A piece is one token of an answer, or a few blocks of a prompt. Which requests share the thread changes nothing in their
answers, since the engine keeps nothing between calls. Transfers run on other threads meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec

from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.errors import CacheFull, Closed, KvbelayError
from kvbelay.reference import Engine, Model, PagedCache
from kvbelay.reference.model import Floats
from kvbelay.serve.metrics import Metrics
from kvbelay.serve.transfer import THREADS, Transfer

PIECE_BLOCKS = 4
"""Blocks of a prompt that are computed in one turn."""
WAITING = 256
"""Most requests that wait for blocks."""
JOIN_S = 5.0


class Busy(KvbelayError):
    """Too many requests wait already."""

    retryable = True


class Token(msgspec.Struct, frozen=True):
    """The next token of an answer."""

    token: int
    brought: int = 0
    """Tokens of the prompt that a transfer brought."""


class Ended(msgspec.Struct, frozen=True):
    """The last word of a request."""

    finish: str
    """"stop", "length", or "cancelled"."""
    params: dict[str, Any] | None = None
    """What `Transfer.publish` gave."""
    broke: str = ""
    """Why there is no answer; empty where there is one."""


Word = Token | Ended


class Job:
    """One request. ``hear`` is called on the threads of the scheduler; after `Ended` no more.

    Parameters
    ----------
    request
        Its id, unique here.
    tokens
        The prompt, one token at least.
    length
        Most tokens of the answer.
    ends
        Tokens that end it.
    offer
        Publish the prompt's KV at the end.
    fetch
        Bring the prompt's KV from where it was published, as far as it can be had.
    packed
        With ``fetch``: tickets for the prompt's KV, as a peer sent them.
    """

    def __init__(
        self,
        request: str,
        tokens: tuple[int, ...],
        length: int,
        *,
        ends: frozenset[int],
        hear: Callable[[Word], None],
        offer: bool = False,
        fetch: bool = False,
        packed: bytes = b"",
    ) -> None:
        self.request = request
        self.tokens = tokens
        self.length = length
        self.ends = ends
        self.hear = hear
        self.offer = offer
        self.fetch = fetch
        self.packed = packed
        self.cancelled = False
        self.table: tuple[int, ...] = ()
        self.brought = 0
        self.there = 0
        """Tokens whose KV is in the table."""
        self.said: list[int] = []
        self.logits: Floats | None = None
        """After the last token that is there."""


class Scheduler:
    """Takes jobs, one thread's work, until it is closed."""

    def __init__(self, model: Model, cache: PagedCache, metrics: Metrics) -> None:
        self._engine = Engine(model, cache)
        self._cache = cache
        self._metrics = metrics
        self._transfer: Transfer | None = None
        self._wake = threading.Condition()
        self._waiting: deque[Job] = deque()
        self._turns: deque[Job] = deque()
        self._running = 0
        """Requests that were admitted and have not ended."""
        self._closed = False
        self._turn_at: float | None = None
        """When the present turn began."""
        self._errands = ThreadPoolExecutor(THREADS, thread_name_prefix="kvbelay-transfer")
        self._thread = threading.Thread(target=self._work, name="kvbelay-compute", daemon=True)
        metrics.watch("vllm:num_requests_running", "Requests that have blocks", lambda: self._running)
        metrics.watch("vllm:num_requests_waiting", "Requests that wait for blocks", lambda: len(self._waiting))
        metrics.watch(
            "kvbelay_serve_free_blocks", "Blocks of the KV cache that nobody holds", lambda: cache.free_blocks
        )

    def start(self, transfer: Transfer) -> None:
        """Begin to compute."""
        self._transfer = transfer
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises `CacheFull` for a job that can never fit, `Busy`, and `Closed`."""
        need = -(-(len(job.tokens) + job.length) // self._cache.block_tokens)
        if need > self._cache.blocks:
            msg = f"the request needs {need} blocks, and the whole KV cache has {self._cache.blocks}"
            raise CacheFull(msg)
        with self._wake:
            if self._closed:
                raise Closed("the server is ending")
            if len(self._waiting) >= WAITING:
                msg = f"{WAITING} requests wait already"
                raise Busy(msg)
            self._waiting.append(job)
            self._wake.notify()

    def cancel(self, job: Job) -> None:
        """Nobody wants its answer any more."""
        with self._wake:
            job.cancelled = True
            self._wake.notify()
        if self._transfer is not None and (job.fetch or job.offer):
            self._transfer.cancel(job.request)

    def freed(self) -> None:
        """Blocks have become free."""
        with self._wake:
            self._wake.notify()

    def stuck_s(self) -> float:
        """How long the present turn has taken, in seconds; infinite if the thread has died."""
        began = self._turn_at
        if not self._thread.is_alive():
            return float("inf")
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End. What was promised is not answered any more: close the API first."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join(JOIN_S)
        self._errands.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while (job := self._next()) is not None:
            self._turn_at = time.monotonic()
            ended = call(partial(self._turn, job), Where("", "compute", job.request))
            self._turn_at = None
            if isinstance(ended, Failure):
                self._end(job, Ended("cancelled", broke=f"the engine failed: {ended.detail}"))
            elif ended is not None:
                self._finish(job, ended)
            else:
                with self._wake:
                    self._turns.append(job)

    def _next(self) -> Job | None:
        """The job whose turn it is; None at the end."""
        with self._wake:
            while not self._closed:
                self._admit()
                if self._turns:
                    return self._turns.popleft()
                self._wake.wait()
        return None

    def _admit(self) -> None:
        """Give blocks to those that wait, in their order, as far as there are some. Under the lock."""
        while self._waiting:
            job = self._waiting[0]
            try:
                if not job.cancelled:
                    job.table += self._cache.allocate(self._missing(job))
            except CacheFull:
                return
            self._waiting.popleft()
            self._running += 1
            if job.fetch and not job.cancelled:
                self._send(job, self._fetch)
            else:
                self._turns.append(job)

    def _missing(self, job: Job) -> int:
        """Tokens for which the job's table has no room yet."""
        return len(job.tokens) + job.length - len(job.table) * self._cache.block_tokens

    def _send(self, job: Job, errand: Callable[[Job, Transfer], None]) -> None:
        """Do it on a thread of its own."""

        def run() -> None:
            transfer = self._transfer
            failure = transfer and call(partial(errand, job, transfer), Where("", "transfer", job.request))
            if isinstance(failure, Failure):
                self._end(job, Ended("cancelled", broke=f"the transfer failed: {failure.detail}"))

        self._errands.submit(run)

    def _fetch(self, job: Job, transfer: Transfer) -> None:
        fetched = transfer.fetch(job.request, job.tokens, job.table, job.packed)
        self._metrics.transfers.labels("fetch", fetched.result).inc()
        job.fetch = False
        job.table, job.there, job.brought = fetched.table, fetched.watermark, fetched.watermark
        with self._wake:
            if self._missing(job) > 0:  # some of its blocks are held back
                self._replace(job)
            else:
                self._turns.append(job)
            self._wake.notify()

    def _replace(self, job: Job) -> None:
        """Other blocks for those that are held back; or nothing and once more from the start, lest jobs wait for one
        another. Under the lock.
        """
        try:
            job.table += self._cache.allocate(self._missing(job))
        except CacheFull:
            self._cache.free(job.table)
            job.table, job.there, job.brought = (), 0, 0
            self._running -= 1
            self._waiting.appendleft(job)
            return
        self._turns.append(job)

    def _turn(self, job: Job) -> Ended | None:
        """A piece of the work; returns the end when that was the last one."""
        if job.cancelled:
            return Ended("cancelled")
        size = len(job.tokens)
        if job.there < size:
            stop = min(job.there + PIECE_BLOCKS * self._cache.block_tokens, size)
            self._metrics.computed.inc(stop - job.there)
            job.logits = self._engine.prefill(job.tokens[:stop], job.table, job.there)
            job.there = stop
            return None
        if job.said:
            job.logits = self._engine.decode(job.said[-1], job.there, job.table)
            job.there += 1
        token = int(job.logits.argmax()) if job.logits is not None else 0
        job.said.append(token)
        self._metrics.said.inc()
        job.hear(Token(token, job.brought))
        if token in job.ends:
            return Ended("stop")
        return Ended("length") if len(job.said) == job.length else None

    def _finish(self, job: Job, ended: Ended) -> None:
        self._metrics.brought.inc(job.brought)
        if job.offer and not job.cancelled:
            self._send(job, lambda job, transfer: self._publish(job, transfer, ended))
        else:
            self._end(job, ended)

    def _publish(self, job: Job, transfer: Transfer, ended: Ended) -> None:
        params = transfer.publish(job.request, job.tokens, job.table)
        self._metrics.transfers.labels("offer", "failed" if params is None else "saved").inc()
        job.table = ()
        if job.cancelled:
            transfer.cancel(job.request)
        self._end(job, msgspec.structs.replace(ended, params=params))

    def _end(self, job: Job, ended: Ended) -> None:
        with self._wake:
            self._running -= 1
        table, job.table = job.table, ()
        self._cache.free(table)
        self._metrics.ended.labels("broken" if ended.broke else ended.finish).inc()
        job.hear(ended)
        self.freed()
