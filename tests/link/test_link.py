"""Two engines and more that talk about offers: what is answered, when, and to whom."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from kvbelay.errors import ConfigError
from kvbelay.link.caller import State
from kvbelay.link.events import Source, Told
from kvbelay.link.links import Links, told
from kvbelay.link.messages import MAX_NAME, VERSION, Gone, Offer, unpacked
from kvbelay.net.endpoint import Endpoint
from kvbelay.net.frames import MAX_TEXT

TOP = (1 << 64) - 1


def test_an_offer(rig: Any) -> None:
    """What was published arrives as it was: digests, sizes, and what is left of the lease."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.links.offers.promise("r", 60.0)
    prefill.links.offers.publish("r", 40, ("half", "whole"), ((1, TOP, 0), (7,)), "")
    decode.links.want(prefill.source, "r")
    answer = decode.answer("r")
    assert [list(unpacked(words)) for words in answer.digests] == [[1, TOP, 0], [7]]
    assert (answer.request, answer.tokens, answer.forms, answer.unverified) == ("r", 40, ("half", "whole"), "")
    assert 0 < answer.lease_s <= 60
    assert decode.links.state(prefill.source)[0] is State.UP
    assert [event.source for event in decode.events(Told)] == [prefill.source]


def test_asked_before_it_is_published(rig: Any, soon: Any) -> None:
    """Who asks too early is answered when there is something to say, once."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.links.offers.promise("r", 60.0)
    prefill.offer("other")
    decode.links.want(prefill.source, "r")
    soon(lambda: prefill.claims("r"))
    decode.links.want(prefill.source, "other")
    decode.answer("other")
    assert decode.answers("r") == []
    prefill.links.offers.publish("r", 16, (), (), "nobody knows its layout")
    assert decode.answer("r").unverified == "nobody knows its layout"
    assert len(decode.answers("r")) == 1


def test_what_was_never_offered(rig: Any) -> None:
    """What was not offered, and what no lease keeps any more, is gone."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer("old", lease_s=0.0)
    for request in ("none", "old"):
        decode.links.want(prefill.source, request)
        assert decode.answer(request) == Gone(request)


def test_withdrawn(rig: Any, soon: Any) -> None:
    """Who was told of an offer, and who asks later, hears that it failed and why."""
    prefill = rig.engine("prefill")
    prefill.offer("r")
    (decode,) = rig.linked(prefill, "r", "decode")
    prefill.links.offers.withdraw("r", "CorruptData", "x" * 1000 + "\udc80")
    late = rig.engine("late")
    late.links.want(prefill.source, "r")
    gone = Gone("r", "CorruptData", "x" * MAX_TEXT)
    assert late.answer("r") == gone
    soon(lambda: decode.answers("r")[1:] == [gone])


def test_freed_when_the_last_one_has_gone(rig: Any, soon: Any) -> None:
    """The end of one engine's load frees nothing while another one loads; the last one's does, with its cause."""
    prefill = rig.engine("prefill")
    prefill.offer("r")
    first, second = rig.linked(prefill, "r", "first", "second")
    first.links.ended(prefill.source, "r", "ShortTransfer", "half of it")
    soon(lambda: len(prefill.claims("r")) == 1)
    assert prefill.freed() == []
    second.links.ended(prefill.source, "r", "CorruptData", "y" * 1000 + "\ud800")
    soon(prefill.freed)
    ((request, engine, kind, cause),) = prefill.all()
    assert (request, engine, kind, cause) == ("r", "second", "CorruptData", "y" * MAX_TEXT)


def test_a_good_end_frees_nothing(rig: Any, soon: Any) -> None:
    """The connector has told its other side itself; and what was freed is not freed again."""
    prefill = rig.engine("prefill")
    for request in ("good", "freed"):
        prefill.offer(request)
    (decode,) = rig.linked(prefill, "good", "decode")
    decode.links.want(prefill.source, "freed")
    decode.answer("freed")
    prefill.links.offers.free("freed")
    decode.links.ended(prefill.source, "good")
    decode.links.ended(prefill.source, "freed", "Cancelled", "")
    decode.links.ended(prefill.source, "never wanted", "Cancelled", "")
    soon(lambda: not prefill.claims("good") | prefill.claims("freed"))
    assert prefill.all() == []


