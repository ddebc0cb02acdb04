"""Loads are compared with what was offered, and engines hear of each other.

The engine is its own other side: it offers a prompt's KV, and then loads it through child x, over a link to itself.
vLLM's own class shows what comes of the same loads where nobody compares.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from engine import Child, Engine, Spec
from expect import HOLDS, USUAL, Stock, busy, prove, put_up
from forks import Engines
from prometheus_client import REGISTRY
from scripts import STAGE, STORE, Load, Save, Script, prefixes
from tiny import prompt

from kvbelay.errors import ConfigError
from kvbelay.link import served
from kvbelay.link.caller import State
from kvbelay.link.links import Links, told
from kvbelay.link.processes import this_process
from kvbelay.net.endpoint import Endpoint
from kvbelay.vllm import checking, reader
from kvbelay.vllm.checking import _named
from kvbelay.vllm.options import guard_options

LINK: dict[str, Any] = {"verify": "prefer", "link": {"listen": "tcp://127.0.0.1:0"}, "load_s": 5.0}
CHILDREN = (Child(name="x", belay={"role": "pd"}), Child(name="y"))
MODES = ("guard", "guard-async", "guard-hybrid")
PULL = {"do_remote_prefill": True, "remote_engine_id": "p0"}


def spec(**belay: Any) -> Spec:
    return msgspec.structs.replace(USUAL, children=CHILDREN, prefix_caching=False, stats=True, belay={**LINK, **belay})


def value(series: str, **labels: str) -> float:
    """The sum of a series over what has these labels."""
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == f"kvbelay_{series}" and labels.items() <= sample.labels.items()
    )


def listen() -> list[str]:
    """What the guard logs from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.kvbelay").addHandler(handler)
    return said


def scripts(keeps: int = 3000, **loads: Load) -> None:
    """Child x offers what it is asked for, and keeps it until the case lets it go; it loads what it is told."""
    offers = {f"o{number}": Save(holds=True, params=PULL, reports=(keeps,)) for number in range(20)}
    plans = {name: (load,) for name, load in loads.items()}
    put_up(x=Script(offer=96, pd=True, writes_through=True, saves=offers, loads=plans))


def offered(engine: Engine, number: int) -> dict[str, Any]:
    """The prompt's KV is computed and offered; what a router hands on to the other side."""
    engine.add(f"o{number}", number, new=1, params={"do_remote_decode": True})
    engine.finish(f"o{number}")
    params = engine.params[f"o{number}"]
    return params if "remote_engine_id" in params else {**PULL}


def verified(child: str = "x", **labels: str) -> float:
    return value("verified_loads_total", child=child, **labels)


def let_go(engine: Engine) -> None:
    """The other side's leases end."""
    engine.run(lambda: engine.in_use() == 0, steps=4000, pause_s=0.0)


def hash_in_a_thread(engine: Engine) -> None:
    """As if whatever is hashed were much."""
    reader.AT_ONCE_NBYTES = engine.worker.post._reader._left_nbytes = -1


def healthy(engine: Engine, count: int, threaded: bool) -> None:
    """What was offered is loaded, and found to be it."""
    scripts()
    if threaded:
        hash_in_a_thread(engine)
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
        hash_in_a_thread(engine)
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
    hash_in_a_thread(engine)
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


def guard_of(engine: Engine) -> Any:
    return engine.connector.desk


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


def gone(engine: Engine) -> None:
    """What is asked for was never offered, or is kept no longer, or has failed on the other side."""
    scripts()
    wait_for_answers(engine)
    params = offered(engine, 0)
    never = {**params, "kvbelay": {**params["kvbelay"], "request": "nobody"}}
    offers = guard_of(engine).liaison.links.offers
    changes = {
        "r0": lambda: None,
        "r1": lambda: offers.free("o0"),
        "r2": lambda: offers.withdraw("o0", "StoreFull", "the disk is full"),
    }
    for name, change in changes.items():
        change()
        engine.add(name, 0, params=never if name == "r0" else params)
        engine.finish(name)
        engine.served(name, "x", 0)
    engine.right()
    busy(engine, lambda: value("failures_total") >= 3)
    assert value("failures_total", child="x", kind="TicketExpired") == 2
    assert value("failures_total", child="x", kind="PeerFailed") == 1
    let_go(engine)


