"""Writers and readers that go on after their call has failed, while the engine's blocks belong to somebody else."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from late import Engine, Shared, content_of

from kvbelay import errors
from kvbelay.connectors.arena import ALIGN
from kvbelay.connectors.port import Connector
from kvbelay.connectors.spans import digest_batch
from kvbelay.connectors.staged import Staged
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchId, Result, Ticket, TransferBatch
from kvbelay.core.policy import Policy
from kvbelay.runtime.belay import Belay
from kvbelay.runtime.deadline import Until

PIECES, PIECE = 8, 512
NBYTES = PIECES * PIECE
SLOTS = 2
SOON_S = 0.1
"""How long a call may take whose engine is frozen."""


class Blocks:
    """A request's blocks in memory that the engine could map; ``batch`` of them for whoever has them now."""

    def __init__(self) -> None:
        self.memory = Shared.of(2 * NBYTES)

    def batch(self, held: Any, request: str, index: int = 0) -> TransferBatch:
        key = BatchId(held.fingerprint.digest(), index * 16, index * 16 + 16, (0, 1), bytes([index]) * 16)
        return TransferBatch(key, request, 1, self.memory.spans(PIECES, PIECE))


class Stage:
    """An engine in other processes, staged or not, and a store that is sound."""

    def __init__(self, held: Any) -> None:
        self.held = held
        self.blocks = Blocks()
        self.arena = Shared.of(SLOTS * ALIGN)
        self.engine = Engine(held.inner, [self.arena, self.blocks.memory])
        self.staged = Staged(self.engine, arena_nbytes=SLOTS * ALIGN, child="near")
        self.staged._arena._memory = self.arena.view  # the same memory, as an engine has it that maps it
        source, memory = held.batch(((PIECES, PIECE),))
        self.content = memory.fill(3)
        self.sound: Ticket = held.inner.put(source, Until(5))

    def ticket(self, seed: int) -> Ticket:
        return Engine.ticket(self.sound, seed)

    def reuse(self) -> bytes:
        """The blocks go to another request, which loads into them from the store; its digest."""
        batch = self.blocks.batch(self.held, "another")
        self.held.inner.get(batch, self.sound, Until(5))
        assert digest_batch(batch) == self.sound.digest
        return digest_batch(batch)


@pytest.fixture
def stage(held: Any) -> Iterator[Stage]:
    made = Stage(held)
    yield made
    made.engine.end()
    for memory in (made.arena, made.blocks.memory):
        os.close(memory.fd)


def freeze_midway(stage: Stage, connector: Connector) -> None:
    """A load whose writer freezes in mid-write and is given up at its deadline."""
    stage.engine.freeze = True
    with pytest.raises(errors.DeadlineExceeded):
        connector.get(stage.blocks.batch(stage.held, "first"), stage.ticket(7), Until(SOON_S))


