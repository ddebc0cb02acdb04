"""The two reports that kvbelay grew out of: each failure as it was, and the same events through kvbelay.

    python examples/founding_bugs.py

The first is vLLM's RFC 35780 (an error handler that reads a renamed field), the second its bug 42831 (a multi connector
that finds its children by index). The failing code is told in our own words, as small as it can be and still fail.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Callable, Sequence

from kvbelay.connectors.memory import BACKEND, MemoryConfig
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.boundary import Where, call
from kvbelay.core.model import (
    BatchId,
    BatchResult,
    BlockSpan,
    Failure,
    Fingerprint,
    Outcome,
    Side,
    Ticket,
    TransferBatch,
)
from kvbelay.runtime.belay import Belay

MODEL = Fingerprint(model="founding bugs", revision="1", layouts=())
BLOCKS = 32
NBYTES = 1024


class BlockTransferResult:
    """What the transport returns of one block since a release that renamed ``status`` to ``state``."""

    def __init__(self, block: int, *, ok: bool) -> None:
        self.block = block
        self.ok = ok
        self.state = "done" if ok else "failed"


class PerBlockHandler:
    """Keeps a state for every block, and still reads the field's old name."""

    def __init__(self) -> None:
        self.states: dict[int, str] = {}

    def on_error(self, result: BlockTransferResult) -> None:
        if result.status == "failed":  # type: ignore[attr-defined]  # the bug
            self.states[result.block] = "retry"


class OnFinished:
    """A child of the old multi connector."""

    def on_finished(self, request: str) -> None:
        """Nothing to do here."""


class IndexedMultiConnector:
    """Finds the child of a completion by its place in a list, and the request in a table, whatever has changed."""

    def __init__(self, children: Sequence[OnFinished | None]) -> None:
        self.children = list(children)
        self.requests: dict[str, set[int]] = {}

    def begin(self, request: str) -> None:
        self.requests[request] = set()

    def cancel(self, request: str) -> None:
        del self.requests[request]

    def on_transfer_finished(self, request: str, index: int) -> None:
        if index >= len(self.children):
            message = "connector idx out of range"
            raise RuntimeError(message)
        self.children[index].on_finished(request)  # type: ignore[union-attr]  # the bug
        self.requests[request].add(index)


def how_it_dies(step: Callable[[], object]) -> str:
    """What the step raises, as a log would show it."""
    try:
        step()
    except (AttributeError, KeyError, RuntimeError) as exc:
        return f"{type(exc).__name__}: {exc}"
    sys.exit("the old code did not fail: this example shows nothing")


def batch(memory: bytearray) -> TransferBatch:
    """512 tokens in 32 blocks."""
    tokens = BatchId(MODEL.digest(), start=0, stop=16 * BLOCKS, layers=(0, 1), prefix=b"hash of the prompt")
    offsets = array("Q", range(0, BLOCKS * NBYTES, NBYTES))
    return TransferBatch(tokens, "", 0, (BlockSpan(memoryview(memory), offsets, NBYTES),))


def store(child: str) -> Connector:
    """A child that keeps what it is given."""
    return BACKEND.open(MemoryConfig(store=child), child=child, fingerprint=MODEL)


class SaysItAnew(Wrapper):
    """A child whose transport returns results of the new kind; ``answer`` makes one."""

    def __init__(self, inner: Connector, answer: Callable[[], object]) -> None:
        super().__init__(inner)
        self.answer = answer

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult:
        self.inner.get(batch, ticket, within)
        return self.answer()  # type: ignore[return-value]  # that is the point


class Unreadable:
    """A result that raises whatever one asks of it."""

    def __getattribute__(self, name: str) -> object:
        message = f"no {name} here"
        raise RuntimeError(message)


def load(belay: Belay, request: str, tickets: Sequence[Ticket]) -> tuple[Outcome, bytearray]:
    """The outcome, and the memory that was loaded into."""
    target = bytearray(BLOCKS * NBYTES)
    return belay.load(request, tickets, [batch(target)], within_s=2.0), target


def say(who: str, text: str) -> None:
    """One line of the story."""
    print(f"  {who:<8} {text}")


