"""Peers in processes of their own: killed, frozen, restarted, while their batches are read."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import Any

import pytest

from kvbelay.core.model import BatchResult
from kvbelay.errors import DeadlineExceeded, PeerLost, PeerRestarted
from kvbelay.runtime.deadline import Until

SHAPE = [(512, 64 * 1024)]
"""32 MiB: far more than the sockets' buffers hold, so that a peer struck early still owes most of it."""
MIDWAY = 26
"""Asked so often, a get has greeted its peer, and landed some of its 32 chunks and far from all."""
SMALL = [(3, 256)]


def content_of(rig: Any, shape: Any, seed: int) -> bytes:
    return rig.part(shape).memory.fill(seed)


def test_batch_of_another_process(rig: Any) -> None:
    """What another process put lands whole, and both digests say so."""
    peer = rig.peer(SHAPE)
    part = rig.part(SHAPE, seed=5)
    result = rig.open().get(part.batch, peer.tickets[0], Until(10.0))
    assert isinstance(result, BatchResult)
    assert result.landed_digest == result.source_digest == peer.tickets[0].digest
    assert part.memory.content() == content_of(rig, SHAPE, 1)
    assert part.memory.guarded()


def test_peer_killed_midway(rig: Any, strike: Any) -> None:
    """The death of the peer in mid-transfer is its end-of-file: known at once, long before the deadline."""
    peer = rig.peer(SHAPE)
    part = rig.part(SHAPE)
    killed: list[float] = []

    def kill() -> None:
        os.kill(peer.process.pid, signal.SIGKILL)
        killed.append(time.monotonic())

    with pytest.raises(PeerLost, match=r"connector 'near', get\(\), request 'request-0'"):
        rig.open().get(part.batch, peer.tickets[0], strike(60.0, MIDWAY, kill))
    assert time.monotonic() - killed[0] < 2.0
    landed, whole = part.memory.content(), content_of(rig, SHAPE, 1)
    assert landed[: 64 * 1024] == whole[: 64 * 1024]
    assert landed != whole


def test_peer_killed_while_idle(rig: Any) -> None:
    """A connection whose peer died while nobody used it is noticed at its next use, at once."""
    peer = rig.peer(SHAPE)
    reader = rig.open(peers=(peer.tickets[0].peer,))
    reader.get(rig.part(SHAPE).batch, peer.tickets[0], Until(10.0))
    peer.process.kill()
    peer.process.wait()
    calls = [
        partial(reader.get, rig.part(SHAPE).batch, peer.tickets[0]),
        partial(reader.release, peer.tickets[0]),
        partial(reader.lookup, [rig.identity()]),
        reader.probe,
    ]
    for call in calls:
        began = time.monotonic()
        with pytest.raises(PeerLost):
            call(within=Until(60.0))
        assert time.monotonic() - began < 1.0


def test_peer_frozen_midway(rig: Any, strike: Any, freeze: Any) -> None:
    """A frozen peer ends at the deadline; when it thaws nothing lands late, and it serves again."""
    peer = rig.peer(SHAPE)
    reader = rig.open(peers=(peer.tickets[0].peer,))
    part = rig.part(SHAPE)
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        reader.get(part.batch, peer.tickets[0], strike(0.6, MIDWAY, partial(freeze, peer.process.pid)))
    assert 0.6 <= time.monotonic() - began < 5.0
    part.memory.seal()
    os.kill(peer.process.pid, signal.SIGCONT)
    again = rig.part(SHAPE)
    reader.get(again.batch, peer.tickets[0], Until(20.0))
    assert again.memory.content() == content_of(rig, SHAPE, 1)
    assert part.memory.intact()


def test_frozen_peer_is_not_reached(rig: Any, freeze: Any) -> None:
    """Greeting a frozen peer ends at the deadline too."""
    peer = rig.peer(SMALL)
    freeze(peer.process.pid)
    reader = rig.open(peers=(peer.tickets[0].peer,))
    with pytest.raises(DeadlineExceeded):
        reader.get(rig.part(SMALL).batch, peer.tickets[0], Until(0.15))
    with pytest.raises(DeadlineExceeded):
        reader.probe(Until(0.15))


def test_peer_restarted(rig: Any) -> None:
    """The same address answers as another incarnation: old tickets are refused as such, new ones are served."""
    first = rig.peer(SMALL)
    (old,) = first.tickets
    reader = rig.open(peers=(old.peer,))
    reader.get(rig.part(SMALL).batch, old, Until(10.0))
    first.process.kill()
    first.process.wait()
    (new,) = rig.peer(SMALL, seed=2, listen=old.peer).tickets
    with pytest.raises(PeerRestarted):
        reader.get(rig.part(SMALL).batch, old, Until(10.0))
    reader.release(old, Until(10.0))
    part = rig.part(SMALL)
    reader.get(part.batch, new, Until(10.0))
    assert part.memory.content() == content_of(rig, SMALL, 2)
    assert [ticket.incarnation for ticket in reader.lookup([rig.identity()], Until(10.0))] == [new.incarnation]
