"""Gates and a ledger in simulated time, without I/O: what golden traces, property tests and the simulator drive."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable

from kvbelay.core.gate import Gate, in_order, merge
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Order, Outcome, Report, Side, Swallow
from kvbelay.core.policy import Policy


class Simulation:
    """One engine: a ledger, and a gate on each rank.

    ``log`` holds every action in order with its time; ``told`` the outcomes; ``watch`` is called with each event that
    happens to the system and each action it takes, and may raise. Orders and reports travel at once or, if not
    ``instant``, when `carry_down` and `carry_up` are called.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        *,
        ranks: int = 1,
        watch: Callable[[object, float], None] | None = None,
        instant: bool = True,
    ) -> None:
        self.now = 0.0
        self.ledger = Ledger(policy or Policy(), ranks=ranks)
        self.gates = [Gate(rank) for rank in range(ranks)]
        self.log: list[tuple[float, Action]] = []
        self.told: list[Outcome] = []
        self.orders: list[deque[Order | tuple[str, Side]]] = [deque() for _ in range(ranks)]
        """On their way to each rank; a request and side: nothing more is expected of it."""
        self.reports: list[Report] = []
        """On their way to the ledger."""
        self._instant = instant
        self._watch = watch or (lambda _thing, _now: None)

    def add(self, name: str, *, epochs: bool = True, unavailable: Failure | None = None) -> None:
        """Add a child."""
        self.ledger.children.add(name, epochs=epochs, unavailable=unavailable)
        for gate in self.gates:
            gate.know(name)

    def begin(
        self,
        side: Side,
        request: str,
        stop: int,
        plan: Iterable[str],
        *,
        start: int = 0,
        within_s: float = 30.0,
        bystanders: Iterable[str] = (),
        observed: bool = False,
    ) -> None:
        """The host begins a transfer."""
        self._handle(
            Event(
                Kind.BEGIN,
                side,
                request,
                plan=tuple(plan),
                bystanders=tuple(bystanders),
                observed=observed,
                start=start,
                stop=stop,
                within_s=within_s,
            )
        )

    def cancel(self, side: Side, request: str) -> None:
        """The host wants nothing more of it."""
        self._handle(Event(Kind.CANCEL, side, request))

    def lose(self, child: str) -> None:
        """A child is removed, or dead."""
        self._handle(Event(Kind.LOST, child=child))

    def say(
        self,
        child: str,
        side: Side,
        request: str,
        kind: Kind,
        *,
        ranks: Iterable[int] | None = None,
        epoch: int | None = None,
        stop: int = 0,
        leased: bool = False,
        failure: Failure | None = None,
    ) -> None:
        """A child says something on some ranks (all, if none are named)."""
        for rank in range(len(self.gates)) if ranks is None else ranks:
            report = self.gates[rank].hear(
                child, side, request, kind, epoch=epoch, stop=stop, leased=leased, failure=failure
            )
            self._report(report)

    def wait(self, seconds: float) -> None:
        """Let time pass; every timer on the way acts at its own time."""
        until = self.now + seconds
        while (due := self.due()) is not None and due <= until:
            self.now = max(self.now, due)
            for gate in self.gates:
                for report in gate.expire(self.now):
                    self._report(report)
            self._act(self.ledger.expire(self.now))
        self.now = until

    def carry_down(self, rank: int) -> None:
        """What is on its way to a rank arrives."""
        gate, orders = self.gates[rank], self.orders[rank]
        while orders:
            order = orders.popleft()
            if isinstance(order, Order):
                self._report(gate.obey(order, self.now))
            else:
                gate.forget(*order)

    def carry_up(self, reports: Iterable[Report] | None = None) -> None:
        """Some of the reports that are on their way arrive, as one set; all of them, if none are named."""
        arriving = self.reports if reports is None else list(reports)
        self.reports = [report for report in self.reports if report not in arriving]
        for report in in_order(merge(frozenset(arriving))):
            self._take(report)

    def due(self) -> float | None:
        """The earliest timer of all."""
        times = [self.ledger.due(), *(gate.due() for gate in self.gates)]
        return min((time for time in times if time is not None), default=None)

    def swallowed(self) -> Counter[tuple[str, Swallow]]:
        """What gates and ledger swallowed."""
        return sum((gate.swallowed for gate in self.gates), Counter(self.ledger.swallowed))

    def leftovers(self) -> int:
        """Records and latches that are still there."""
        return len(self.ledger) + sum(len(gate) for gate in self.gates)

    def _report(self, report: Report | None) -> None:
        if report is not None and self._instant:
            self._take(report)
        elif report is not None:
            self.reports.append(report)

    def _take(self, report: Report) -> None:
        self._watch(report, self.now)
        self._act(self.ledger.handle(report, self.now))

    def _handle(self, event: Event) -> None:
        self._watch(event, self.now)
        self._act(self.ledger.handle(event, self.now))

    def _act(self, actions: tuple[Action, ...]) -> None:
        for action in actions:
            self.log.append((self.now, action))
            self._watch(action, self.now)
            self._carry_out(action)

    def _carry_out(self, action: Action) -> None:
        if action.do in {Do.START, Do.WATCH, Do.ABORT}:
            order = Order(
                action.request,
                action.side,
                action.child,
                action.epoch,
                action.within_s,
                stop=action.stop,
                cancel=action.do is Do.ABORT,
            )
            self._send(order)
        elif action.do is Do.TELL and action.outcome is not None:
            self.told.append(action.outcome)
            if not self.ledger.remembers(action.request, action.side):
                self._send((action.request, action.side))
        elif action.do is Do.RELEASE:
            self._send((action.request, action.side))

    def _send(self, order: Order | tuple[str, Side]) -> None:
        for orders in self.orders:
            orders.append(order)
        for rank in range(len(self.gates)) if self._instant else ():
            self.carry_down(rank)