def wait_for_answers(engine: Engine) -> None:
    """Nothing is looked up before the other engine has answered."""
    desk = guard_of(engine)
    match = desk.match

    def patient(request: Any, computed: int) -> tuple[int | None, bool]:
        case = desk.cases.get(request.request_id)
        if case is not None and case.source is not None and case.answer is None:
            return None, False
        said: tuple[int | None, bool] = match(request, computed)
        return said

    desk.match = patient


@pytest.mark.parametrize("verify", ["off", "prefer"])
def test_what_is_not_there_is_not_loaded(standing: Engines, verify: str) -> None:
    """The other engine's word counts, also where nothing is compared."""
    prove(standing, "guard", gone, HOLDS, spec(verify=verify))


def fails_meanwhile(engine: Engine) -> None:
    """The other side says, while child x loads it, that what it has offered is not to be had; x goes on for a while."""
    scripts(r0=Load(copy=None, reports=(400,)))
    params = offered(engine, 0)
    engine.add("r0", 0, params=params)
    engine.run(lambda: bool(STAGE.of("x", "start_load_kv")) and engine.waits("r0"))
    guard_of(engine).liaison.links.offers.withdraw("o0", "StoreFull", "the disk is full")
    engine.finish("r0", steps=200)
    engine.right()
    engine.served("r0", "x", 0)
    assert engine.held(), "child x may still write"
    busy(engine, lambda: engine.held() == 0)
    assert value("failures_total", child="x", kind="PeerFailed") == 1
    let_go(engine)


@pytest.mark.parametrize("which", MODES)
def test_the_first_cause_comes_from_the_other_side(standing: Engines, which: str) -> None:
    """A load fails at once where the other side says why, and its blocks are held until the child is done."""
    prove(standing, which, fails_meanwhile, HOLDS, spec())


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


def dies(engine: Engine) -> None:
    """The engine that has offered it dies in mid-load, with its workers; child x, who pulls, does not know, and reports
    long after.
    """
    other = Links(Endpoint(listen="tcp://127.0.0.1:0"), engine="prefill")
    other.offers.writers = (msgspec.structs.replace(this_process(), started=1),)
    other.offers.promise("o", 60.0)
    other.offers.publish("o", 110, (), (), "a test")
    params = {**PULL, "kvbelay": told(other.source, "o")}
    scripts(r0=Load(copy=None, reports=(400,)))
    engine.add("r0", 0, params=params)
    engine.run(lambda: bool(STAGE.of("x", "start_load_kv")) and engine.waits("r0"))
    case = guard_of(engine).cases["r0"]
    engine.run(lambda: case.answer is not None)
    other.close()
    engine.finish("r0", steps=300)
    engine.right()
    engine.served("r0", "x", 0)
    assert engine.held(), "child x may still write"
    engine.add("r1", 0, params=params)
    engine.finish("r1")
    engine.served("r1", "x", 0)
    busy(engine, lambda: engine.held() == 0)
    assert STAGE.of("x", "said received", "r0"), "the child has not ended it"
    assert value("failures_total", child="x", operation="load", kind="PeerLost") == 2


@pytest.mark.parametrize("which", MODES)
def test_a_death_is_heard_at_once(standing: Engines, which: str) -> None:
    """The decision does not wait for the child's report, the quarantine does; and nobody loads from the dead."""
    prove(standing, which, dies, HOLDS, spec())


