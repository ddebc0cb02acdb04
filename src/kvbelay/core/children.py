"""The children as the ledger knows them: who may be asked, and how each has behaved."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum

import msgspec

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.circuit import Circuit, CircuitState
from kvbelay.core.model import Failure, Kind, Leg
from kvbelay.core.policy import Policy
from kvbelay.core.table import LIVE


class Status(Enum):
    """Whether a child may be asked."""

    READY = "ready"
    DRAINING = "draining"
    """No new transfers; those in flight go on."""
    UNAVAILABLE = "unavailable"
    """It never started; ``cause`` says why."""
    REMOVED = "removed"
    """Gone, but something of it is still in flight or held back."""


class Child(msgspec.Struct):
    """One child. Its name is the same in configuration, metadata, metrics, logs and errors."""

    name: str
    circuit: Circuit
    epochs: bool
    """Whether its completions name the attempt that they belong to."""
    status: Status
    cause: Failure | None = None
    judged: bool = True
    """Its circuit hears how its attempts end. Not where it stands for many peers, each with a circuit of its own."""
    live: int = 0
    """Legs that are active or draining."""
    held: int = 0
    """Legs whose blocks are held back because of it; leases do not count."""


class Children:
    """Admission and book-keeping, by name."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._known: dict[str, Child] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._known

    def __getitem__(self, name: str) -> Child:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def get(self, name: str) -> Child | None:
        """The child of that name, if there is or lately was one."""
        return self._known.get(name)

    def add(self, name: str, *, epochs: bool, unavailable: Failure | None, judged: bool = True) -> None:
        """Know a child from now on. One that was removed may come back; what it still holds stays counted."""
        status = Status.READY if unavailable is None else Status.UNAVAILABLE
        child = Child(name, Circuit(self._policy.circuit), epochs, status, unavailable, judged)
        before = self._known.get(name)
        if before is not None:
            child.live, child.held = before.live, before.held
        self._known[name] = child

    def drain(self, name: str) -> None:
        """Give the child no new transfers; those in flight go on."""
        self._known[name].status = Status.DRAINING

    def remove(self, name: str) -> None:
        """No child any more. Its record goes when nothing of it is in flight or held."""
        child = self._known[name]
        child.status = Status.REMOVED
        self._drop(child)

    def circuit(self, name: str, now: float) -> CircuitState:
        """The state of its circuit; a full quarantine keeps it open."""
        child = self._known[name]
        return CircuitState.OPEN if child.held >= self._policy.held_cap else child.circuit.state(now)

    def circuits(self, now: float) -> list[CircuitState]:
        """The same of all, in the order in which they were added."""
        cap = self._policy.held_cap
        return [CircuitState.OPEN if child.held >= cap else child.circuit.state(now) for child in self._known.values()]

    def refusal(self, where: Where, now: float) -> Failure | None:
        """Why the child gets no attempt now; None: it is admitted."""
        child = self._known.get(where.child)
        error: errors.KvbelayError
        if child is None or child.status is Status.REMOVED:
            error = errors.ChildUnavailable("it is not, or no longer, a child")
        elif child.status is Status.UNAVAILABLE:
            cause = child.cause.detail if child.cause is not None else "nobody knows why"
            error = errors.ChildUnavailable(f"it never started: {cause}")
        elif child.status is Status.DRAINING:
            error = errors.ChildUnavailable("it is being drained")
        elif child.held >= self._policy.held_cap:
            error = errors.QuarantineFull(f"{child.held} transfers are held back")
        elif not child.circuit.admit(now):
            error = errors.CircuitOpen("it failed too often of late")
        else:
            return None
        return fail(error, where)

    def moved(self, name: str, before: Leg, after: Leg, *, leased: bool) -> None:
        """One of its legs went from one state to another."""
        child = self._known.get(name)
        if child is None:  # removed; only a lease of its was left, and leases are not counted
            return
        child.live += (after in LIVE) - (before in LIVE)
        if not leased:
            child.held += (after is Leg.HELD) - (before is Leg.HELD)
        self._drop(child)

    def ended(self, name: str, kind: Kind, cause: Failure | None, now: float) -> None:
        """One of its attempts is over: tell its circuit."""
        child = self._known[name]
        if child.judged:
            settle(child.circuit, kind, cause, now)

    def _drop(self, child: Child) -> None:
        if child.status is Status.REMOVED and not child.live and not child.held:
            self._known.pop(child.name, None)


def settle(circuit: Circuit, kind: Kind, cause: Failure | None, now: float) -> None:
    """Tell a circuit how an attempt ended."""
    if kind in {Kind.LANDED, Kind.MISSED}:
        circuit.succeeded()
    elif kind in {Kind.CANCEL, Kind.LOST} or (cause is not None and _is_callers(cause)):
        circuit.abandoned()
    else:
        circuit.failed(now)


def _is_callers(failure: Failure) -> bool:
    leaf = getattr(errors, failure.kind, None)
    return getattr(leaf, "fault", None) is errors.Fault.CALLER
