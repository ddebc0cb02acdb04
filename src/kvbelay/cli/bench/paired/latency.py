"""What verification adds to a first token, and to a decode step beside it: two pairs in turn, one of them frozen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from statistics import median

from kvbelay.cli.bench.paired.figures import First, Judged, Steps
from kvbelay.cli.bench.paired.pair import Pair, Prompt

SAMPLES = {128: 3, 448: 2}
"""First tokens in a round, by length of the prompt."""
FIRST_ROUNDS = 30
"""Short ones, in turn: within a minute a server's times drift by more than what is looked for."""
ROUNDS = 10
LOADS = 6
"""In a row, while a stream is decoded."""
STREAM = 256
"""Tokens of the stream: more than come while these are loaded."""
EARLY = 4
"""Tokens of the stream before the first load."""
VOCABULARY = 8000
"""Token ids from which prompts are made; no model that is served has fewer."""


def prompt_of(dice: Random, tokens: int) -> Prompt:
    """Random tokens: no two prompts begin alike."""
    return [dice.randrange(100, VOCABULARY) for _ in range(tokens)]


def first_tokens(off: Pair, on: Pair, dice: Random, count: Judged, note: Callable[[str], None]) -> list[First]:
    """Both pairs stand frozen, and do so afterwards."""
    rows = [First(tokens) for tokens in SAMPLES]
    for index in range(FIRST_ROUNDS + 1):
        note(f"first tokens of both pairs in turn, {_round(index, FIRST_ROUNDS)}")
        prompts = {row.tokens: [prompt_of(dice, row.tokens) for _ in range(SAMPLES[row.tokens])] for row in rows}
        for pair in (off, on) if index % 2 else (on, off):
            with running(pair, sum(SAMPLES.values()), dice, count):
                took = {
                    tokens: median(pair.first_token_s(prompt) for prompt in some) for tokens, some in prompts.items()
                }
            if index:
                for row in rows:
                    (row.on_s if pair.linked else row.off_s).append(took[row.tokens])
    return rows


def steps(off: Pair, on: Pair, dice: Random, count: Judged, note: Callable[[str], None]) -> Steps:
    """The same of a stream's steps while others' prompts are loaded."""
    row = Steps(max(SAMPLES))
    for index in range(ROUNDS + 1):
        note(f"steps of a stream while others' KV is loaded, {_round(index, ROUNDS)}")
        prompts = [prompt_of(dice, row.tokens) for _ in range(LOADS)]
        for pair in (off, on) if index % 2 else (on, off):
            with running(pair, len(prompts), dice, count):
                gaps = _gaps(pair, prompts, dice)
            if index:
                (row.on_s if pair.linked else row.off_s).append(gaps)
    return row


def _round(index: int, rounds: int) -> str:
    return f"round {index} of {rounds}" if index else "to warm up"


@contextmanager
def running(pair: Pair, loads: int, dice: Random, count: Judged) -> Iterator[None]:
    """It alone runs, and of these loads it is counted how many were verified."""
    pair.thaw()
    before = pair.loads()
    pair.first_token_s(prompt_of(dice, min(SAMPLES)))  # who was frozen is slow at first, and its link may be down
    pair.settled(before + 1)
    same = pair.loads("same")
    yield
    pair.settled(before + 1 + loads)
    if pair.linked:
        count.loads += loads
        count.same += int(pair.loads("same") - same)
    pair.freeze()


def _gaps(pair: Pair, prompts: list[Prompt], dice: Random) -> list[float]:
    """The times between tokens of a stream, from the first load's beginning to the last one's end."""
    offers = [(prompt, pair.offer(prompt)) for prompt in prompts]
    body = {"prompt": prompt_of(dice, 16), "max_tokens": STREAM}
    done = threading.Event()

    def load() -> None:
        try:
            for prompt, params in offers:
                pair.load(prompt, params)
        finally:
            done.set()

    loader = threading.Thread(target=load, daemon=True)
    gaps: list[float] = []
    last = 0.0
    for index, now in enumerate(pair.decode.stream(body)):
        if index == EARLY:
            loader.start()
        elif index > EARLY and not done.is_set():
            gaps.append(now - last)
        last = now
    loader.join()
    return gaps