def dead_writer(engine: Engine) -> None:
    """The same where only the other engine's worker writes into the blocks, which dies later than the rest of it; and
    child x never reports.
    """
    guard_of(engine).staff["x"].pushed = True
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    other = Links(Endpoint(listen="tcp://127.0.0.1:0"), engine="prefill")
    started = int(Path(f"/proc/{worker.pid}/stat").read_text().rpartition(") ")[2].split()[19])
    other.offers.writers = (msgspec.structs.replace(this_process(), pid=worker.pid, started=started),)
    other.offers.promise("o", 60.0)
    other.offers.publish("o", 110, (), (), "a test")
    scripts()
    STAGE.frozen.add(("x", "r0"))
    engine.add("r0", 0, params={**PULL, "kvbelay": told(other.source, "o")})
    engine.run(lambda: bool(STAGE.of("x", "start_load_kv")) and engine.waits("r0"))
    case = guard_of(engine).cases["r0"]
    engine.run(lambda: case.answer is not None)
    other.close()
    engine.finish("r0", steps=300)
    engine.right()
    engine.served("r0", "x", 0)
    engine.add("r1", 1, new=100)
    engine.finish("r1")
    assert engine.held(), "the worker may still write"
    worker.kill()
    worker.wait()
    busy(engine, lambda: engine.held() == 0)
    assert not STAGE.of("x", "said received", "r0")


@pytest.mark.parametrize("which", MODES)
def test_a_dead_writer_ends_a_quarantine(standing: Engines, which: str) -> None:
    """Nobody else could write into these blocks."""
    prove(standing, which, dead_writer, HOLDS, spec())


def given_up(engine: Engine, how: str) -> None:
    """Nobody loads what child x keeps for another engine."""
    scripts(keeps=600)
    served.RETRY_S = 0.0
    params = offered(engine, 0)
    other = Links(Endpoint(listen="tcp://127.0.0.1:0"), engine="decode")
    source = guard_of(engine).liaison.links.source
    other.want(source, params["kvbelay"]["request"])
    engine.run(lambda: bool(other.take()))
    if how == "ended":
        other.ended(source, params["kvbelay"]["request"], "CorruptData", "block 0 is wrong")
    elif how == "died":
        other.close()
    engine.run(lambda: engine.in_use() == 0)
    assert not STAGE.of("x", "said sent"), "it was kept until the lease ended"
    busy(engine, lambda: value("failures_total", operation="remote load") >= 1)
    other.close()
    busy(engine, lambda: bool(STAGE.of("x", "said sent", "o0")))


@pytest.mark.parametrize("how", ["ended", "died"])
def test_what_nobody_loads_is_not_kept(standing: Engines, how: str) -> None:
    """Blocks are free when the other side has given up, or is dead; the child's own word comes late."""
    prove(standing, "guard", given_up, HOLDS, spec(), how=how)


OURS: dict[str, Any] = {
    "version": 1,
    "endpoint": "tcp://127.0.0.1:1",
    "incarnation": 1,
    "host": "",
    "process": "",
    "request": "r",
}


@pytest.mark.parametrize(
    "params",
    [
        5,
        {"version": 1},
        OURS | {"endpoint": 5},
        OURS | {"incarnation": -1},
        OURS | {"endpoint": "x" * 600},
        OURS | {"process": 5},
        OURS | {"endpoint": "unix:///run/secret.sock"},
        OURS | {"endpoint": "tcp://203.0.113.7:80"},
        OURS | {"version": 99},
    ],
)
def test_what_a_client_may_write(params: Any) -> None:
    """A link's address comes with a request: what has the wrong shape, or leads where nobody may go, is not called."""
    links = Links(Endpoint(listen="tcp://127.0.0.1:0"), engine="decode")
    try:
        named = _named({"kvbelay": params})
        if named is not None:
            links.want(*named)
            assert links.state(named[0])[0] is State.DOWN
    finally:
        links.close()


def test_options() -> None:
    """Digests come over the link: without one the options contradict each other."""
    with pytest.raises(ConfigError, match="link"):
        guard_options({"kvbelay": {"verify": "prefer"}})
