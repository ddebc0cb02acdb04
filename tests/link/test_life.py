"""What proves a death and what does not, and who is not called at all."""

from __future__ import annotations

import logging
import socket
import threading
from typing import Any

import msgspec
import pytest

from kvbelay.errors import AuthenticationFailed, ConfigError, DeadlineExceeded, PeerFailed, PeerLost, PeerRestarted
from kvbelay.link import links as module
from kvbelay.link.caller import State
from kvbelay.link.events import Died, Source, this_host
from kvbelay.link.life import Life, has_died, life_of
from kvbelay.link.messages import MAX_NAME, VERSION, Hello, Offer
from kvbelay.net.auth import Trust
from kvbelay.net.sockets import Address
from kvbelay.net.token import SharedToken

LOOPBACK, ELSEWHERE = Address(host="127.0.0.1", port=7000), Address(host="192.0.2.1", port=7000)


def hello(incarnation: int) -> Hello:
    return Hello(VERSION, "peer", incarnation, "")


def lost(cause: OSError) -> PeerLost:
    error = PeerLost("lost")
    error.__cause__ = cause
    return error


REFUSED, RESTARTED = lost(ConnectionRefusedError()), PeerRestarted("another one")
SAY_NOTHING = [
    PeerLost("closed the connection"),
    lost(ConnectionResetError()),
    lost(TimeoutError()),
    lost(OSError(113, "No route to host")),
    lost(FileNotFoundError()),
    DeadlineExceeded("late"),
    PeerFailed("busy"),
    AuthenticationFailed("no"),
    OSError(24, "Too many open files"),
    ConnectionRefusedError(),
]


@pytest.mark.parametrize("address", [LOOPBACK, ELSEWHERE])
@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("met", [True, False])
def test_proofs(address: Address, near: bool, met: bool) -> None:
    """A refusal counts where it comes from the host on which the engine ran; another life counts where the address
    cannot be somebody else's; nothing else counts.
    """
    life = Life(address, 7, near=near)
    if met:
        life.meet(hello(7))
    assert life.ended(REFUSED) == (near or met)
    assert life.ended(RESTARTED) == (near or met or address is ELSEWHERE)
    assert not any(life.ended(error) for error in SAY_NOTHING)
    with pytest.raises(PeerRestarted, match=r"another incarnation answers at tcp://"):
        life.meet(hello(8))
    assert life.known == (near or met)


NOT_CALLED = {
    "a unix socket": ("unix:///run/kvbelay", "", "is a unix socket"),
    "another host's loopback": ("tcp://127.0.0.1:7000", "another", "is the loopback of another host"),
    "beyond loopback, without a proof": ("tcp://192.0.2.1:7000", "", "is not on this host's loopback"),
    "no address": ("http://prefill:7000", "", "is not an address"),
    "a name": ("tcp://localhost:7000", "", "is not an address"),
    "nothing": ("", "", "is not an address"),
    "a wildcard": ("tcp://0.0.0.0:7000", "", "not on this host's loopback"),
    "loopback in disguise": ("tcp://[::ffff:127.0.0.1]:7000", "", "is not an address"),
    "a long one": ("tcp://" + "1" * MAX_NAME, "", "an address of 518 characters"),
}


