"""How long an offer to another engine is good.

A producer keeps what it offers for a lease, and then uses the blocks for something else; a consumer that pulls them
later gets the KV of another request, and hears that all went well. So the producer's guard says with the offer until
when it is good, and the consumer's guard does not load what came later. Both go by the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from typing import Any

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.vllm.case import Case
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.options import KEY

UNTIL = "until"


def good_until(offering: Iterable[Guarded]) -> dict[str, float]:
    """Until when, in seconds of the wall clock, what these children offer now is good, by name."""
    now = time.time()
    return {child.name: now + child.trusted_s for child in offering if child.trusted_s < math.inf}


def came_late(child: Guarded, case: Case) -> bool:
    """Whether a request came too late for what the child was offered. The child's failure then stands in the case."""
    late_s = case.request.arrival_time - _good_until(child.name, case.request.kv_transfer_params)
    if late_s <= 0:
        return False
    refused(child, case, errors.TicketExpired(f"the request came {late_s:.3g} s too late for what it was to load"))
    return True


def refused(child: Guarded, case: Case, error: errors.KvbelayError) -> None:
    """The child shall not load the request. That stands in the case, once."""
    if not any(failure.child == child.name for failure in case.failures):
        failure = fail(error, Where(child.name, "load", case.request.request_id))
        child.note(failure)
        case.failures += (failure,)


def _good_until(child: str, params: object) -> float:
    """What the producer said. It comes from a client: what has the wrong shape says nothing."""
    ours = params.get(KEY) if isinstance(params, Mapping) else None
    until: Any = ours.get(UNTIL) if isinstance(ours, Mapping) else None
    good = until.get(child) if isinstance(until, Mapping) else None
    return good if type(good) is float and not math.isnan(good) else math.inf
