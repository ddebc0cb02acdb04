"""Each fault does what its name says, when the plan says so, and nothing else."""

from __future__ import annotations

import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kvbelay import errors
from kvbelay.connectors.faulty import Fault, Faulty, Operation, Plan, Strike, Struck
from kvbelay.connectors.port import Publishes, Unfenced
from kvbelay.connectors.spans import batch_nbytes, digest_batch
from kvbelay.core import verdict
from kvbelay.core.boundary import Where, call, is_a
from kvbelay.core.model import BatchResult, Failure, Miss, Ticket, TransferBatch
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import POISON, Scattered

POISONED = bytes([POISON])


class Harness:
    """A faulty connector, and what its hooks heard."""

    def __init__(self, held: Any, *strikes: Strike, seed: int = 7) -> None:
        self.held = held
        self.struck: list[Struck] = []
        self.echoes: list[tuple[str, int, object]] = []
        self.echoed = threading.Event()
        self.connector = Faulty(
            held.inner, Plan(seed, strikes), child="near", struck=self.struck.append, echo=self._echo
        )

    def get(self, within: Until | None = None) -> tuple[Any, TransferBatch, Scattered]:
        """The result of one load, with its batch and memory."""
        batch, memory = self.held.batch()
        return self.connector.get(batch, self.held.ticket, within or Until(5)), batch, memory

    def _echo(self, request: str, epoch: int, result: object) -> None:
        self.echoes.append((request, epoch, result))
        self.echoed.set()


@pytest.fixture
def harness(held: Any) -> Iterator[Callable[..., Harness]]:
    made: list[Harness] = []

    def make(*strikes: Strike, seed: int = 7) -> Harness:
        made.append(Harness(held, *strikes, seed=seed))
        return made[-1]

    yield make
    for each in made:
        each.connector.close()
    assert not [thread for thread in threading.enumerate() if "faulty" in thread.name]


def on(fault: Fault, nth: int = 1, **fields: Any) -> Strike:
    return Strike(fault=fault, nth=nth, **fields)


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


JUDGED = {
    Fault.REORDER: "CorruptData",
    Fault.CORRUPT: "CorruptData",
    Fault.LIE: "CorruptData",
    Fault.TRUNCATE: "ShortTransfer",
    Fault.RAISE: "TransportError",
    Fault.RENAMED_FIELD: "TransferFailed",
    Fault.UNREADABLE: "UnknownShape",
    Fault.UNPRINTABLE: "ForeignError",
    Fault.SAY_NOTHING: "SaidNothing",
    Fault.WRONG_FINGERPRINT: "FingerprintMismatch",
    Fault.DIE: "PeerLost",
    Fault.DROP: "DeadlineExceeded",
    Fault.FREEZE: "DeadlineExceeded",
    Fault.LATE_WRITE: "TransportError",
}


@pytest.mark.parametrize("fault", JUDGED, ids=lambda fault: fault.value)
def test_layer_sees_a_failure(held: Any, harness: Callable[..., Harness], fault: Fault) -> None:
    """Who reads the call through the boundary and checks the destination finds each fault, under its own kind."""
    subject = harness(on(fault))
    batch, _ = held.batch()
    where = Where("near", "get", batch.request, batch.epoch)
    within = Until(0.05 if JUDGED[fault] == "DeadlineExceeded" else 5)
    result = call(lambda: subject.connector.get(batch, held.ticket, within), where)
    judged = result if is_a(result, Failure) else verdict.read(result, where)
    if isinstance(judged, BatchResult):
        landed = digest_batch(batch)
        nbytes = batch_nbytes(batch)
        judged = verdict.check(judged, where, nbytes=nbytes, promised=held.ticket.digest, landed=landed)
    assert isinstance(judged, Failure)
    assert judged.kind == JUDGED[fault]
    assert [record.fault for record in subject.struck] == [fault]


@pytest.mark.parametrize("fault", [Fault.DELAY, Fault.DUPLICATE, Fault.LATE, Fault.HANG], ids=lambda fault: fault.value)
def test_layer_sees_a_success(held: Any, harness: Callable[..., Harness], fault: Fault) -> None:
    """A fault of timing alone leaves the bytes right."""
    result, batch, memory = harness(on(fault, seconds=0.01)).get()
    assert memory.content() == held.content
    assert result.landed_digest == digest_batch(batch)


