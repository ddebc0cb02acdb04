"""Peers with proofs, in processes of their own: killed and frozen while their batches are read."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from kvbelay.errors import DeadlineExceeded, PeerLost
from kvbelay.runtime.deadline import Until

SHAPE = [(512, 64 * 1024)]
"""32 MiB: far more than the sockets' buffers hold, so that a peer struck early still owes most of it."""
MIDWAY = 30
"""Asked so often, a get has two connections whose handshakes are over, and its batch has begun to land."""


def content_of(tcp: Any) -> bytes:
    content: bytes = tcp.part(SHAPE).memory.fill(1)
    return content


def test_peer_killed_midway(tcp: Any, secured: dict[str, Any], strike: Any) -> None:
    """The death of the peer in mid-transfer is known at once, long before the deadline, and is no lack of proof."""
    peer = tcp.peer(SHAPE, **secured)
    part = tcp.part(SHAPE)
    killed: list[float] = []

    def kill() -> None:
        os.kill(peer.process.pid, signal.SIGKILL)
        killed.append(time.monotonic())

    with pytest.raises(PeerLost, match=r"connector 'near', get\(\), request 'request-0'"):
        tcp.open(**secured).get(part.batch, peer.tickets[0], strike(60.0, MIDWAY, kill))
    assert time.monotonic() - killed[0] < 2.0
    assert part.memory.content() != content_of(tcp)


def test_peer_frozen_midway(tcp: Any, secured: dict[str, Any], strike: Any, freeze: Any) -> None:
    """A frozen peer ends at the deadline; when it thaws nothing lands late, and it serves again."""
    peer = tcp.peer(SHAPE, **secured)
    reader = tcp.open(peers=(peer.tickets[0].peer,), **secured)
    part = tcp.part(SHAPE)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        reader.get(part.batch, peer.tickets[0], strike(0.6, MIDWAY, partial(freeze, peer.process.pid)))
    assert 0.6 <= time.monotonic() - began < 5.0
    part.memory.seal()
    os.kill(peer.process.pid, signal.SIGCONT)
    again = tcp.part(SHAPE)
    reader.get(again.batch, peer.tickets[0], Until(20.0))
    assert again.memory.content() == content_of(tcp)


def test_frozen_before_the_handshake(tcp: Any, secured: dict[str, Any], freeze: Any) -> None:
    """A peer that is frozen when it is dialled ends at the deadline, too."""
    peer = tcp.peer(SHAPE, **secured)
    freeze(peer.process.pid)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        tcp.open(**secured).get(tcp.part(SHAPE).batch, peer.tickets[0], Until(0.3))
    assert 0.3 <= time.monotonic() - began < 3.0
    os.kill(peer.process.pid, signal.SIGCONT)
