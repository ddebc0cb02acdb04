"""Many clients at once, of whom a part hangs up early."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
from dance import OFFER, Answer, complete
from server import Server

CLIENTS = 12
"""At a time."""
IMPATIENT = 0.4
"""The part of the clients that hangs up."""
HANG_UP_S = (0.005, 2.5)
"""When they do."""
PATIENCE_S = 120.0


@dataclass
class Storm:
    """What became of the requests."""

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    """Prompt and answer, in no order; a connection that broke is an answer of status 0."""
    hung_up: int = 0
    seconds: float = 0.0

    def statuses(self) -> dict[int, int]:
        """How many answers had which status."""
        return {
            status: sum(a.status == status for _, a in self.answers) for status in {a.status for _, a in self.answers}
        }


def storm(
    prefill: Server,
    decode: Server,
    numbers: Sequence[int],
    *,
    seed: int,
    impatient: float = IMPATIENT,
    at: dict[int, Callable[[], None]] | None = None,
) -> Storm:
    """Have all these prompts prefilled and decoded. ``at`` names what happens before the request of that index."""
    dice = random.Random(seed)
    patience = [dice.uniform(*HANG_UP_S) if dice.random() < impatient else PATIENCE_S for _ in numbers]
    said = Storm()
    began = time.monotonic()

    def client(index: int) -> None:
        happens = (at or {}).get(index)
        if happens is not None:
            happens()
        answer = _dance(prefill, decode, numbers[index], patience[index])
        if answer is None:
            said.hung_up += 1
        else:
            said.answers.append((numbers[index], answer))

    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client, index) for index in range(len(numbers))]:
            done.result()
    said.seconds = time.monotonic() - began
    return said


def _dance(prefill: Server, decode: Server, number: int, patience_s: float) -> Answer | None:
    """One client's request; None where it hung up."""
    began = time.monotonic()

    def left() -> float:
        return max(0.001, patience_s - (time.monotonic() - began))

    try:
        params = complete(prefill, number, OFFER, tokens=1, patience_s=left())["kv_transfer_params"]
        text = complete(decode, number, params, patience_s=left())["choices"][0]["text"]
    except httpx.HTTPStatusError as exc:
        return Answer(exc.response.status_code, exc.response.text, time.monotonic() - began)
    except httpx.TimeoutException:
        return None if patience_s < PATIENCE_S else Answer(0, "no answer", time.monotonic() - began)
    except httpx.HTTPError as exc:
        return Answer(0, repr(exc), time.monotonic() - began)
    return Answer(httpx.codes.OK, text, time.monotonic() - began)
