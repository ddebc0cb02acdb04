"""`Belay`: the multi connector of the embedded data plane.

Decisions are taken by the ledger under one lock, which never waits for anything; connectors run on their own bounded
threads. A caller of `load` or `save` waits for the one outcome of its request, whatever the connectors do.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from kvbelay import errors
from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import fenced
from kvbelay.core import verdict
from kvbelay.core.boundary import Where, call, fail
from kvbelay.core.children import Status
from kvbelay.core.circuit import CircuitState
from kvbelay.core.model import Action, Event, Failure, Kind, Outcome, Side, Swallow, Ticket, TransferBatch
from kvbelay.core.policy import Policy
from kvbelay.runtime.attempt import Attempt
from kvbelay.runtime.driver import Driver, Watch
from kvbelay.runtime.plan import Cargo
from kvbelay.runtime.slot import Slot

ARENA_NBYTES = 256 << 20
"""Size of the arena of a child that has to be staged, unless it is given."""


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

    What a hook raises is dropped; the last such failures stand in ``hook_failures``.
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
        Raises `ConfigError` if the name is taken or empty.
        """
        with self._change:
            known = self._driver.ledger.children.get(child)
            if not child or (known is not None and known.status is not Status.REMOVED):
                what = "a child needs a name" if not child else f"there is a child named {child!r} already"
                raise errors.ConfigError(what, field="name", remedy="give every child a name of its own")
        connector = call(lambda: fenced(opener(), child=child, arena_nbytes=arena_nbytes), Where(child, "open"))
        slot = None
        if not isinstance(connector, Failure):
            slot = Slot(child, connector, digest_in_pass=digest_in_pass, threads=self._threads)
            slot.publish(self._driver.lease_ended)
        failure = connector if isinstance(connector, Failure) else None
        with self._change:
            self._driver.ledger.children.add(child, epochs=True, unavailable=failure)
            if slot is not None:
                self._slots[child] = slot
        return failure

    def drain(self, child: str) -> None:
        """Give the child no new transfers; those in flight go on. Raises `ConfigError` if there is no such child."""
        with self._change:
            if child not in self._driver.ledger.children:
                what = f"there is no child named {child!r}"
                raise errors.ConfigError(what, field="name")
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
        return slot.close(drain_s) if slot is not None else 0

    def load(self, request: str, tickets: Iterable[Ticket], into: Iterable[TransferBatch], within_s: float) -> Outcome:
        """Bring batches into the memory of ``into``. Blocks until the outcome.

        ``tickets`` are what the source's `save` gave. Children with tickets are tried first, in the order in which
        they come; the others are asked by `lookup`, in the order in which they were added. The outcome comes at most
        the policy's ``drain_s`` and budget wait after ``within_s`` seconds.
        """
        given = tuple(tickets)
        cargo = Cargo(into)
        with self._change:
            plan = tuple(dict.fromkeys([*(ticket.child for ticket in given), *self._driver.ledger.children]))
        event = Event(Kind.BEGIN, Side.LOAD, request, plan=plan, start=cargo.start, stop=cargo.stop, within_s=within_s)
        outcome = self._run(event, cargo, given)
        with self._change:
            slots = [(self._slots.get(ticket.child), ticket) for ticket in given]
        for slot, ticket in slots:  # also those of children that were not needed: their source waits for it
            if slot is not None:
                slot.release([ticket])
        return outcome

    def save(self, request: str, batches: Iterable[TransferBatch], within_s: float) -> Outcome:
        """Hand batches to all children at once. Blocks until the outcome, which carries the tickets.

        ``outcome.held`` says that readers are served from the batches' own memory: keep it until ``released`` is
        called, or take it back with `cancel`.
        """
        cargo = Cargo(batches)
        with self._change:
            plan = tuple(self._driver.ledger.children)
        event = Event(Kind.BEGIN, Side.SAVE, request, plan=plan, start=cargo.start, stop=cargo.stop, within_s=within_s)
        return self._run(event, cargo, ())

    def cancel(self, request: str) -> None:
        """Nothing more is wanted of the request: transfers in flight are aborted, leases are withdrawn."""
        for side in Side:
            self._driver.feed(Event(Kind.CANCEL, side, request))
        with self._change:
            slots = list(self._slots.values())
        for slot in slots:
            if slot.leases is not None:
                slot.release(slot.leases.of(request))

    def heard(self, child: str, side: Side, request: str, result: object, *, epoch: int | None = None) -> None:
        """A completion that came by another way than the return of the call, such as an engine's own thread.

        It can only make matters worse: a failure aborts the attempt that it fits, and a success is swallowed, since
        the return of the call is what says that nobody touches the blocks. What fits no attempt is swallowed too.
        Does not raise, whatever ``result`` is.
        """
        where = Where(child, "heard", request, epoch or 0)
        read = call(lambda: verdict.read(result, where), where)
        failure = read if isinstance(read, Failure) else None
        with self._change:
            attempt = self._driver.attempts.get((request, side, child))
            if attempt is not None and epoch in {None, attempt.where.epoch}:
                if failure is None:
                    self._driver.gate.swallowed[child, Swallow.EARLY] += 1
                    return
                attempt.until.cancel()
        self._driver.hear((request, side, child), Kind.BROKEN, epoch=epoch, failure=failure)

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

        Returns how many threads are stuck in a connector's call that does not come back.
        """
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
        stuck = sum(slot.close(within_s) for slot in slots)
        return stuck + self._driver.close(within_s)

    def _run(self, event: Event, cargo: Cargo, tickets: tuple[Ticket, ...]) -> Outcome:
        key = (event.request, event.side)
        errand = _Errand(cargo, tickets, threading.Event())
        with self._change:
            if self._closed:
                raise errors.Closed("the layer is closed", request=event.request)
            if key in self._errands:
                what = f"a {event.side.value} of it is in progress"
                raise errors.RequestBusy(what, request=event.request, remedy="wait for its outcome or cancel it")
            self._errands[key] = errand
        self._driver.feed(event)
        try:
            errand.done.wait()
        except (KeyboardInterrupt, SystemExit):
            self.cancel(event.request)
            raise
        if errand.outcome is None:
            raise errors.Closed("the layer was closed before the outcome", request=event.request)
        return errand.outcome

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
        saved = [attempt for attempt in errand.attempts if attempt.landed and outcome.side is Side.SAVE]
        errand.outcome = msgspec.structs.replace(
            outcome,
            nbytes=sum(attempt.nbytes for attempt in errand.attempts),
            tickets=tuple(ticket for attempt in saved for ticket in attempt.tickets),
        )
        errand.done.set()
