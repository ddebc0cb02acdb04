"""Loads are compared with what was offered.

vLLM's own class shows what comes of the same loads where nobody compares.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
import torch
from engine import Child, Engine
from expect import HOLDS, Stock, busy, prove, put_up, value
from forks import Engines
from linked import CHILDREN, MODES, PULL, guard_of, let_go, listen, offered, scripts, spec, verified
from scripts import STAGE, STORE, Load, Script, prefixes
from tiny import prompt

from kvbelay.vllm import checking, reader


def hash_in_a_thread() -> None:
    """As if whatever is hashed were much."""
    reader.BUSY_NBYTES = reader.IDLE_NBYTES = -1


def healthy(engine: Engine, count: int, threaded: bool) -> None:
    """What was offered is loaded, and found to be it."""
    scripts()
    if threaded:
        hash_in_a_thread()
    for number in range(count):
        params = offered(engine, number)
        engine.add(f"r{number}", number, params=params)
        engine.finish(f"r{number}")
        engine.served(f"r{number}", "x", 96)
    engine.right()
    busy(engine, lambda: verified() >= count)
    assert verified(result="same") == count
    assert value("failures_total") == 0
    let_go(engine)


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("which", MODES)
def test_what_was_offered_is_loaded(standing: Engines, which: str, threaded: bool) -> None:
    """Every load is compared and found right, in each mode and with two KV cache groups."""
    prove(standing, which, healthy, HOLDS, spec(), count=3, threaded=threaded)


def idle_steps(engine: Engine) -> None:
    """A request waits for its load, and then computes."""
    scripts(r0=Load(reports=(20,)))
    params = offered(engine, 0)
    metadata, begin = guard_of(engine).metadata, engine.worker.post._reader.begin
    computes: list[bool] = []
    idle: list[bool] = []

    def watched(scheduler_output: Any) -> Any:
        computes.append(bool(scheduler_output.total_num_scheduled_tokens))
        return metadata(scheduler_output)

    guard_of(engine).metadata = watched
    engine.worker.post._reader.begin = lambda **step: (idle.append(step["idle"]), begin(**step))
    engine.add("r0", 0, params=params)
    engine.finish("r0")
    assert idle == [not step for step in computes]
    assert set(idle) == {False, True}
    let_go(engine)


def test_who_waits_has_time(standing: Engines) -> None:
    """The ranks know which steps compute nothing: there is more time to hash in them."""
    prove(standing, "guard", idle_steps, HOLDS, spec())


def flip(number: int, bit: int) -> None:
    """One bit of one layer's KV of the prompt is not what it was."""
    name = list(prefixes(prompt(number)))[1]
    layer = max(layer for prefix, layer in STORE if prefix == name)
    words = STORE[name, layer].view(torch.int32).reshape(-1)
    words[len(words) // 3] ^= 1 << bit


def another(number: int, other: int) -> None:
    """The reference points at the blocks of another prompt."""
    for mine, theirs in zip(prefixes(prompt(number)), prefixes(prompt(other)), strict=True):
        for prefix, layer in list(STORE):
            if prefix == theirs:
                STORE[mine, layer] = STORE[theirs, layer].clone()


def damaged(engine: Engine, how: str, threaded: bool = False) -> str:
    """What child x loads is not what was offered, and it reports success. Returns what was logged."""
    said = listen()
    if threaded:
        hash_in_a_thread()
    load = {"nothing": Load(copy=None, reports=(1,)), "overwritten": Load(copy=0, garbage=(1,), reports=(1,))}
    scripts(r0=load.get(how, Load()))
    params = offered(engine, 0)
    if how == "a-bit":
        flip(0, 30)
    elif how == "the-last-bit":
        flip(0, 0)
    elif how == "another-prompt":
        offered(engine, 1)
        another(0, 1)
    engine.add("r0", 0, params=params)
    engine.finish("r0")
    engine.right()
    assert engine.computed["r0"] == len(prompt(0)) + 7, "it was not computed here"
    busy(engine, lambda: verified() >= 1)
    assert verified(result="different") == 1
    assert value("failures_total", child="x", operation="verify", kind="CorruptData") == 1
    let_go(engine)
    return "\n".join(said)


@pytest.mark.parametrize("which", MODES)
@pytest.mark.parametrize("how", ["nothing", "overwritten", "a-bit", "another-prompt", "the-last-bit"])
def test_damage_is_found(standing: Engines, which: str, how: str) -> None:
    """Whatever else stands in the blocks than what was offered: the request is computed, and the cause is told."""
    verdict = prove(standing, which, damaged, HOLDS, spec(), how=how)
    assert "(x: CorruptData: block 0 of" in verdict.facts or "(x: CorruptData: block 1 of" in verdict.facts


@pytest.mark.parametrize("which", MODES)
def test_a_thread_finds_damage_too(standing: Engines, which: str) -> None:
    """What is too much to be hashed within a step is not loaded until it was."""
    verdict = prove(standing, which, damaged, HOLDS, spec(), how="the-last-bit", threaded=True)
    assert "(x: CorruptData: block " in verdict.facts


def poisoned(engine: Engine) -> None:
    """What child x loads is no number at all; the request that is computed instead gets the same blocks."""
    scripts()
    engine.fill = lambda *_: None  # what was loaded stays in the blocks
    params = offered(engine, 0)
    for prefix in prefixes(prompt(0)):
        for (name, layer), block in list(STORE.items()):
            if name == prefix:
                STORE[name, layer] = torch.full_like(block, float("nan"))
    engine.add("r0", 0, params=params)
    engine.finish("r0")
    engine.right()
    assert engine.computed["r0"] == len(prompt(0)) + 7
    for number in range(2, 10):
        engine.add(f"next{number}", number)
    engine.finish()
    engine.right()
    let_go(engine)


@pytest.mark.parametrize("which", MODES)
def test_what_was_wrong_harms_nobody_later(standing: Engines, which: str) -> None:
    """Blocks of a load that was not what was offered are wiped: behind a request's last token stands what was there
    before, and nought times infinity is no number.
    """
    prove(standing, which, poisoned, HOLDS, msgspec.structs.replace(spec(), blocks=24))


@pytest.mark.parametrize("how", ["nothing", "overwritten", "a-bit", "another-prompt"])
def test_stock_answers_wrongly(standing: Engines, how: str) -> None:
    """The same loads below vLLM's own class give another text, with all signs of success."""
    prove(standing, "stock", damaged, Stock("wrong"), spec(), how=how)


def said_twice(engine: Engine) -> None:
    """Child x says again and again that it has loaded what is not what was offered, before and after it was hashed."""
    scripts(r0=Load(copy=None, reports=tuple(range(1, 100))))
    hash_in_a_thread()
    checking.ANSWER_S = 0.0  # nothing is waited for but what hashes
    params = offered(engine, 0)
    guard, hasher = guard_of(engine), engine.worker.post._reader._hasher
    engine.run(lambda: guard.liaison.links.offers._entries[params["kvbelay"]["request"]].offer is not None)
    digests = hasher.digests

    def slowly(*of: Any) -> Any:
        give_up = time.monotonic() + 20.0
        while len(STAGE.of("x", "said received", "r0")) < 3 or guard.cases["r0"].answer is None:
            assert time.monotonic() < give_up
            time.sleep(0.001)
        return digests(*of)

    hasher.digests = slowly
    engine.add("r0", 0, params=params)
    engine.finish("r0")
    engine.right()
    engine.served("r0", "x", 0)
    busy(engine, lambda: verified(result="different") >= 1)
    let_go(engine)


def test_said_twice(standing: Engines) -> None:
    """While a load is hashed, further words of its end change nothing."""
    prove(standing, "guard", said_twice, HOLDS, spec())


def late(engine: Engine, requires: bool) -> None:
    """The digests come after the load is complete, or never."""
    scripts()
    offers = guard_of(engine).liaison.links.offers
    publish, kept = offers.publish, []
    offers.publish = lambda *args: kept.append(args)
    for number in range(2):
        params = offered(engine, number)
        engine.run(lambda number=number: len(kept) > number)
        engine.add(f"r{number}", number, params=params)
        engine.run(lambda number=number: bool(STAGE.of("x", "said received", f"r{number}")))
        engine.steps(20)
        assert engine.waits(f"r{number}"), "it was not withheld"
        if number == 0:
            publish(*kept[0])
        engine.finish(f"r{number}")
    engine.right()
    engine.served("r0", "x", 96)
    if not requires:
        engine.served("r1", "x", 96)
    else:
        assert engine.computed["r1"] == len(prompt(1)) + 7
    busy(engine, lambda: verified() >= 2)
    assert (verified(result="same"), verified(result="unknown")) == (1, 1)
    let_go(engine)


@pytest.mark.parametrize("verify", ["prefer", "require"])
def test_digests_are_waited_for(standing: Engines, verify: str) -> None:
    """A complete load waits for its digests; without them it is taken, or not, as the option says."""
    prove(standing, "guard", late, HOLDS, spec(verify=verify), requires=verify == "require")


def unverifiable(engine: Engine) -> None:
    """Nobody has digests of what caches hold, of what an engine without a guard offers, of synchronous loads."""
    put_up(x=Script(offer=96, pd=True), y=Script(offer=96))
    engine.add("cached", 0)
    engine.add("stock", 1, params=dict(PULL))
    engine.finish()
    put_up(x=Script(offer=96, pd=True, asynchronous=False), y=Script())
    engine.add("sync", 2, params=dict(PULL))
    engine.finish()
    engine.right()
    for name in ("cached", "stock", "sync"):
        engine.served(name, None)
    busy(engine, lambda: verified(result="refused") >= 2)
    assert (verified(result="refused"), verified("y", result="refused")) == (2, 2)
    assert value("failures_total", child="x", operation="load", kind="UnverifiableLayout") == 2
    assert value("failures_total", child="y") == 0, "a cache that is not asked has not failed"


def test_required_means_required(standing: Engines) -> None:
    """What cannot be compared is not loaded."""
    prove(standing, "guard", unverifiable, HOLDS, spec(verify="require"))


def exempt(engine: Engine) -> None:
    """Child y is exempt."""
    put_up(y=Script(offer=96))
    engine.add("r", 0)
    engine.finish()
    engine.right()
    engine.served("r", "y", 96)


def test_a_child_may_be_exempt(standing: Engines) -> None:
    """A child's own option goes before the guard's."""
    children = (CHILDREN[0], Child(name="y", belay={"verify": "off"}))
    prove(standing, "guard", exempt, HOLDS, msgspec.structs.replace(spec(verify="require"), children=children))
