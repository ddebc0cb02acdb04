"""`Belay`: the multi connector of the embedded data plane.

Decisions are taken by the ledger under one lock, which never waits for anything; connectors run on their own bounded
threads. A caller of `load` or `save` waits for the one outcome of its request, whatever the connectors do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from kvbelay import errors
from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import METHODS, fenced
from kvbelay.core import verdict
from kvbelay.core.boundary import Where, call, fail, is_a, peek, type_name
from kvbelay.core.children import Status
from kvbelay.core.circuit import CircuitState
from kvbelay.core.model import Action, Event, Failure, Kind, Outcome, Result, Side, Swallow, Ticket, TransferBatch
from kvbelay.core.policy import Policy
from kvbelay.runtime.attempt import Attempt
from kvbelay.runtime.driver import Driver, Watch
from kvbelay.runtime.plan import Cargo
from kvbelay.runtime.pool import contain
from kvbelay.runtime.slot import Slot

ARENA_NBYTES = 256 << 20
"""Size of the arena of a child that has to be staged, unless it is given."""
CLOSE_S = 1.0
"""Seconds that closing waits for what should need none."""


class ChildState(msgspec.Struct, frozen=True):
    """How a child is doing."""

    name: str
    status: str
    circuit: CircuitState
    live: int
    held: int
    cause: Failure | None


class _Errand(msgspec.Struct):
    """A call of `load` or `save` that waits for its outcome."""

    cargo: Cargo
    tickets: tuple[Ticket, ...]
    done: threading.Event
    outcome: Outcome | None = None
    attempts: list[Attempt] = []


class Belay:
    """Moves batches through named children; no failure of theirs leaves it other than in an outcome.

    Parameters
    ----------
    policy
        Bounds and fallbacks, the same for all requests.
    watch
        Called with every event, report and action and its time, in order, one at a time.
    released
        Called with the request and the side when blocks that an outcome said were held are free.
    threads
        Calls of one child that may run at once. A child whose threads are all stuck gets no further attempts.
    seed
        Of the backoffs' jitter.

    A hook runs on the thread on which something happened, a caller's too: it must be quick, and may call the layer.
    What it raises is dropped; the last such failures stand in ``hook_failures``.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        watch: Watch | None = None,
        released: Callable[[str, Side], None] | None = None,
        threads: int = 4,
        seed: int | None = None,
    ) -> None:
        if threads < 1:
            what = f"{threads} threads can do nothing"
            raise errors.ConfigError(what, field="threads", remedy="give every child one or more")
        self._driver = Driver(
            policy or Policy(), launch=self._launch, told=self._told, watch=watch, released=released, seed=seed
        )
        self._change = self._driver.change
        self._threads = threads
        self._slots: dict[str, Slot] = {}
        self._errands: dict[tuple[str, Side], _Errand] = {}
        self._closed = False

    @property
    def hook_failures(self) -> list[Failure]:
        """The last things that hooks raised."""
        return self._driver.hook_failures

    def add(
        self,
        child: str,
        opener: Callable[[], Connector],
        *,
        digest_in_pass: bool = False,
        arena_nbytes: int = ARENA_NBYTES,
    ) -> Failure | None:
        """Open a connector and ask it from now on, after those added before.

        What ``opener`` raises becomes the cause of an unavailable slot, and is returned. ``digest_in_pass`` is
        `Backend.digest_in_pass`. A connector that is `Unfenced` moves through an arena of ``arena_nbytes``.
        Raises `ConfigError` if the name is taken or empty, `Closed` if the layer is closed.
        """
        with self._change:
            refused = self._refusal(child)
        if refused is not None:
            raise refused
        connector = _open(opener, child, arena_nbytes)
        failure = connector if isinstance(connector, Failure) else None
        slot = None
        if not isinstance(connector, Failure):
            slot = Slot(child, connector, digest_in_pass=digest_in_pass, threads=self._threads)
            slot.publish(self._driver.lease_ended)
        with self._change:
            refused = self._refusal(child)  # meanwhile another may have come, or the end
            if refused is None:
                self._driver.ledger.children.add(child, epochs=True, unavailable=failure)
                self._driver.gate.know(child)
                if slot is not None:
                    self._slots[child] = slot
        if refused is not None:
            if slot is not None:
                slot.shut()
                slot.close(CLOSE_S)
            raise refused
        return failure

    def drain(self, child: str) -> None:
        """Give the child no new transfers; those in flight go on. Raises `ConfigError` if there is no such child."""
        with self._change:
            if child not in self._present():
                what = f"there is no child named {child!r}"
                raise errors.ConfigError(what, field="name", remedy="name one of " + ", ".join(self._present()))
            self._driver.ledger.children.drain(child)

    def remove(self, child: str, *, drain_s: float) -> int:
        """Drain the child for at most ``drain_s`` seconds, abort what is left, and close it.

        Returns how many of its threads are stuck in calls that do not come back; their blocks stay held.
        """
        self.drain(child)
        with self._change:
            children = self._driver.ledger.children
            self._change.wait_for(lambda: child not in children or not children[child].live, timeout=drain_s)
            slot = self._slots.pop(child, None)
        self._driver.feed(Event(Kind.LOST, child=child))
        if slot is None:
            return 0
        slot.finish(min(CLOSE_S, drain_s))
        slot.shut()
        return slot.close(drain_s)

    def load(self, request: str, tickets: Iterable[Ticket], into: Iterable[TransferBatch], within_s: float) -> Outcome:
        """Bring batches into the memory of ``into``. Blocks until the outcome.

        ``tickets`` are what the source's `save` gave. Children with tickets are tried first, in the order in which
        they come; the others are asked by `lookup`, in the order in which they were added. The outcome comes at most
        the policy's ``drain_s`` and budget wait after ``within_s`` seconds.

        Raises `InvalidBatch` if the batches do not fit together, `RequestBusy` if this request is being loaded, and
        `Closed`. Ctrl-C calls the request off and passes on when its outcome is there; a second one does not wait.
        """
        return self._run(Side.LOAD, request, Cargo(into), tuple(tickets), within_s)

    def save(self, request: str, batches: Iterable[TransferBatch], within_s: float) -> Outcome:
        """Hand batches to all children at once. Blocks until the outcome, which carries the tickets.

        ``outcome.held`` says that readers are served from the batches' own memory: keep it until ``released`` is
        called, or take it back with `cancel`. (``released`` may be called before this returns.) Raises as `load` does.
        """
        return self._run(Side.SAVE, request, Cargo(batches), (), within_s)

    def cancel(self, request: str) -> None:
        """Nothing more is wanted of the request: transfers in flight are aborted, leases are withdrawn."""
        for side in Side:
            self._cancel(request, side)

    def heard(self, child: str, side: Side, request: str, result: object, *, epoch: int | None = None) -> None:
        """A completion that came by another way than the return of the call, such as an engine's own thread.

        It can only make matters worse: a failure aborts the attempt that it fits, and a success is swallowed, since
        the return of the call is what says that nobody touches the blocks. What fits no attempt is swallowed too.
        Does not raise, whatever ``result`` is.
        """
        where = Where(child, "heard", request, epoch or 0)
        read = call(lambda: verdict.read(result, where), where)
        self._driver.overheard(child, side, request, read if isinstance(read, Failure) else None, epoch)

    def swallowed(self) -> Counter[tuple[str, Swallow]]:
        """Completions that changed nothing, by child and reason."""
        with self._change:
            return self._driver.ledger.swallowed + self._driver.gate.swallowed

    def states(self) -> list[ChildState]:
        """How the children are doing."""
        now = time.monotonic()
        with self._change:
            children = self._driver.ledger.children
            return [
                ChildState(name, child.status.value, children.circuit(name, now), child.live, child.held, child.cause)
                for name, child in ((name, children[name]) for name in children)
            ]

    def pending(self) -> int:
        """Requests of which something is left: an outcome to come, or blocks that are held."""
        with self._change:
            return len(self._driver.ledger)

    def close(self, within_s: float = 5.0) -> int:
        """Cancel everything, close the children, end the threads. Idempotent.

        Whoever waits for an outcome gets it, with ``held`` where a call has not come back; ``released`` is called when
        it does, also after this. Takes about ``within_s`` seconds at most. Returns how many threads are stuck in a
        connector's call that does not come back.
        """
        ends_at = time.monotonic() + within_s
        with self._change:
            if self._closed:
                return 0
            self._closed = True
            requests = {request for request, _ in self._errands}
        for request in requests:
            self.cancel(request)
        with self._change:
            self._change.wait_for(lambda: not self._errands, timeout=within_s)
            slots, self._slots = list(self._slots.values()), {}
        for slot in slots:
            slot.finish(min(CLOSE_S, max(0.0, ends_at - time.monotonic())))
        for slot in slots:
            slot.shut()
        stuck = sum(slot.close(max(0.0, ends_at - time.monotonic())) for slot in slots)
        return stuck + self._driver.close(max(CLOSE_S, ends_at - time.monotonic()))

    def _run(self, side: Side, request: str, cargo: Cargo, tickets: tuple[Ticket, ...], within_s: float) -> Outcome:
        errand = _Errand(cargo, tickets, threading.Event())
        began = False
        try:
            with self._change:  # nothing comes between the errand and its beginning
                self._require_free(side, request)
                began = True
                self._errands[request, side] = errand
                self._driver.step(self._beginning(side, request, errand, within_s))
            self._driver.tell()
            errand.done.wait()
        except (KeyboardInterrupt, SystemExit):
            if began:
                self._give_up(side, request, errand)
            raise
        finally:
            if began:
                self._release(tickets)
        if errand.outcome is None:
            raise errors.Closed("the layer was closed before the outcome", request=request)
        return errand.outcome

    def _require_free(self, side: Side, request: str) -> None:
        if self._closed:
            raise errors.Closed("the layer is closed", request=request)
        if (request, side) in self._errands:
            what = f"a {side.value} of it is in progress"
            raise errors.RequestBusy(what, request=request, remedy="wait for its outcome or cancel it")

    def _beginning(self, side: Side, request: str, errand: _Errand, within_s: float) -> Event:
        plan = tuple(dict.fromkeys([*(ticket.child for ticket in errand.tickets), *self._present()]))
        start, stop = errand.cargo.start, errand.cargo.stop
        return Event(Kind.BEGIN, side, request, plan=plan, start=start, stop=stop, within_s=within_s)

    def _give_up(self, side: Side, request: str, errand: _Errand) -> None:
        """Its caller was interrupted: until the outcome is there, somebody may be at the caller's blocks."""
        self._cancel(request, side)
        with self._change:
            owed = self._driver.ledger.busy(request, side)
        if owed:
            errand.done.wait()
        with self._change:  # where the interrupt came before the beginning, no outcome will
            if self._errands.get((request, side)) is errand:
                del self._errands[request, side]

    def _cancel(self, request: str, side: Side) -> None:
        self._driver.feed(Event(Kind.CANCEL, side, request))
        if side is Side.SAVE:
            with self._change:
                slots = [slot for slot in self._slots.values() if slot.leases is not None]
            for slot in slots:
                if slot.leases is not None:
                    slot.release(slot.leases.of(request))

    def _release(self, tickets: tuple[Ticket, ...]) -> None:
        """The source waits for it, also where its child was not needed."""
        named: dict[str, list[Ticket]] = {}
        for ticket in tickets:
            named.setdefault(ticket.child, []).append(ticket)
        with self._change:
            slots = [(self._slots[child], named[child]) for child in named if child in self._slots]
        for slot, its in slots:
            slot.release(its)

    def _present(self) -> list[str]:
        """The children's names, without those that are gone and have left something. Under the lock."""
        children = self._driver.ledger.children
        return [name for name in children if children[name].status is not Status.REMOVED]

    def _refusal(self, child: str) -> errors.KvbelayError | None:
        """Why no child of that name can be added. Under the lock."""
        if self._closed:
            return errors.Closed("the layer is closed", child=child)
        if child and child not in self._present():
            return None
        what = "a child needs a name" if not child else f"there is a child named {child!r} already"
        return errors.ConfigError(what, field="name", remedy="give every child a name of its own")

    def _launch(self, action: Action) -> Attempt | Failure:
        """Make the attempt that the ledger wants. Under the lock."""
        operation = "get" if action.side is Side.LOAD else "put"
        where = Where(action.child, operation, action.request, action.epoch)
        slot = self._slots.get(action.child)
        errand = self._errands.get((action.request, action.side))
        if slot is None or errand is None:
            return fail(errors.ChildUnavailable("it was removed"), where)
        attempt = Attempt(slot, where, action.side, errand.cargo, start=action.start, within_s=action.within_s)
        if action.side is Side.LOAD:
            attempt.tickets.extend(ticket for ticket in errand.tickets if ticket.child == action.child)
        errand.attempts.append(attempt)
        return attempt

    def _told(self, outcome: Outcome) -> None:
        """Wake the caller. Under the lock."""
        errand = self._errands.pop((outcome.request, outcome.side), None)
        if errand is None:
            return
        saved = [attempt for attempt in errand.attempts if attempt.landed and outcome.result is Result.SAVED]
        errand.outcome = msgspec.structs.replace(
            outcome,
            nbytes=sum(attempt.nbytes for attempt in errand.attempts),
            tickets=tuple(ticket for attempt in saved for ticket in attempt.tickets),
        )
        errand.done.set()


def _open(opener: Callable[[], Connector], child: str, arena_nbytes: int) -> Connector | Failure:
    """An open connector that keeps the port's promise, or why there is none; then nothing of it is open."""
    where = Where(child, "open")
    opened: Any = contain(opener, where)
    if is_a(opened, Failure):
        return opened
    lacking = [name for name in METHODS if not callable(peek(opened, name))]
    if lacking:
        return fail(errors.UnknownShape(f"a {type_name(opened)!r} was opened, which lacks {', '.join(lacking)}"), where)
    connector = contain(lambda: fenced(opened, child=child, arena_nbytes=arena_nbytes), where)
    if is_a(connector, Failure):
        contain(lambda: opened.close(), Where(child, "close"))  # noqa: PLW0108  # reading it may raise
    return connector