def test_calls_without_a_strike_pass_through(held: Any, harness: Callable[..., Harness]) -> None:
    """The strike hits its own call; the ones before and after it are the inner connector's."""
    subject = harness(on(Fault.SAY_NOTHING, nth=2, times=2))
    results = [subject.get()[0] for _ in range(5)]
    assert [result is None for result in results] == [False, True, True, False, False]
    assert [(record.call, record.operation) for record in subject.struck] == [(2, Operation.GET), (3, Operation.GET)]
    assert list(subject.connector.lookup([held.ticket.batch], Until(5))) == [held.ticket]
    subject.connector.release(held.ticket, Until(5))
    subject.connector.probe(Until(5))


def test_record_says_what_struck(harness: Callable[..., Harness]) -> None:
    """The hook hears child, fault, operation, call, request and epoch before the fault takes effect."""
    subject = harness(on(Fault.DIE))
    with pytest.raises(errors.PeerLost):
        subject.get()
    (record,) = subject.struck
    assert (record.child, record.fault, record.operation, record.call) == ("near", Fault.DIE, Operation.GET, 1)
    assert (record.request, record.epoch) == ("request-2", 2)


def test_one_bit_flips(held: Any, harness: Callable[..., Harness]) -> None:
    """Corruption is one bit of one byte, the same with the same seed."""
    images = []
    for _ in range(2):
        _, _, memory = harness(on(Fault.CORRUPT)).get()
        images.append(memory.content())
        flipped = [(a ^ b).bit_count() for a, b in zip(memory.content(), held.content, strict=True)]
        assert sum(flipped) == 1
    assert images[0] == images[1]


def test_pieces_change_places(held: Any, harness: Callable[..., Harness]) -> None:
    """Reordering loses no byte and keeps none of the pieces in its place."""
    _, _, memory = harness(on(Fault.REORDER)).get()
    assert memory.content() != held.content
    pieces = [memory.content()[start : start + 512] for start in range(0, 2048, 512)]
    original = [held.content[start : start + 512] for start in range(0, 2048, 512)]
    assert sorted(pieces) == sorted(original)
    assert all(a != b for a, b in zip(pieces, original, strict=True))
    assert sorted(memory.content()[2048:]) == sorted(held.content[2048:])


@pytest.mark.parametrize("fault", [Fault.TRUNCATE, Fault.RAISE], ids=lambda fault: fault.value)
def test_half_lands(held: Any, harness: Callable[..., Harness], fault: Fault) -> None:
    """Half of the batch lands, the rest of the destination is untouched."""
    subject = harness(on(fault))
    batch, memory = held.batch()
    half = memory.nbytes // 2
    if fault is Fault.RAISE:
        with pytest.raises(ConnectionResetError) as caught:
            subject.connector.get(batch, held.ticket, Until(5))
        assert caught.value.errno == errno.ECONNRESET
    else:
        assert subject.connector.get(batch, held.ticket, Until(5)).nbytes == half
    assert memory.content()[:half] == held.content[:half]
    assert not memory.content()[half:].strip(POISONED)


def test_lie_lands_nothing(held: Any, harness: Callable[..., Harness]) -> None:
    """The lie is a whole success with the source's digest, and the destination keeps its poison."""
    result, batch, memory = harness(on(Fault.LIE)).get()
    assert result == BatchResult(batch_nbytes(batch), held.ticket.digest, held.ticket.digest)
    assert not memory.content().strip(POISONED)


def test_miss_stays_a_miss(held: Any, harness: Callable[..., Harness]) -> None:
    """A fault of what lands has nothing to spoil where the inner connector misses."""
    for fault in (Fault.TRUNCATE, Fault.LIE):
        batch, _ = held.batch(index=9)
        ticket = Ticket("near", batch.id, "nobody", 0, batch_nbytes(batch))
        assert harness(on(fault)).connector.get(batch, ticket, Until(5)) is Miss.MISS