def renamed_field() -> None:
    """RFC 35780."""
    print("1. Block 17 of a transfer fails; the result says so in a field that was renamed (vLLM RFC 35780)")
    failed = BlockTransferResult(17, ok=False)
    handler = PerBlockHandler()
    say("before", f"The error handler raises {how_it_dies(lambda: handler.on_error(failed))}.")
    say(
        "before",
        f"The request is dropped: of its blocks the handler knows {handler.states}, and why 17 failed is lost.",
    )

    source = bytearray(range(256)) * (BLOCKS * NBYTES // 256)
    for title, answer in (("the renamed field", lambda: failed), ("a result that cannot be read", Unreadable)):
        belay = Belay()
        belay.add("near", lambda answer=answer: SaysItAnew(store("near"), answer))  # type: ignore[misc]
        belay.add("spare", lambda: store("spare"))
        tickets = belay.save("r", [batch(source)], within_s=2.0).tickets
        outcome, target = load(belay, "r", tickets)
        first = outcome.failures[0]
        say("kvbelay", f"With {title}, {first.child!r} has failed: {first.kind}, {first.detail}.")
        say(
            "kvbelay",
            f"The whole batch is {outcome.result.value} by {outcome.child!r}; right bytes: {target == source}.",
        )
        belay.remove("spare", drain_s=1.0)
        outcome, _ = load(belay, "s", tickets)
        say("kvbelay", f"Without 'spare': {outcome.result.value} from token {outcome.watermark} on; the cause is kept.")
        belay.close()


def a_handler_that_breaks() -> None:
    """RFC 35780: the handler hides the failure that it was called for."""
    print("2. The handler itself breaks while it handles a failure")

    def receive() -> None:
        message = "connection reset by peer"
        raise ConnectionResetError(message)

    def transfer() -> None:
        try:
            receive()
        except ConnectionResetError:
            PerBlockHandler().on_error(BlockTransferResult(17, ok=False))

    say("before", f"The log shows {how_it_dies(transfer)}.")
    failure = call(transfer, Where("near", "get", "r"))
    if isinstance(failure, Failure):
        say("kvbelay", f"The cause is {failure.detail}; what broke while it was handled stands beside it:")
        say("", f"{failure.handling}.")


def late_completions() -> None:
    """Bug 42831."""
    print("3. Completions for a child that never started, one that is gone, and a cancelled request (vLLM bug 42831)")
    old = IndexedMultiConnector([OnFinished(), None, OnFinished()])
    old.begin("r")
    say("before", f"Never started: {how_it_dies(lambda: old.on_transfer_finished('r', 1))}.")
    old.children.pop()
    say("before", f"Gone: {how_it_dies(lambda: old.on_transfer_finished('r', 2))}.")
    old.cancel("r")
    say("before", f"Cancelled: {how_it_dies(lambda: old.on_transfer_finished('r', 0))}.")

    def broken() -> Connector:
        message = "no such device"
        raise OSError(message)

    belay = Belay()
    belay.add("first", lambda: store("first"))
    cause = belay.add("second", broken)
    belay.add("third", lambda: store("third"))
    source = bytearray(range(256)) * (BLOCKS * NBYTES // 256)
    tickets = belay.save("r", [batch(source)], within_s=2.0).tickets
    done = BatchResult(nbytes=len(source), source_digest=None, landed_digest=None)
    belay.heard("second", Side.SAVE, "r", done)
    belay.remove("third", drain_s=1.0)
    belay.heard("third", Side.SAVE, "r", done)
    belay.cancel("r")
    belay.heard("first", Side.SAVE, "r", done, epoch=1)
    belay.heard("first", Side.SAVE, "never begun", done)
    say("kvbelay", f"'second' never started: {cause.detail if cause else ''}. The others saved the request.")
    for (child, reason), count in sorted(belay.swallowed().items(), key=str):
        say("kvbelay", f"Ignored and counted: {child!r}, {reason.value}: {count}.")
    outcome, target = load(belay, "s", tickets)
    say(
        "kvbelay",
        f"A load after all that: {outcome.result.value} by {outcome.child!r}; right bytes: {target == source}.",
    )
    say("kvbelay", f"Requests of which something is left: {belay.pending()}.")
    belay.close()


if __name__ == "__main__":
    renamed_field()
    a_handler_that_breaks()
    late_completions()
