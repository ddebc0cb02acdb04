"""What connectors answer: understood where that is safe, refused by name where it is not, and never believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.connectors.port import Connector, Deadline
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core.model import BatchResult, Miss, Result, Ticket, TransferBatch


def on(fault: Fault, nth: int = 1, **fields: Any) -> Strike:
    return Strike(fault=fault, nth=nth, **fields)


class Answers(Wrapper):
    """Loads as ``inner`` does, and then says something else about it."""

    def __init__(self, inner: Connector, answer: Callable[[BatchResult | Miss], object]) -> None:
        super().__init__(inner)
        self._answer = answer

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> Any:
        return self._answer(self.inner.get(batch, ticket, within))


class Old:
    """A result in another version's words."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class Evil:
    """A result that cannot be looked at."""

    def __getattribute__(self, name: str) -> Any:
        message = f"reading {name} broke"
        raise RuntimeError(message)


def test_a_failed_lookup_is_named(rig: Any) -> None:
    """What a lookup raises is a failure of the lookup, and the next child is asked."""
    layer = rig.layer()
    far = rig.memory("far")
    layer.add("near", rig.faulty("near", on(Fault.UNPRINTABLE, operation=Operation.LOOKUP, times=2)))
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    outcome = layer.load("r", into)
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert [(failure.child, failure.operation) for failure in outcome.failures] == [("near", "lookup")]


@pytest.mark.parametrize(
    "found", [None, [None], [Old(batch=1)], 7, [Evil()]], ids=["none", "holes", "foreign", "number", "evil"]
)
def test_a_lookup_that_finds_nonsense(rig: Any, found: object) -> None:
    """Tickets that are none are refused by name; no other child suffers."""
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    near.lookup = lambda _ids, _within: found
    layer.add("near", near)
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    rig.put(far, source)
    outcome = layer.load("r", into)
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert outcome.failures[0].child == "near"
    assert outcome.failures[0].kind in {"UnknownShape", "ForeignError"}


def test_refuses_tickets_of_another_model(rig: Any) -> None:
    """A ticket for the same tokens of another model's KV is a failure that says so, not a miss."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    other = [
        msgspec.structs.replace(ticket, batch=msgspec.structs.replace(ticket.batch, fingerprint=b"somebody else's"))
        for ticket in rig.put(near, source)
    ]
    outcome = layer.load("r", into, other)
    assert (outcome.result, outcome.failures[0].kind) == (Result.RECOMPUTE, "FingerprintMismatch")
    assert outcome.attempts == 1
    assert into.untouched()


def test_ticket_of_an_unknown_child(rig: Any) -> None:
    """A peer's ticket may name a child that this side does not have: the others are asked."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    tickets = [msgspec.structs.replace(ticket, child="nobody") for ticket in rig.put(near, source)]
    outcome = layer.load("r", into, tickets)
    assert (outcome.result, outcome.child) == (Result.LOADED, "near")
    assert [(failure.child, failure.kind) for failure in outcome.failures] == [("nobody", "ChildUnavailable")]


FOREIGN: dict[str, tuple[object, str, str]] = {
    "renamed field": (Old(req_id="r", state="failed"), "TransferFailed", ""),
    "old field": (Old(req_id="r", status="failed"), "TransferFailed", ""),
    "with a cause": (Old(ok=False, error="link down"), "TransferFailed", ""),
    "failed blocks": (Old(ok=True, nbytes=2304, failed_block_ids=[17]), "TransferFailed", ""),
    "attributes that raise": (Evil(), "UnknownShape", "reading 'state' raised"),
    "none": (None, "SaidNothing", ""),
    "a number": (3, "UnknownShape", ""),
    "a tuple": (("ok", 2304), "UnknownShape", ""),
    "a new state": (Old(state="landed-ish"), "UnknownShape", ""),
    "states that disagree": (Old(ok=True, state="failed"), "TransferFailed", ""),
    "success without a size": (Old(state="done"), "SaidNothing", ""),
    "nonsense in our own type": (
        BatchResult(nbytes="many", source_digest=None, landed_digest=None),
        "UnknownShape",
        "",
    ),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_foreign_results_fail_by_name(rig: Any, case: str) -> None:
    """A result of another version, or of none, is a failure with a name; the sibling serves, and nothing escapes."""
    result, kind, handling = FOREIGN[case]
    layer = rig.layer()
    near, far = rig.memory("near"), rig.memory("far")
    layer.add("near", Answers(near, lambda _: result))
    layer.add("far", far)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, [*rig.put(near, source), *rig.put(far, source)])
    assert (outcome.result, outcome.child) == (Result.LOADED, "far")
    assert {failure.kind for failure in outcome.failures} == {kind}
    assert handling in outcome.failures[0].handling
    assert into.good(source, source.stop)


def test_a_foreign_success_is_checked(rig: Any) -> None:
    """A success in another version's words counts if the bytes prove it."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", Answers(near, lambda result: Old(state="DONE", nbytes=result.nbytes)))
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    assert layer.load("r", into, rig.put(near, source)).result is Result.LOADED
    assert into.good(source, source.stop)


WRONG = {
    Fault.LIE: "CorruptData",
    Fault.CORRUPT: "CorruptData",
    Fault.REORDER: "CorruptData",
    Fault.TRUNCATE: "ShortTransfer",
    Fault.SAY_NOTHING: "SaidNothing",
    Fault.WRONG_FINGERPRINT: "FingerprintMismatch",
    Fault.UNREADABLE: "UnknownShape",
    Fault.UNPRINTABLE: "ForeignError",
    Fault.RENAMED_FIELD: "TransferFailed",
}


@pytest.mark.parametrize("fault", WRONG, ids=lambda fault: fault.value)
def test_nothing_wrong_counts_as_landed(rig: Any, fault: Fault) -> None:
    """What is corrupt, short, in disorder or not there at all is found out; the watermark ends before it."""
    layer = rig.layer()
    near = rig.faulty("near", on(fault, nth=2, times=9))
    layer.add("near", near)
    source, into = rig.blocks("r").fill(), rig.blocks("r")
    outcome = layer.load("r", into, rig.put(near.inner, source))
    assert (outcome.result, outcome.watermark, outcome.held) == (Result.RECOMPUTE, 16, False)
    assert {failure.kind for failure in outcome.failures} == {WRONG[fault]}
    assert into.good(source, 16)
    assert into.untouched(32)


def test_a_lie_in_pass_needs_a_recheck(rig: Any) -> None:
    """A digest that a connector claims is believed only where its backend computes it from what landed."""
    layer = rig.layer()
    near, far = rig.faulty("near", on(Fault.LIE)), rig.memory("far")
    layer.add("near", near, digest_in_pass=near.digest_in_pass)
    layer.add("far", far)
    source, into = rig.blocks("r", 1).fill(), rig.blocks("r", 1)
    outcome = layer.load("r", into, [*rig.put(near.inner, source), *rig.put(far, source)])
    assert outcome.failures[0].kind == "CorruptData"
    assert into.good(source, 16)


def test_what_left_is_what_the_ticket_promised(rig: Any) -> None:
    """A source whose bytes changed since it gave the ticket does not count, though they arrive unharmed."""
    layer = rig.layer()
    near = rig.memory("near")
    layer.add("near", Answers(near, lambda result: msgspec.structs.replace(result, source_digest=b"another")))
    source, into = rig.blocks("r", 1).fill(), rig.blocks("r", 1)
    outcome = layer.load("r", into, rig.put(near, source))
    assert (outcome.result, outcome.failures[0].kind) == (Result.RECOMPUTE, "CorruptData")
