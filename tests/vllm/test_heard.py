"""What engines hear of each other: what is gone, who is dead, what nobody wants, and why."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from engine import Engine
from expect import HOLDS, busy, prove, value
from forks import Engines
from linked import MODES, PULL, guard_of, let_go, offered, scripts, spec
from scripts import STAGE, Load

from kvbelay.errors import ConfigError
from kvbelay.link import served
from kvbelay.link.caller import State
from kvbelay.link.links import Links, told
from kvbelay.link.processes import this_process
from kvbelay.net.endpoint import Endpoint
from kvbelay.vllm.checking import _named
from kvbelay.vllm.options import guard_options


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


def dies_in_mid_load(engine: Engine, other: Links, params: dict[str, Any]) -> None:
    """Another engine, of whose offer child x loads request r0; which is computed here then."""
    engine.add("r0", 0, params=params)
    engine.run(lambda: bool(STAGE.of("x", "start_load_kv")) and engine.waits("r0"))
    case = guard_of(engine).cases["r0"]
    engine.run(lambda: case.answer is not None)
    other.close()
    engine.finish("r0", steps=300)
    engine.right()
    engine.served("r0", "x", 0)


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
    dies_in_mid_load(engine, other, params)
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
    dies_in_mid_load(engine, other, {**PULL, "kvbelay": told(other.source, "o")})
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
