"""Engines in processes of their own: killed, frozen, restarted, cut off. No time-out tells any of it."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from kvbelay.link import caller
from kvbelay.link.caller import State
from kvbelay.link.events import Died, Freed
from kvbelay.link.messages import Offer

pytestmark = pytest.mark.usefixtures("patient")


@pytest.mark.parametrize("near", [True, False])
def test_a_source_that_is_killed(rig: Any, near: bool) -> None:
    """Its death is told once, for all that was wanted of it, and to whoever still wants something."""
    prefill, decode = rig.other(), rig.engine()
    source = prefill.source if near else prefill.source._replace(process="")
    for request in ("one", "two"):
        prefill.offer(request)
        decode.links.want(source, request)
        assert isinstance(decode.answer(request), Offer)
    prefill.kill()
    assert decode.event(Died).source == source
    assert decode.links.state(source) == (State.DEAD, decode.event(Died).cause)
    assert near or "Connection refused" in decode.event(Died).cause
    decode.links.want(source, "three")
    assert len(decode.events(Died)) == 2


def test_a_source_that_is_killed_while_its_connections_stay(rig: Any) -> None:
    """A process that is at its end is dead, whoever still holds what it had open: a large one holds it itself, until
    the kernel has taken back its memory.
    """
    prefill, decode = rig.other(), rig.engine()
    prefill.offer("r")
    decode.links.want(prefill.source, "r")
    decode.answer("r")
    heir = prefill.say("fork")
    try:
        prefill.kill()
        assert "its process" in decode.event(Died).cause
        decode.links.ended(prefill.source, "r")
        late = rig.engine()
        late.links.want(prefill.source, "r")
        assert "its process" in late.event(Died).cause
    finally:
        os.kill(heir, signal.SIGKILL)


def test_a_far_source_that_is_killed(rig: Any) -> None:
    """One that had answered is known to be dead by its host's refusal."""
    prefill, decode = rig.other(), rig.engine()
    prefill.offer("r")
    far = prefill.source._replace(host="", process="")
    decode.links.want(far, "r")
    decode.answer("r")
    prefill.kill()
    assert decode.event(Died).source == far


def test_dead_before_it_was_called(rig: Any) -> None:
    """A source of this host that is dead already is known to be at the first call."""
    prefill, decode = rig.other(), rig.engine()
    prefill.kill()
    decode.links.want(prefill.source, "r")
    assert decode.event(Died).source == prefill.source


def test_a_far_source_that_never_answered(rig: Any, soon: Any) -> None:
    """A refusal by a host that is not known to be the source's says nothing of its life."""
    prefill, decode = rig.other(), rig.engine()
    prefill.kill()
    far = prefill.source._replace(host="", process="")
    decode.links.want(far, "r")
    soon(lambda: decode.links.state(far)[0] is State.DOWN)
    assert "Connection refused" in decode.links.state(far)[1]
    assert decode.all() == []


@pytest.mark.parametrize("state", [State.CALLING, State.UP])
def test_killed_in_a_moment(rig: Any, soon: Any, state: State) -> None:
    """It does not matter how short the connection was, or how far its greeting had come."""
    prefill, decode = rig.other(), rig.engine()
    decode.links.want(prefill.source, "r")
    soon(lambda: state is State.CALLING or decode.links.state(prefill.source)[0] is state)
    prefill.kill()
    assert decode.event(Died).source == prefill.source


def test_restarted_at_the_same_port(rig: Any) -> None:
    """Whoever listens there now is another engine: the old one is dead, and the new one is asked as itself."""
    first, decode = rig.other(), rig.engine()
    first.offer("r")
    decode.links.want(first.source, "r")
    decode.answer("r")
    first.kill()
    second = rig.other(listen=first.source.endpoint)
    assert decode.event(Died).source == first.source
    assert second.source.endpoint == first.source.endpoint
    second.offer("r2")
    decode.links.want(second.source, "r2")
    assert isinstance(decode.answer("r2"), Offer)


@pytest.mark.parametrize("near", [True, False])
def test_a_stale_reference(rig: Any, near: bool) -> None:
    """A reference to an engine that was restarted before anybody called it is one to a dead engine."""
    first, decode = rig.other(), rig.engine()
    first.kill()
    rig.other(listen=first.source.endpoint)
    decode.links.want(first.source if near else first.source._replace(process=""), "r")
    assert ("its process" if near else "another incarnation answers") in decode.event(Died).cause


