"""What this engine offers to others: digests of it, and the end of an offer that nobody wants any more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvbelay.core.model import Outcome, Result
from kvbelay.link.links import Links, told
from kvbelay.vllm import host
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.host import Shape
from kvbelay.vllm.readings import OFFERED, Reading, Sums, runs

LONGEST_S = 3600.0
"""How long the digests of an offer are kept whose lease has no known end; when its blocks are free, that is told."""
MOST = 65_536
"""Requests whose digests are still to come."""


class _Offered(msgspec.Struct):
    request: Any
    reading: Reading | None = None
    sums: Sums | None = None
    promised: bool = False


class Offering:
    """The scheduler's side. ``verify``: others may want digests."""

    def __init__(self, links: Links, shapes: tuple[Shape, ...], *, ranks: int, verify: bool) -> None:
        self.manager: Any = None
        """The host's KV cache manager, once it is bound."""
        self._links = links
        self._shapes = shapes
        self._ranks = ranks
        self._verify = verify
        self._coming: dict[str, _Offered] = {}
        """Requests whose prompt is not computed to its end yet."""
        self._read: dict[str, _Offered] = {}
        """Those of which it is, until they are over."""

    def arrived(self, request: Any) -> None:
        """A request has come. Those that are to be offered are known by their parameters."""
        params = request.kv_transfer_params
        if self._verify and isinstance(params, Mapping) and params.get("do_remote_decode"):
            self._coming[request.request_id] = _Offered(request)

    def readings(self, scheduler_output: Any) -> tuple[Reading, ...]:
        """The prompts that end in this step."""
        if not self._coming:
            return ()
        scheduled = host.scheduled(scheduler_output)
        found = []
        for request_id, offered in list(self._coming.items()):
            request = offered.request
            tokens = scheduled.get(request_id, 0)
            if tokens and request.num_computed_tokens + tokens >= request.num_prompt_tokens:
                blocks = host.block_ids(self.manager, request_id)
                of = runs(self._shapes, blocks, 0, request.num_prompt_tokens)
                offered.reading = Reading(request_id, OFFERED, of)
                self._read[request_id] = self._coming.pop(request_id)
                found.append(offered.reading)
        while len(self._read) > MOST:
            del self._read[next(iter(self._read))]
        return tuple(found)

    def learned(self, request_id: str, sums: Sums) -> None:
        """Some ranks have hashed it."""
        offered = self._read.get(request_id)
        if offered is None:
            return
        offered.sums = sums if offered.sums is None else offered.sums.plus(sums)
        self._publish(request_id, offered)

    def told(self, request_id: str, offering: Iterable[Guarded], blocks: tuple[list[int], ...]) -> dict[str, Any]:
        """The request is over, and offered by these children; what other engines have to know of it. ``blocks`` are
        those that are offered.
        """
        leases_s = [LONGEST_S, *(child.trusted_s for child in offering if not child.beats)]
        self._links.offers.promise(request_id, min(leases_s))
        offered = self._read.get(request_id)
        if offered is None:
            self._links.offers.publish(request_id, 0, (), (), "the other engine takes no digests")
        elif offered.reading is not None and not _are_still(offered.reading, blocks, self._shapes):
            del self._read[request_id]
            self._links.offers.publish(request_id, 0, (), (), "it was computed anew after it was hashed")
        else:
            offered.promised = True
            self._publish(request_id, offered)
        return told(self._links.source, request_id)

    def sent(self, request_id: str) -> None:
        """The host may use its blocks for something else."""
        self._links.offers.free(request_id)

    def failed(self, outcome: Outcome) -> None:
        """It could not be kept for the others."""
        if outcome.result is Result.FAILED and outcome.failures:
            first = outcome.failures[0]
            self._links.offers.withdraw(outcome.request, first.kind, first.detail)

    def over(self, request_id: str) -> None:
        """The request is over, and offered to nobody; or all has been said of it."""
        self._coming.pop(request_id, None)
        offered = self._read.get(request_id)
        if offered is not None and not offered.promised:
            del self._read[request_id]

    def _publish(self, request_id: str, offered: _Offered) -> None:
        sums, reading = offered.sums, offered.reading
        if not offered.promised or sums is None or reading is None or sums.ranks < self._ranks:
            return
        del self._read[request_id]
        tokens = int(offered.request.num_prompt_tokens)
        digests = [
            [*group[:1], *[0] * (run.first // shape.block_tokens), *group[1:]]
            for run, shape, group in zip(reading.runs, self._shapes, sums.groups, strict=False)
        ]
        self._links.offers.publish(request_id, tokens, sums.forms, digests, sums.unverified)


def _are_still(reading: Reading, blocks: tuple[list[int], ...], shapes: tuple[Shape, ...]) -> bool:
    """Whether a request's blocks are those that were hashed; it may have got more since, and lost the first ones."""
    for run, ids, shape in zip(reading.runs, blocks, shapes, strict=True):
        first = run.first // shape.block_tokens
        now = ids[first : first + len(run.blocks)]
        if any(is_now not in {was, host.NULL} for was, is_now in zip(run.blocks, now, strict=False)):
            return False
    return True
