"""Who is let in: with a token, with certificates, with neither; and what those hear who differ."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from kvbelay.link.caller import State
from kvbelay.link.events import Died
from kvbelay.link.messages import Offer

KINDS = ["plain", "token", "tls"]


def test_offers(rig: Any, secured: dict[str, Any]) -> None:
    """Engines that prove themselves talk like those that need not."""
    prefill, decode = rig.engine("prefill", **secured), rig.engine("decode", **secured)
    big = (tuple(range(100_000)),)
    for name, digests in (("r", ((1, 2),)), ("big", big)):
        prefill.offer(name, digests)
        decode.links.want(prefill.source, name)
    assert isinstance(decode.answer("r"), Offer)
    assert len(decode.answer("big").digests[0]) == 800_000


@pytest.mark.usefixtures("patient")
def test_deaths(rig: Any, soon: Any, secured: dict[str, Any]) -> None:
    """Proofs change nothing of what death looks like, on either side."""
    one, two, three = rig.engine("one", **secured), rig.other("two", **secured), rig.other("three", **secured)
    two.offer("r")
    one.links.want(two.source, "r")
    one.answer("r")
    one.offer("mine")
    three.say("want", one.source, "mine")
    soon(lambda: three.events("Offer"))
    two.kill()
    three.kill()
    assert one.event(Died).source == two.source
    soon(lambda: one.freed() == [("mine", "three")])


def test_frozen(rig: Any, soon: Any, secured: dict[str, Any], freeze: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that stands still in the middle of a handshake is not dead."""
    prefill, decode = rig.other(**secured), rig.engine(**secured)
    prefill.offer("r")
    freeze(prefill.process.pid)
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 0.2)
    decode.links.want(prefill.source, "r")
    soon(lambda: decode.links.state(prefill.source)[0] is State.DOWN)
    monkeypatch.setattr("kvbelay.link.line.PATIENCE_S", 1e6)
    prefill.signal(signal.SIGCONT)
    assert isinstance(decode.answer("r"), Offer)
    assert decode.events(Died) == []


@pytest.mark.parametrize("theirs", KINDS)
@pytest.mark.parametrize("ours", KINDS)
def test_kinds_that_differ(rig: Any, soon: Any, kinds: Any, ours: str, theirs: str) -> None:
    """Whoever comes with another proof is told so in words, gets nothing, and takes nobody for dead."""
    prefill, decode = rig.engine(**kinds[theirs]), rig.engine(**kinds[ours])
    prefill.offer("r")
    decode.links.want(prefill.source, "r")
    if ours == theirs:
        assert isinstance(decode.answer("r"), Offer)
        return
    soon(lambda: decode.links.state(prefill.source)[0] is State.DOWN)
    cause = decode.links.state(prefill.source)[1]
    assert "token" in cause or "tls" in cause.lower()
    assert decode.all() == []
    assert prefill.claims("r") == set()


def test_another_token(rig: Any, soon: Any, token_file: str, tmp_path: Any) -> None:
    """Whoever has another token is not let in, and hears why."""
    other = tmp_path / "other"
    other.write_bytes(b"o" * 64)
    other.chmod(0o600)
    prefill, decode = rig.engine(token_file=token_file), rig.engine(token_file=str(other))
    prefill.offer("r")
    decode.links.want(prefill.source, "r")
    soon(lambda: decode.links.state(prefill.source)[0] is State.DOWN)
    assert "does not prove that it knows the token" in decode.links.state(prefill.source)[1]
    assert prefill.claims("r") == set()


def test_a_key_that_is_used_up(rig: Any, soon: Any, kinds: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A TLS connection that has carried as many records as its key is good for is replaced, and nothing is lost."""
    prefill, decode = rig.engine(**kinds["tls"]), rig.engine(**kinds["tls"])
    prefill.offer("first")
    decode.links.want(prefill.source, "first")
    decode.answer("first")
    line = decode.links._callers[prefill.source]._line
    monkeypatch.setattr("kvbelay.net.tls.MAX_RECORDS", line._link._steps + 1)
    prefill.offer("second")
    decode.links.want(prefill.source, "second")
    soon(lambda: decode.links._callers[prefill.source]._line not in {line, None})
    monkeypatch.undo()
    assert isinstance(decode.answer("second"), Offer)
    assert decode.events(Died) == []
