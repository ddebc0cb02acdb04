"""Many loads of which nothing is spoilt: none may be found wrong, and none may go without a comparison."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random

from kvbelay.cli.bench.paired.figures import Healthy
from kvbelay.cli.bench.paired.latency import prompt_of
from kvbelay.cli.bench.paired.pair import Pair, Prompt, standing
from kvbelay.cli.bench.paired.server import LONGEST

AT_ONCE = 16
BEGINNINGS = 8
"""Texts with which prompts may begin; with prefix caching only the rest is loaded."""
LENGTHS = range(1, LONGEST // 2)
"""Of prompts: all of them come in turn, so most last blocks are partial."""
FAILURES = "kvbelay_failures_total"
"""Of the guard, whatever failed; a load that is found wrong is one."""
RESULTS = ("same", "different", "unknown")
TOLD = 500
"""Loads between two words of how far it is."""


def prompts(count: int, dice: Random) -> Iterator[Prompt]:
    """Of every length; half of them begin as others do, and no two are the same up to their end."""
    beginnings = [prompt_of(dice, LENGTHS.stop) for _ in range(BEGINNINGS)]
    for index in range(count):
        tokens = LENGTHS[index % len(LENGTHS)]
        shared = dice.randrange(tokens) if dice.random() < 0.5 else 0  # noqa: PLR2004  # half of them
        yield dice.choice(beginnings)[:shared] + prompt_of(dice, tokens - shared)


def healthy(model: str, count: int, dice: Random, note: Callable[[str], None]) -> list[Healthy]:
    """Half of them with prefix caching, half without, on a pair of their own each."""
    rows = []
    for caching, share in ((True, count - count // 2), (False, count // 2)):
        if share:
            note(f"two servers start, {'with' if caching else 'without'} prefix caching")
            with standing(model, linked=True, caching=caching) as pair:
                rows.append(_loads(pair, share, caching, dice, note))
    return rows


def _loads(pair: Pair, count: int, caching: bool, dice: Random, note: Callable[[str], None]) -> Healthy:
    pair.first_token_s(prompt_of(dice, LENGTHS.stop))
    pair.settled(1)  # the link is up
    before = {result: pair.loads(result) for result in ("", *RESULTS)}
    failures = pair.decode.metric(FAILURES)
    began = time.monotonic()

    def one(prompt: Prompt) -> None:
        pair.load(prompt, pair.offer(prompt))

    asked = list(prompts(count, dice))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for index, _ in enumerate(pool.map(one, asked)):
            if (index + 1) % TOLD == 0:
                note(f"{index + 1:,} of {count:,} loads, {time.monotonic() - began:.0f} s")
    pair.settled(before[""] + count)
    took_s = time.monotonic() - began
    same, alarms, unknown = (int(pair.loads(result) - before[result]) for result in RESULTS)
    failed = int(pair.decode.metric(FAILURES) - failures) - alarms
    lengths = len({len(prompt) for prompt in asked})
    return Healthy(caching, count, same, alarms, unknown, failed, lengths, took_s)