def test_a_frozen_writer_without_staging(stage: Stage) -> None:
    """The control: written by a process that thaws too late, blocks that belong to another request change."""
    freeze_midway(stage, stage.engine)
    before = stage.reuse()
    stage.engine.resume()
    after = digest_batch(stage.blocks.batch(stage.held, "another"))
    assert after != before
    late = content_of(7, NBYTES)[NBYTES // 2 :]
    assert bytes(stage.blocks.memory.view[PIECES * PIECE : PIECES * PIECE + PIECE]) == late[:PIECE]


def test_a_frozen_writer(stage: Stage) -> None:
    """Staged, the late half lands in the arena; the blocks keep what their new owner loaded, to the last bit."""
    freeze_midway(stage, stage.staged)
    before = stage.reuse()
    everything = bytes(stage.blocks.memory.view)
    assert stage.staged.quarantined.slots == 1
    late = content_of(7, NBYTES)
    assert bytes(stage.arena.view[:NBYTES]) == late[: NBYTES // 2] + bytes(NBYTES // 2)
    stage.engine.resume()
    assert bytes(stage.arena.view[:NBYTES]) == late
    assert digest_batch(stage.blocks.batch(stage.held, "another")) == before
    assert bytes(stage.blocks.memory.view) == everything


def test_its_slot_is_given_to_nobody(stage: Stage) -> None:
    """A load that has landed in the arena and is not copied out yet stays whole when the late write strikes then."""
    freeze_midway(stage, stage.staged)
    stage.engine.landed = stage.engine.resume
    batch = stage.blocks.batch(stage.held, "next")
    stage.staged.get(batch, stage.ticket(8), Until(30))
    assert bytes(stage.arena.view[:NBYTES]) == content_of(7, NBYTES)
    assert digest_batch(batch) == stage.ticket(8).digest


def test_quarantine_ends_by_confirmation_only(stage: Stage) -> None:
    """Asked often, and full, the arena gives nothing back; when the writer has said its last word, everything."""
    for slots in range(1, SLOTS + 1):
        freeze_midway(stage, stage.staged)
        assert stage.staged.quarantined.slots == slots
    for _ in range(20):
        assert stage.staged.sweep(0.001) == 0
        with pytest.raises(errors.QuarantineFull):
            stage.staged.get(stage.blocks.batch(stage.held, "next"), stage.ticket(8), Until(30))
    with pytest.raises(errors.QuarantineFull):
        stage.staged.probe(Until(5))
    assert len(stage.engine.running) == SLOTS, "nothing more was started"
    for _, process in stage.engine.running[1:]:
        process.kill()
        process.wait()
    assert stage.staged.sweep(5) == SLOTS - 1, "one was confirmed by its death, the other lives"
    stage.engine.resume()
    assert stage.staged.sweep(5) == 1
    assert stage.staged.quarantined.slots == 0
    batch = stage.blocks.batch(stage.held, "next")
    stage.staged.get(batch, stage.ticket(8), Until(30))
    assert digest_batch(batch) == stage.ticket(8).digest


def test_a_writer_that_outlives_the_connector(stage: Stage) -> None:
    """Closing ends no writer: what it still writes lands in memory that nobody else has got meanwhile."""
    freeze_midway(stage, stage.staged)
    before = stage.reuse()
    stage.staged.close()
    assert stage.staged.quarantined.slots == 1
    assert stage.engine.resume() == hashlib.sha256(content_of(7, NBYTES)).hexdigest()
    assert bytes(stage.arena.view[:NBYTES]) == content_of(7, NBYTES)
    assert digest_batch(stage.blocks.batch(stage.held, "another")) == before


def test_a_frozen_reader(stage: Stage) -> None:
    """A put that failed while its reader is frozen: it reads on what the blocks held then, not what they hold now."""
    stage.blocks.memory.view[:] = content_of(1, 2 * NBYTES)
    batch = stage.blocks.batch(stage.held, "first", index=1)
    content = b"".join(bytes(batch.spans[0].region[start : start + PIECE]) for start in batch.spans[0].offsets)
    stage.engine.freeze = True
    with pytest.raises(errors.DeadlineExceeded):
        stage.staged.put(batch, Until(SOON_S))
    stage.blocks.memory.view[:] = bytes(2 * NBYTES)
    stage.staged.put(stage.blocks.batch(stage.held, "next", index=2), Until(30))
    assert stage.engine.resume() == hashlib.sha256(content).hexdigest()


def test_a_frozen_writer_below_the_layer(stage: Stage) -> None:
    """The request is told in its time, with its blocks free and not held; who gets them next keeps what he loads."""
    layer = Belay(Policy(attempts=2, attempts_per_child=1, attempt_s=SOON_S, drain_s=5.0), seed=1)
    layer.add("near", lambda: stage.staged)
    layer.add("sound", lambda: Wrapper(stage.held.inner), digest_in_pass=True)
    try:
        stage.engine.freeze = True
        first = layer.load("first", [stage.ticket(7)], [stage.blocks.batch(stage.held, "first")], 30)
        assert first.failures[0].kind == "DeadlineExceeded"
        assert not first.held
        batch = stage.blocks.batch(stage.held, "second")
        second = layer.load("second", [_of(stage.sound, "sound")], [batch], 30)
        assert second.result is Result.LOADED
        stage.engine.resume()
        assert digest_batch(batch) == stage.sound.digest
        assert layer.pending() == 0
    finally:
        layer.close()


def _of(ticket: Ticket, child: str) -> Ticket:
    return Ticket(child, ticket.batch, ticket.peer, ticket.incarnation, ticket.nbytes, ticket.digest)


class Scribbler(Wrapper):
    """Its get raises, and a thread goes on writing into the batch's memory until it is told to stop."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.stop = threading.Event()
        self.rounds = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.drain = lambda *_: self.thread is None or not self.thread.is_alive()

    def get(self, batch: TransferBatch, ticket: Ticket, within: Any) -> Any:
        if self.thread is not None:
            return super().get(batch, ticket, within)
        self.thread = threading.Thread(target=self._scribble, args=(batch,))
        self.thread.start()
        self._see_rounds(2)
        raise ConnectionResetError

    def _scribble(self, batch: TransferBatch) -> None:
        value = 0
        while not self.stop.wait(0.0005):
            value = (value + 1) % 256
            for span in batch.spans:
                for offset in span.offsets:
                    span.region[offset : offset + span.nbytes] = bytes([value]) * span.nbytes
            self.rounds.release()

    def _see_rounds(self, count: int) -> None:
        """So many more times everything has been written."""
        while self.rounds.acquire(blocking=False):
            pass
        for _ in range(count):
            assert self.rounds.acquire(timeout=30)

    def end(self) -> None:
        self.stop.set()
        if self.thread is not None:
            self.thread.join(30)


@pytest.mark.parametrize("fenced", [True, False], ids=["staged", "not staged"])
def test_a_thread_that_goes_on_writing(stage: Stage, fenced: bool) -> None:
    """Blocks that were released and reused meanwhile stay as they are if the writer was staged, and only then."""
    native = Scribbler(stage.held.inner)
    subject: Any = Staged(native, arena_nbytes=SLOTS * ALIGN, child="near") if fenced else native
    try:
        with pytest.raises(ConnectionResetError):
            subject.get(stage.blocks.batch(stage.held, "first"), stage.sound, Until(5))
        batch = stage.blocks.batch(stage.held, "another")
        for start in batch.spans[0].offsets:
            batch.spans[0].region[start : start + PIECE] = bytes(PIECE)
        native._see_rounds(3)
        spoiled = any(any(batch.spans[0].region[start : start + PIECE]) for start in batch.spans[0].offsets)
        assert spoiled is not fenced
        if fenced:
            for _ in range(3):  # loads beside the writer are whole, and leave it its slot
                subject.get(batch, stage.sound, Until(5))
                assert digest_batch(batch) == stage.sound.digest
            assert subject.quarantined.slots == 1
            assert subject.sweep(0.05) == 0
            native.end()
            assert subject.sweep(5) == 1
    finally:
        native.end()
