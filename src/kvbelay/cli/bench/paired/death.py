"""How soon the decode side decides when the prefill side is killed.

The moment is the one at which the decision's line has come into its log.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import Random

from kvbelay.cli.bench.paired.figures import Death
from kvbelay.cli.bench.paired.latency import prompt_of
from kvbelay.cli.bench.paired.pair import Pair
from kvbelay.cli.bench.paired.server import until

TOKENS = 128
FAILED = r"kvbelay: (load of request \S+ failed \(|\S+\.load failed for request)"
"""Logged at once when the guard has decided that a load has failed, or that none begins."""
LATEST_S = 60.0
FIRST, GONE, WAITED_FOR = (
    "while it is waited for, before NIXL's first handshake",
    "before it is asked, before NIXL's first handshake",
    "while it is waited for, after a handshake",
)


def deaths(pair: Pair, times: int, dice: Random, note: Callable[[str], None]) -> list[Death]:
    """Both servers run; afterwards the prefill side is dead.

    Each death needs a prefill server of its own, also because it is one that NIXL has not met.
    """
    rows = [Death(what, pair.linked) for what in (FIRST, GONE, WAITED_FOR)]
    kinds = (_waited_for, _gone, _met)
    for index in range(times):
        for row, kind in zip(rows, kinds, strict=True):
            note(f"killed {row.what}, {'with' if pair.linked else 'without'} a link, {index + 1} of {times}")
            if not pair.prefill.running:
                pair.prefill.start()
                pair.prefill.wait()
            decided_s, answered_s = kind(pair, dice)
            row.decided_s.append(decided_s)
            row.answered_s.append(answered_s)
    return rows


def _met(pair: Pair, dice: Random) -> tuple[float, float]:
    pair.first_token_s(prompt_of(dice, TOKENS))
    return _waited_for(pair, dice)


def _waited_for(pair: Pair, dice: Random) -> tuple[float, float]:
    """The prefill side is frozen, so that the pull stands, and then killed: seconds from the kill on."""
    asked = _Asked(pair, dice)
    pair.prefill.freeze()
    asked.begin()
    until(pair.waits, "the decode side waits for a load", LATEST_S)
    return asked.ended(pair.prefill.kill())


def _gone(pair: Pair, dice: Random) -> tuple[float, float]:
    """It has been killed when the decode side is asked: seconds from then on."""
    asked = _Asked(pair, dice)
    pair.prefill.kill()
    return asked.ended(asked.begin())


class _Asked:
    """A request to the decode side for what the prefill side has."""

    def __init__(self, pair: Pair, dice: Random) -> None:
        self._decode = pair.decode
        prompt = prompt_of(dice, TOKENS)
        self._body = {"prompt": prompt, "max_tokens": 2, "kv_transfer_params": pair.offer(prompt)}
        self._mark = pair.decode.mark()
        self._pool = ThreadPoolExecutor(2)

    def begin(self) -> float:
        """Ask, and begin to read the log; returns when."""
        began = time.monotonic()
        self._tokens = self._pool.submit(list, self._decode.stream(self._body))
        self._decided = self._pool.submit(self._decode.said, FAILED, self._mark, LATEST_S)
        return began

    def ended(self, since: float) -> tuple[float, float]:
        """Seconds since then until the guard had decided, and until the first token."""
        with self._pool:
            return self._decided.result() - since, self._tokens.result()[0] - since
