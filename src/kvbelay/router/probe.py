"""Probes: whether an instance makes progress, not only whether it answers.

A wedged engine goes on answering 200 to ``/health``, and its metrics stand still. So the metrics are what is asked for:
work without progress makes an instance suspect, and one token that it then generates, or does not, decides.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Mapping

import aiohttp
import msgspec

from kvbelay.errors import DeadlineExceeded, KvbelayError, PeerFailed, ProtocolViolation
from kvbelay.router.config import Health
from kvbelay.router.peers import Fleet, Peer
from kvbelay.router.upstream import in_our_words
from kvbelay.router.watch import Watch

TEXT_NBYTES = 16 * 1024 * 1024
"""Longest answer to a probe that is read."""
RUNNING = "vllm:num_requests_running"
PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
SAMPLE = re.compile(rf"^({'|'.join((RUNNING, *PROGRESS))})(?:\{{[^\n]*\}})? ([0-9.eE+-]+)\s*$", re.MULTILINE)
OK, NOT_FOUND = 200, 404
UNKNOWN = frozenset({401, 403, 404})
"""Statuses that say nothing of the engine: there is no such address, or not for us."""


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


_models = msgspec.json.Decoder(_Models).decode


class Counted(msgspec.Struct, frozen=True):
    """What an engine's metrics say."""

    running: float
    tokens: float
    """Computed and generated since its start."""


def counted(text: str) -> Counted | None:
    """Read Prometheus' text; None if it has nothing of an engine. All engines behind one address are added up."""
    running = tokens = 0.0
    found = False
    for name, value in SAMPLE.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        found = True
        if name == RUNNING:
            running += number
        else:
            tokens += number
    return Counted(running, tokens) if found else None


class Progress:
    """Whether an instance that has work gets on with it. Told of each probe; pure, the time is passed in."""

    def __init__(self) -> None:
        self._tokens = -1.0
        self._since = float("-inf")

    def stalled(self, counts: Counted | None, busy: bool, now: float, stall_s: float) -> bool:
        """Whether there has been work for ``stall_s`` without progress. ``busy``: it has calls of ours."""
        if counts is None:
            moved = False
        else:
            busy = busy or counts.running > 0
            moved = counts.tokens != self._tokens
            self._tokens = counts.tokens
        if moved or not busy or self._since == float("-inf"):
            self._since = now
        return now - self._since >= stall_s

    def moved(self, now: float) -> None:
        """It has been seen to work."""
        self._since = now


class Prober:
    """Probes one instance. A probe that finds it down, or up again, tells it."""

    def __init__(self, session: aiohttp.ClientSession, fleet: Fleet, peer: Peer) -> None:
        self._session = session
        self._fleet = fleet
        self.peer = peer
        self._progress = Progress()
        self._failed = 0
        self._failing_since = float("-inf")
        self._probed = False

    async def run(self) -> None:
        """Probe until cancelled; at once if that has never been done."""
        if not self._probed:
            await self.probe()
        while True:
            await asyncio.sleep(self._fleet.config.health.interval_s)
            await self.probe()

    async def probe(self) -> None:
        """One probe. The first one decides alone, later ones after ``down_after`` failures in a row between which it
        has answered nobody: under load an engine may be too busy to tell its metrics.
        """
        loop, peer, health = asyncio.get_running_loop(), self.peer, self._fleet.config.health
        first, self._probed = not self._probed, True
        answers, began = False, loop.time()
        try:
            counts = await self._counts(health)
            answers = True
            if self._progress.stalled(counts, peer.calls > 0, loop.time(), health.stall_s) or not peer.up:
                await self._token(health)
                self._progress.moved(loop.time())
        except KvbelayError as exc:
            if self._failed == 0 or peer.answered_at > self._failing_since:
                self._failed, self._failing_since = 0, began
            self._failed += 1
            if first or self._failed >= health.down_after:
                cause = f"it answers, but generates nothing: {exc.what}" if answers else exc.what
                self._fleet.went_down(peer, cause, answers=answers)
        else:
            self._failed = 0
            peer.came_up(loop.time())

    async def _counts(self, health: Health) -> Counted | None:
        """What its metrics say, None if it has none. Raises one of our errors if it is not well."""
        status, body = await self._ask("GET", "/metrics", health.timeout_s)
        if status == OK:
            found = counted(body.decode(errors="replace"))
            if found is not None:
                return found
        elif status != NOT_FOUND:
            msg = f"/metrics is answered with {status}"
            raise PeerFailed(msg)
        status, _ = await self._ask("GET", "/health", health.timeout_s)
        if status != OK:
            msg = f"/health is answered with {status}"
            raise PeerFailed(msg)
        return None

    async def _token(self, health: Health) -> None:
        """Have it generate one token. Raises one of our errors if it does not; who must not ask learns nothing."""
        headers = {"Authorization": f"Bearer {os.environ.get(health.key_env, '')}"} if health.key_env else {}
        status, body = await self._ask("GET", "/v1/models", health.timeout_s, headers)
        if status in UNKNOWN:
            return
        try:
            model = _models(body).data[0].id
        except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as exc:
            msg = f"/v1/models is answered with {status} and names no model"
            raise ProtocolViolation(msg) from exc
        ask = {"model": model, "prompt": "Hello", "max_tokens": 1, "temperature": 0.0}
        status, _ = await self._ask(
            "POST", "/v1/completions", health.token_s, {**headers, "Content-Type": "application/json"}, ask
        )
        if status != OK and status not in UNKNOWN:
            msg = f"a completion of one token is answered with {status}"
            raise PeerFailed(msg)

    async def _ask(
        self, method: str, path: str, within_s: float, headers: Mapping[str, str] | None = None, body: object = None
    ) -> tuple[int, bytes]:
        loop, peer = asyncio.get_running_loop(), self.peer
        data = None if body is None else msgspec.json.encode(body)
        with Watch() as watch, in_our_words(peer):
            watch.until(loop.time() + within_s, lambda: DeadlineExceeded(f"no answer to {path} in {within_s:g} s"))
            async with self._session.request(
                method, peer.url + path, data=data, headers=headers, allow_redirects=False
            ) as response:
                found = await response.content.read(TEXT_NBYTES)
                while more := await response.content.readany():
                    found += more
                    if len(found) > TEXT_NBYTES:
                        msg = f"the answer to {path} is longer than {TEXT_NBYTES} bytes"
                        raise ProtocolViolation(msg)
                return response.status, found