def test_free_ends_the_loads_and_not_the_comparison(rig: Any) -> None:
    """What was freed can be compared, and no longer be loaded."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer("r")
    prefill.links.offers.free("r")
    decode.links.want(prefill.source, "r")
    answer = decode.answer("r")
    assert answer.lease_s == 0
    assert answer.digests


@pytest.mark.parametrize("request_id", ["x" * (MAX_NAME + 1), "lone \ud800"])
def test_names_that_cannot_be_said(rig: Any, request_id: str) -> None:
    """A client's odd request is answered here, and costs the link nothing."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer(request_id)
    prefill.offer("r")
    decode.links.want(prefill.source, request_id)
    decode.links.ended(prefill.source, request_id, "Cancelled", "")
    assert decode.answer(request_id) == Gone(request_id)
    decode.links.want(prefill.source, "r")
    assert isinstance(decode.answer("r"), Offer)


def test_the_longest_offer(rig: Any) -> None:
    """As many digests as are told fit into one message, whatever the groups; more of them are told as none."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    groups = [list(range(1_792))] * 64
    prefill.links.offers.promise("x" * MAX_NAME, 60.0)
    prefill.links.offers.publish("x" * MAX_NAME, 1 << 20, ["\U0010ffff" * 1000] * 64, groups, "")
    prefill.offer("more", tuple(map(tuple, [*groups[1:], list(range(1_793))])))
    prefill.offer("groups", ((1,),) * 65)
    for request in ("x" * MAX_NAME, "more", "groups"):
        decode.links.want(prefill.source, request)
    assert [len(words) for words in decode.answer("x" * MAX_NAME).digests] == [14_336] * 64
    for request in ("more", "groups"):
        assert decode.answer(request).digests == ()
        assert decode.answer(request).unverified == "it has more blocks than are told"


def test_taken_while_others_hear(rig: Any) -> None:
    """Nothing is lost or told twice while one thread takes, others ask, and many answers arrive."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    names = [f"r{index}" for index in range(400)]
    for name in names:
        prefill.offer(name)
    askers = [
        threading.Thread(target=lambda part=part: [decode.links.want(prefill.source, name) for name in part])
        for part in (names[:200], names[200:])
    ]
    for asker in askers:
        asker.start()
    for name in names:
        decode.answer(name)
    for asker in askers:
        asker.join()
    assert sorted(event.message.request for event in decode.events(Told)) == sorted(names)


def test_an_engine_may_load_its_own(rig: Any, soon: Any) -> None:
    """A request that comes back to where its prompt was computed is answered like any other."""
    engine = rig.engine()
    engine.offer("r")
    engine.links.want(engine.source, "r")
    assert isinstance(engine.answer("r"), Offer)
    engine.links.ended(engine.source, "r", "Cancelled", "")
    soon(engine.freed)


def test_both_ways(rig: Any) -> None:
    """Two engines that load from each other have a link each way, and neither calls the other without end."""
    ones = [rig.engine(name) for name in ("one", "two")]
    for engine in ones:
        engine.offer("r")
    for engine, other in (ones, ones[::-1]):
        engine.links.want(other.far, "r")
    for engine in ones:
        assert isinstance(engine.answer("r"), Offer)
        engine.cut()
    for engine, other in (ones, ones[::-1]):
        engine.offer("again")
        other.links.want(engine.far, "again")
        assert isinstance(other.answer("again"), Offer)
        assert len(engine.links._clients) <= 3


def test_what_is_told_with_an_offer(rig: Any) -> None:
    """Plain values, with all that `want` needs."""
    source = rig.engine().source
    values = told(source, "r")
    assert values == {**source._asdict(), "version": VERSION, "request": "r"}
    assert all(type(value) in {str, int} for value in values.values())
    assert source.endpoint.startswith("tcp://127.0.0.1:")
    assert source.host


@pytest.mark.parametrize(
    ("listen", "text"),
    [
        (None, "listen: the link has to listen"),
        ("unix://{tmp}/socket", "listen: unix:///.*/socket is a unix socket, and no other engine would dial it"),
        ("tcp://192.0.2.1:0", "listen: tcp://192.0.2.1:0 is not on this host's loopback"),
        ("tcp://0.0.0.0:0", "listen: tcp://0.0.0.0:0 is not on this host's loopback"),
    ],
)
def test_where_it_cannot_listen(tmp_path: Path, listen: str | None, text: str) -> None:
    """An address that others cannot call, or that demands a proof, is refused at the start, and leaves nothing."""
    with pytest.raises(ConfigError, match=text):
        Links(Endpoint(listen=listen and listen.format(tmp=tmp_path)), engine="here")
    assert list(tmp_path.iterdir()) == []


def test_closed(rig: Any) -> None:
    """What is asked of closed links does nothing, and closing them again neither."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer("r")
    decode.links.close()
    decode.links.want(prefill.source, "r")
    decode.links.ended(prefill.source, "r")
    decode.links.close()
    assert decode.links.state(prefill.source)[0] is State.DOWN
    assert decode.links.take() == []
    assert decode.links.state(Source("tcp://127.0.0.1:1", 1))[0] is State.DOWN