def test_a_frozen_source_lives(rig: Any, soon: Any, freeze: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still is not dead, whether it is connected or called anew; when it goes on, it answers."""
    prefill, decode = rig.other(), rig.engine()
    prefill.offer("first")
    decode.links.want(prefill.source, "first")
    decode.answer("first")
    prefill.offer("second")
    freeze(prefill.process.pid)
    decode.links.want(prefill.source, "second")
    late = rig.engine("late")
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 0.2)
    monkeypatch.setattr(caller, "AGAIN_S", 0.01)
    late.links.want(prefill.source, "second")
    soon(lambda: late.links.state(prefill.source)[0] is State.DOWN)
    assert "kept this side waiting" in late.links.state(prefill.source)[1]
    assert not late.events(Died) + decode.events(Died)
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 1e6)
    prefill.signal(signal.SIGCONT)
    assert isinstance(decode.answer("second"), Offer)
    assert isinstance(late.answer("second"), Offer)


def test_cut_off_while_it_lives(rig: Any, soon: Any) -> None:
    """The end of a connection is no death: what is wanted is asked again, and what ended meanwhile is told."""
    prefill, decode = rig.engine("prefill"), rig.other("decode")
    for request in ("kept", "over"):
        prefill.offer(request)
        decode.say("want", prefill.source, request)
    soon(lambda: len(decode.events("Offer")) == 2)
    prefill.links.offers.promise("later", 60.0)
    decode.say("want", prefill.source, "later")
    soon(lambda: prefill.claims("later"))
    decode.say("ended", prefill.source, "over", "Cancelled", "")
    prefill.cut()
    soon(lambda: sum(event["request"] == "kept" for event in decode.events("Offer")) == 2)
    prefill.links.offers.publish("later", 16, (), (), "")
    soon(lambda: any(event["request"] == "later" for event in decode.events("Offer")))
    assert decode.events("Died") == []
    assert prefill.freed() in ([], [("over", "decode")])
    decode.say("ended", prefill.source, "kept", "Cancelled", "no more")
    soon(lambda: ("kept", "decode") in prefill.freed())


def test_who_was_cut_off_still_loads(rig: Any, soon: Any, freeze: Any) -> None:
    """While one engine's connection is down, the end of another one's load does not free what both load."""
    prefill = rig.engine("prefill")
    prefill.offer("r")
    frozen, other = rig.other("frozen"), rig.other("other")
    for engine in (frozen, other):
        engine.say("want", prefill.source, "r")
    soon(lambda: len(prefill.claims("r")) == 2)
    soon(lambda: frozen.events("Offer"))
    freeze(frozen.process.pid)
    prefill.cut()
    soon(lambda: len(other.events("Offer")) == 2)
    other.say("ended", prefill.source, "r", "Cancelled", "")
    soon(lambda: prefill.claims("r") == {frozen.source.incarnation})
    assert prefill.freed() == []
    frozen.kill()
    soon(lambda: prefill.freed() == [("r", "frozen")])


@pytest.mark.parametrize("near", [True, False])
def test_a_reader_that_is_killed(rig: Any, soon: Any, near: bool) -> None:
    """What it alone was to load is free when it is dead, on this host or, once it was called, on another one."""
    prefill = rig.engine("prefill")
    for request in ("shared", "alone"):
        prefill.offer(request)
    (staying,) = rig.linked(prefill, "shared", "staying")
    killed = rig.other("killed", **({} if near else {"advertise": "tcp://127.0.0.1:0"}))
    for count, request in enumerate(("shared", "alone"), 1):
        killed.say("want", prefill.source, request)
        soon(lambda count=count: len(killed.events("Offer")) == count)
    killed.kill()
    freed = prefill.event(Freed)
    assert freed[:3] == ("alone", "killed", "PeerLost")
    assert prefill.claims("shared") == {staying.source.incarnation}
    assert staying.events(Died) == []


def test_a_frozen_reader_still_loads(rig: Any, soon: Any, freeze: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still may go on, so what it loads is not free, even where its connection ends."""
    prefill, decode = rig.engine("prefill"), rig.other("decode")
    prefill.offer("r")
    decode.say("want", prefill.source, "r")
    soon(lambda: decode.events("Offer"))
    freeze(decode.process.pid)
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 0.2)
    prefill.cut()
    soon(lambda: not len(prefill.links._clients))
    assert prefill.freed() == []
    assert len(prefill.claims("r")) == 1
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 1e6)
    decode.signal(signal.SIGCONT)
    soon(lambda: len(decode.events("Offer")) == 2)
    decode.kill()
    soon(prefill.freed)
