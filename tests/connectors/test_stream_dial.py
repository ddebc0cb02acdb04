"""Dialling a port: whom it reaches, and what is told of one that has just died."""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Callable
from typing import TypeAlias

import pytest

from kvbelay.errors import PeerLost
from kvbelay.net import sockets
from kvbelay.net.link import Link
from kvbelay.net.sockets import Address, Listener, dial

HOSTS = ["127.0.0.1", "::1"]
Step: TypeAlias = Callable[[socket.socket], object]


@pytest.fixture
def around(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Do something to a dialled socket just before, or just after it connects."""

    def patch(
        *, before: Callable[[socket.socket], object] = bool, after: Callable[[socket.socket], object] = bool
    ) -> None:
        class Watched(socket.socket):
            def connect_ex(self, address: object) -> int:
                before(self)
                code = super().connect_ex(address)  # type: ignore[arg-type]  # as the dialler wrote it
                after(self)
                return code

        monkeypatch.setattr(sockets.socket, "socket", Watched)

    return patch


@pytest.mark.parametrize("host", HOSTS)
def test_a_port_that_connects_to_itself(host: str, around: Callable[..., None]) -> None:
    """It is refused like every port at which nobody listens."""
    listener = Listener(Address(host=host), field="listen")
    free = listener.address
    listener.close()
    around(before=lambda sock: sock.bind(free.target))
    with pytest.raises(PeerLost, match="nobody listens there") as caught:
        dial(free, bool)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


@pytest.mark.parametrize("host", HOSTS)
def test_a_peer_that_dies_as_it_is_reached(host: str, around: Callable[..., None]) -> None:
    """The connection is a broken one, whatever the dialler was about to ask the system of it."""
    listener = Listener(Address(host=host), field="listen")

    def reset(dialled: socket.socket) -> None:
        peer, _ = listener.sock.accept()
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("@ii", 1, 0))
        peer.close()
        poller = select.poll()
        poller.register(dialled, select.POLLIN)
        assert poller.poll(5000)

    around(after=reset)
    link = Link(dial(listener.address, bool), "peer")
    listener.close()
    with pytest.raises(PeerLost, match="broken: Connection reset by peer"):
        link.first_byte(bool)
    link.close()