def test_unreadable_and_unprintable(harness: Callable[..., Harness]) -> None:
    """Every attribute of the one raises, and so does the repr of the other."""
    subject = harness(on(Fault.UNREADABLE), on(Fault.UNPRINTABLE))
    result, _, _ = subject.get()
    for name in ("status", "state", "__class__", "__dict__"):
        with pytest.raises(RuntimeError):
            getattr(result, name)
    raised: list[BaseException] = []
    try:
        subject.get()
    except Exception as exc:  # noqa: BLE001  # its own text raises, so pytest.raises could not show it
        raised.append(exc)
    with pytest.raises(RuntimeError):
        repr(raised[0])
    with pytest.raises(RuntimeError):
        str(raised[0])


def test_duplicate_is_echoed_before_the_end(harness: Callable[..., Harness]) -> None:
    """A duplicate is the same result, told once besides being returned."""
    subject = harness(on(Fault.DUPLICATE))
    result, batch, _ = subject.get()
    assert subject.echoes == [(batch.request, batch.epoch, result)]


def test_duplicate_of_a_put(held: Any, harness: Callable[..., Harness]) -> None:
    """The completion of a put can come twice, too."""
    subject = harness(on(Fault.DUPLICATE, operation=Operation.PUT))
    batch, _ = held.batch(index=1)
    ticket = subject.connector.put(batch, Until(5))
    assert subject.echoes == [(batch.request, batch.epoch, ticket)]


def test_late_is_echoed_after_the_end(harness: Callable[..., Harness]) -> None:
    """A late completion comes from a thread, when the call has returned."""
    subject = harness(on(Fault.LATE, seconds=0.5))
    result, batch, _ = subject.get()
    assert not subject.echoes
    assert subject.echoed.wait(5)
    assert subject.echoes == [(batch.request, batch.epoch, result)]


def test_close_ends_what_is_to_come(held: Any, harness: Callable[..., Harness]) -> None:
    """After close there is no echo and no late write, however far away they were."""
    subject = harness(on(Fault.LATE, seconds=60.0), on(Fault.LATE_WRITE, nth=2, seconds=60.0))
    subject.get()
    batch, memory = held.batch()
    with pytest.raises(ConnectionResetError):
        subject.connector.get(batch, held.ticket, Until(5))
    began = time.monotonic()
    subject.connector.close()
    subject.connector.close()
    assert time.monotonic() - began < 2
    assert not subject.echoes
    assert not memory.content().strip(POISONED)


def test_drop_never_completes(held: Any, harness: Callable[..., Harness]) -> None:
    """The work is done, and the call waits for its deadline, its cancellation, or the end of the connector."""
    subject = harness(on(Fault.DROP, times=3))
    batch, memory = held.batch()
    with pytest.raises(errors.DeadlineExceeded):
        subject.connector.get(batch, held.ticket, Until(0.02))
    assert memory.content() == held.content
    until = Until(30)
    cancelled = Outcome(lambda: subject.get(until))
    wait_for(lambda: len(subject.struck) == 2)
    until.cancel()
    assert isinstance(cancelled.ended(), errors.Cancelled)
    closed = Outcome(lambda: subject.get(Until(30)))
    wait_for(lambda: len(subject.struck) == 3)
    subject.connector.close()
    assert isinstance(closed.ended(), errors.Closed)