@pytest.mark.parametrize("case", NOT_CALLED)
def test_who_is_not_called(rig: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    """An endpoint comes with a request: what it must not name is not dialled, and told to the operator once."""
    monkeypatch.setattr("kvbelay.link.line.dial", lambda *_: pytest.fail("it was dialled"))
    endpoint, host, text = NOT_CALLED[case]
    decode, source = rig.engine(), Source(endpoint, 7, host)
    for _ in range(3):
        decode.links.want(source, "r")
    decode.links.ended(source, "r")
    assert decode.links.state(source)[0] is State.DOWN
    assert decode.all() == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert text in record.getMessage()
    with pytest.raises(ConfigError):
        life_of(endpoint, 7, host, ours=this_host(), trust=Trust())


def test_beyond_loopback_with_a_proof() -> None:
    """A token or TLS lets endpoints be anywhere, but nowhere that nobody can dial."""
    trust = SharedToken(b"t" * 32)
    assert life_of("tcp://192.0.2.1:7000", 7, "another", ours="here", trust=trust).address == ELSEWHERE
    assert life_of("tcp://127.0.0.1:7000", 7, "", ours="here", trust=trust).address == LOOPBACK
    for endpoint in ("tcp://0.0.0.0:7000", "unix:///run/kvbelay"):
        with pytest.raises(ConfigError):
            life_of(endpoint, 7, "", ours="here", trust=trust)


def test_another_engine_at_a_loopback(rig: Any, soon: Any) -> None:
    """Where nobody knows on which host an engine is, another one at the same loopback address is no proof."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    unknown = Source(prefill.source.endpoint, 7)
    decode.links.want(unknown, "r")
    soon(lambda: decode.links.state(unknown)[0] is State.DOWN)
    assert "another incarnation answers" in decode.links.state(unknown)[1]
    assert decode.all() == []


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("host", [True, False])
def test_another_life_at_the_same_address(rig: Any, host: bool) -> None:
    """One that was restarted so fast that nobody saw it down is dead all the same."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer("r")
    source = prefill.source if host else prefill.far
    decode.links.want(source, "r")
    assert isinstance(decode.answer("r"), Offer)
    prefill.links._hello = msgspec.structs.replace(prefill.links._hello, incarnation=7)
    prefill.cut()
    assert decode.event(Died).source == source


def test_what_listens_elsewhere_than_it_says(rig: Any, soon: Any) -> None:
    """A wrong `advertise` makes nobody dead: such an engine does not say on which host it is."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    prefill, decode = rig.engine("prefill", advertise=wrong), rig.engine("decode")
    assert prefill.source.endpoint == wrong
    decode.links.want(prefill.source, "r")
    soon(lambda: decode.links.state(prefill.source)[0] is State.DOWN)
    assert decode.all() == []


def test_a_reader_that_listens_elsewhere_than_it_says(rig: Any, soon: Any) -> None:
    """What a reader with a wrong `advertise` loads is not free when its connection ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        wrong = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
    prefill = rig.engine("prefill")
    prefill.offer("r")
    (decode,) = rig.linked(prefill, "r", "decode", advertise=wrong)
    links = list(prefill.links._clients._known)
    prefill.cut()
    soon(lambda: not {*links} & {*prefill.links._clients._known})
    assert prefill.freed() == []
    assert prefill.claims("r") == {decode.source.incarnation}


def test_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same for a while, no secret of the system's, and unknown where the system does not tell."""
    assert this_host() == this_host() != ""
    assert len(this_host()) == 16
    monkeypatch.setattr("pathlib.Path.read_bytes", lambda _: (_ for _ in ()).throw(PermissionError()))
    assert this_host() == ""


def test_closing_ends_the_search() -> None:
    """Whoever is asked whether he lives, and says nothing, holds up nobody that closes."""
    closed = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        life = Life(Address(host="127.0.0.1", port=silent.getsockname()[1]), 7, near=True)
        timer = threading.Timer(0.1, closed.set)
        timer.start()
        assert not has_died(life, Trust(), hello(1), closed)
        timer.join()


def test_no_descriptor_to_spare(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that has run out of descriptors takes nobody for dead, and calls again."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer("r")
    monkeypatch.setattr(module.Caller, "_serve", _fails_once(module.Caller._serve))
    decode.links.want(prefill.source, "r")
    assert isinstance(decode.answer("r"), Offer)
    assert decode.events(Died) == []


def test_no_thread_to_spare(rig: Any, caplog: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system gives no thread, a source cannot be called for now, and is later."""
    prefill, decode = rig.engine("prefill"), rig.engine("decode")
    prefill.offer("r")
    with monkeypatch.context() as full:
        full.setattr("kvbelay.link.links.Caller", _refuse)
        decode.links.want(prefill.source, "r")
    assert decode.links.state(prefill.source)[0] is State.DOWN
    assert "can't start new thread" in caplog.text
    decode.links.want(prefill.source, "r")
    assert isinstance(decode.answer("r"), Offer)


def _refuse(*_: Any, **__: Any) -> None:
    raise RuntimeError("can't start new thread")


def _fails_once(real: Any) -> Any:
    left = [OSError(24, "Too many open files")]

    def fails(*arguments: Any) -> None:
        if left:
            raise left.pop()
        real(*arguments)

    return fails
