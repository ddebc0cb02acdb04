"""The decode process: fetches a prompt's KV cache through two children that break, and answers."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from functools import partial

from kvbelay.cli.demo.messages import Answered, Ended, Loaded, Prompt, Setup, StruckNow, say
from kvbelay.cli.demo.prefill import STEP_BLOCKS
from kvbelay.cli.demo.worker import CLOSE_S, Part, open_engine, require_all, serve
from kvbelay.connectors.faulty import Faulty, Plan, Struck
from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import prepare
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Action, Do, Event, Kind, Outcome, Report, Side
from kvbelay.core.policy import Policy
from kvbelay.reference import HeldBlocks
from kvbelay.runtime.belay import Belay

LOAD_S = 6.0
QUIET_S = 10.0
"""How long the end waits for calls that hang, and hold blocks."""
LOOK_S = 0.02
POLICY = Policy(
    attempts=5,
    attempts_per_child=2,
    attempt_s=1.0,
    drain_s=0.3,
    circuit=CircuitPolicy(failures=20, window_s=5.0, pause_s=0.2),
)


WORDS = {Do.START: "asked", Do.ABORT: "out of time", Do.HOLD: "does not come back, blocks held"}


class Diary:
    """What happened to each request, in words, as the layer reports it."""

    def __init__(self) -> None:
        self._lines: dict[str, list[str]] = {}

    def watch(self, thing: Event | Report | Action, _at: float) -> None:
        """A hook of `Belay`."""
        line = ""
        if isinstance(thing, Report) and thing.failure is not None and thing.kind is Kind.FAILED:
            line = f"{thing.child}: {thing.failure.kind}"
        elif isinstance(thing, Report) and thing.kind is Kind.MISSED:
            line = f"{thing.child}: miss"
        elif isinstance(thing, Action) and thing.do in WORDS:
            line = f"{thing.child} {WORDS[thing.do]}"
            if thing.do is Do.START and thing.start:
                line += f" from token {thing.start}"
        if line:
            self._lines.setdefault(thing.request, []).append(line)

    def take(self, request: str) -> tuple[str, ...]:
        """What was noted of a request."""
        return tuple(self._lines.pop(request, ()))


def start(setup: Setup, stack: ExitStack) -> Part:
    """Open the engine, and the children behind their faults."""
    engine, cache = open_engine(setup)
    diary = Diary()
    held = HeldBlocks(cache)

    def struck(strike: Struck) -> None:
        say(StruckNow(strike.request, strike.child, strike.fault))

    belay = Belay(POLICY, watch=diary.watch, released=held.released, seed=setup.seed)
    stack.callback(belay.close, CLOSE_S)

    def opener(name: str, connector: str, config: dict[str, object]) -> Connector:
        inner = prepare(name, connector, config, source="the demo").open(cache.fingerprint())
        plan = Plan(setup.seed, setup.strikes.get(name, ()))

        def echo(request: str, epoch: int, result: object) -> None:
            belay.heard(name, Side.LOAD, request, result, epoch=epoch)

        return Faulty(inner, plan, child=name, struck=struck, echo=echo)

    belay.add("near", partial(opener, "near", "stream", {"peers": [setup.near]}))
    belay.add("store", partial(opener, "store", *setup.store_config()))
    require_all(belay)

    def work(prompt: Prompt) -> None:
        table = cache.allocate(len(prompt.tokens) + prompt.max_new)
        ids = cache.batch_ids(prompt.tokens, STEP_BLOCKS)
        outcome: Outcome | None = None
        watermark = 0
        if ids:
            outcome = belay.load(prompt.id, prompt.tickets, cache.batches(ids, table, prompt.id), LOAD_S)
            watermark = outcome.watermark
            if outcome.held:
                kept = watermark // cache.block_tokens
                fresh = cache.allocate((len(table) - kept) * cache.block_tokens)
                held.hold(prompt.id, Side.LOAD, table[kept:])
                table = table[:kept] + fresh
        say(Loaded(prompt.id, outcome, outcome.nbytes if outcome else 0, diary.take(prompt.id)))
        began = time.monotonic()
        answer = engine.generate(prompt.tokens, prompt.max_new, table, start=watermark)
        cache.free(table)
        say(Answered(prompt.id, tuple(answer.tokens), answer.recomputed, time.monotonic() - began))

    def finish() -> None:
        ends_at = time.monotonic() + QUIET_S
        while belay.pending() and time.monotonic() < ends_at:
            time.sleep(LOOK_S)
        counts: Counter[str] = Counter()
        for (child, reason), count in belay.swallowed().items():
            counts[f"{child}: {reason.value}"] += count
        say(Ended(dict(counts), belay.pending(), cache.blocks - cache.free_blocks))

    return Part(work, finish)


if __name__ == "__main__":
    serve(start)