class Outcome(threading.Thread):
    """One call on a thread of its own: what it returned or raised."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._function = function
        self.value: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.value = self._function()
        except (errors.KvbelayError, OSError) as exc:
            self.value = exc

    def ended(self) -> Any:
        self.join(5)
        assert not self.is_alive()
        return self.value


def test_hang_heeds_nothing(harness: Callable[..., Harness]) -> None:
    """A hung call ignores deadline and cancellation; let go, it finds that its time is over."""
    subject = harness(on(Fault.HANG, times=2))
    until = Until(0.01)
    hung = Outcome(lambda: subject.get(until))
    wait_for(lambda: len(subject.struck) == 1)
    until.cancel()
    hung.join(0.1)
    assert hung.is_alive()
    subject.connector.let_go()
    assert isinstance(hung.ended(), errors.Cancelled)
    again = Outcome(subject.get)
    wait_for(lambda: len(subject.struck) == 2)
    subject.connector.close()
    assert isinstance(again.ended(), errors.Closed)


def test_death_and_revival(held: Any, harness: Callable[..., Harness]) -> None:
    """From the strike on every call says that the peer is lost, until it is revived."""
    subject = harness(on(Fault.DIE, operation=Operation.PROBE))
    connector = subject.connector
    subject.get()
    batch, _ = held.batch()
    for dead in (
        lambda: connector.probe(Until(5)),
        lambda: connector.get(batch, held.ticket, Until(5)),
        lambda: connector.put(batch, Until(5)),
        lambda: connector.lookup([batch.id], Until(5)),
        lambda: connector.release(held.ticket, Until(5)),
    ):
        with pytest.raises(errors.PeerLost):
            dead()
    connector.revive()
    connector.probe(Until(5))
    assert subject.get()[0].nbytes == batch_nbytes(batch)


def test_death_for_a_while(held: Any) -> None:
    """A death with seconds ends by itself."""
    now = [100.0]
    connector = Faulty(held.inner, Plan(0, (on(Fault.DIE, seconds=3.0),)), child="near", clock=lambda: now[0])
    batch, _ = held.batch()
    for now[0] in (100.0, 102.9):
        with pytest.raises(errors.PeerLost):
            connector.get(batch, held.ticket, Until(5))
    now[0] = 103.1
    assert connector.get(batch, held.ticket, Until(5)) is not None


def test_frost_and_thaw(harness: Callable[..., Harness]) -> None:
    """A frozen peer answers nobody; calls heed their deadlines, and go on when it thaws."""
    subject = harness(on(Fault.FREEZE))
    with pytest.raises(errors.DeadlineExceeded):
        subject.get(Until(0.02))
    with pytest.raises(errors.DeadlineExceeded):
        subject.connector.probe(Until(0.02))
    waiting = Outcome(lambda: subject.get(Until(5)))
    subject.connector.thaw()
    result, batch, _ = waiting.ended()
    assert result.landed_digest == digest_batch(batch)


def test_late_write(held: Any, harness: Callable[..., Harness]) -> None:
    """The call raises, drain cannot confirm, then the destination changes, and drain confirms."""
    subject = harness(on(Fault.LATE_WRITE, seconds=0.5))
    connector = subject.connector
    assert isinstance(connector, Unfenced)
    batch, memory = held.batch()
    other, _ = held.batch()
    with pytest.raises(ConnectionResetError):
        connector.get(batch, held.ticket, Until(5))
    memory.seal()
    assert connector.drain(other, Until(5))
    assert not connector.drain(batch, Until(0.01))
    assert memory.intact()
    assert connector.drain(batch, Until(5))
    assert not memory.intact()


def test_capabilities(held: Any, harness: Callable[..., Harness]) -> None:
    """The connector is Unfenced only where late writes are planned, and Publishes only where the inner one is."""
    assert not isinstance(harness(on(Fault.CORRUPT)).connector, Unfenced | Publishes)

    class Leasing(type(held.inner)):  # type: ignore[misc]
        def released(self, within: Until) -> Sequence[Ticket]:
            within.remaining_s()
            return [held.ticket]

    held.inner.__class__ = Leasing
    connector = harness(on(Fault.SAY_NOTHING, operation=Operation.RELEASED)).connector
    assert isinstance(connector, Publishes)
    assert connector.released(Until(5)) is None
    assert connector.released(Until(5)) == [held.ticket]


def test_hook_that_raises_is_dropped(held: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that raises changes nothing for the call, and is logged."""

    def broken(_: object) -> None:
        msg = "the hook broke"
        raise RuntimeError(msg)

    connector = Faulty(held.inner, Plan(0, (on(Fault.DELAY),)), child="near", struck=broken)
    batch, memory = held.batch()
    with caplog.at_level(logging.WARNING):
        connector.get(batch, held.ticket, Until(5))
    assert memory.content() == held.content
    assert "the hook broke" in caplog.text
