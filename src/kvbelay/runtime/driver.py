"""The driver: ledger and gate behind one lock, the thread that keeps the time, and the attempts in flight.

Whatever happens while the lock is held is quick and waits for nothing. Hooks are called after it is released, one at
a time and in order.
"""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from kvbelay import errors
from kvbelay.core.boundary import Where, fail, is_a
from kvbelay.core.gate import Gate
from kvbelay.core.ledger import Ledger
from kvbelay.core.model import Action, Do, Event, Failure, Kind, Order, Outcome, Report, Side, Swallow
from kvbelay.core.policy import Policy
from kvbelay.runtime.attempt import Attempt, Word, run
from kvbelay.runtime.pool import contain

News = Event | Report | Action
Watch = Callable[[News, float], None]


class Driver:
    """Runs the ledger's actions.

    ``launch`` makes the attempt that an action starts, or says why there is none; ``told`` hears each outcome (both
    under the lock). ``watch`` and ``released`` are hooks of the user's.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        launch: Callable[[Action], Attempt | Failure],
        told: Callable[[Outcome], None],
        watch: Watch | None,
        released: Callable[[str, Side], None] | None,
        seed: int | None,
    ) -> None:
        self.ledger = Ledger(policy, random=random.Random(seed).random)  # noqa: S311  # jitter
        self.gate = Gate()
        self.change = threading.Condition()
        self.attempts: dict[tuple[str, Side, str], Attempt] = {}
        self.hook_failures: list[Failure] = []
        self._launch = launch
        self._told = told
        self._watch = watch
        self._released = released
        self._news: deque[tuple[News, float]] = deque()
        self._telling = threading.Lock()
        self._closed = False
        self._timer = threading.Thread(target=self._keep_time, name="kvbelay-timer", daemon=True)
        self._timer.start()

    def feed(self, thing: Event) -> None:
        """Let something happen, and do what follows from it."""
        with self.change:
            self.step(thing)
        self.tell()

    def overheard(self, child: str, side: Side, request: str, failure: Failure | None, epoch: int | None) -> None:
        """A child's word on a request that did not come from the attempt itself; no failure: it speaks well of it."""
        with self.change:
            attempt = self.attempts.get((request, side, child))
            fits = attempt is not None and epoch in {None, attempt.where.epoch}
            if fits and failure is None:
                self.gate.swallowed[child, Swallow.EARLY] += 1
                return
            self.step(self.gate.hear(child, side, request, Kind.BROKEN, epoch=epoch, failure=failure))
            if attempt is not None and fits:
                self.step(self._call_off(attempt))
        self.tell()

    def lease_ended(self, child: str, request: str, epoch: int) -> None:
        """Nobody reads any more what that attempt published."""
        with self.change:
            attempt = self.attempts.get((request, Side.SAVE, child))
            if attempt is not None and attempt.where.epoch == epoch:
                attempt.quiet = True  # it has not ended itself yet, and will say so when it does
                return
            self.step(self.gate.hear(child, Side.SAVE, request, Kind.DRAINED, epoch=epoch))
        self.tell()

    def close(self, within_s: float) -> int:
        """End the time-keeping: whatever still waits for its time gets it now, so that nobody waits for an outcome.

        Returns 1 if its thread is stuck in a hook.
        """
        with self.change:
            self._closed = True
            while (due := self.ledger.due()) is not None:
                self._expire(due, time.monotonic())
            self.change.notify_all()
        self.tell()
        mine = self._timer is threading.current_thread()
        if not mine:
            self._timer.join(within_s)
        return int(self._timer.is_alive() and not mine)

    def step(self, thing: Event | Report | None) -> None:
        """Under the lock: let something happen, and do what follows; `tell` the hooks when the lock is released."""
        todo: deque[Event | Report] = deque([thing] if thing is not None else [])
        while todo:
            now = time.monotonic()
            item = todo.popleft()
            self._news.append((item, now))
            todo.extend(self._act(self.ledger.handle(item, now), now))
        self.change.notify_all()

    def _act(self, actions: tuple[Action, ...], now: float) -> list[Report]:
        reports: list[Report | None] = []
        for action in actions:
            self._news.append((action, now))
            if action.do is Do.START:
                reports.append(self._start(action, now))
            elif action.do is Do.ABORT:
                reports.extend(self._abort(action, now))
            elif action.do is Do.TELL and action.outcome is not None:
                if not self.ledger.remembers(action.request, action.side):
                    self.gate.forget(action.request, action.side)
                self._told(action.outcome)
            elif action.do is Do.RELEASE:
                self.gate.forget(action.request, action.side)
        return [report for report in reports if report is not None]

    def _start(self, action: Action, now: float) -> Report | None:
        self.gate.obey(_order(action), now)
        attempt = self._launch(action)
        if isinstance(attempt, Failure):
            return self._said(action, Kind.FAILED, attempt)
        slot = attempt.slot
        if slot.stuck >= slot.pool.size:
            self.ledger.children[slot.name].circuit.trip(now)
            error = errors.PoolExhausted(f"all {slot.stuck} threads are stuck in calls that do not come back")
            return self._said(action, Kind.FAILED, fail(error, attempt.where))
        key = (action.request, action.side, action.child)
        self.attempts[key] = attempt
        refused = contain(lambda: slot.pool.submit(partial(self._work, attempt)), attempt.where)
        if isinstance(refused, Failure):
            del self.attempts[key]
            return self._said(action, Kind.FAILED, refused)
        return None

    def _abort(self, action: Action, now: float) -> list[Report | None]:
        reports = [self.gate.obey(_order(action), now)]
        attempt = self.attempts.get((action.request, action.side, action.child))
        if attempt is not None:
            reports.append(self._call_off(attempt))
        return reports

    def _call_off(self, attempt: Attempt) -> Report | None:
        """It is wanted no longer; its call says when nobody touches the blocks any more."""
        if attempt.called_off:
            return None
        attempt.called_off = True
        attempt.until.cancel()
        if attempt.running:
            attempt.slot.stuck += 1
            return None
        where = attempt.where  # no thread has taken it up, and none will
        del self.attempts[where.request, attempt.side, where.child]
        return self.gate.hear(where.child, attempt.side, where.request, Kind.DRAINED, epoch=where.epoch)

    def _said(self, action: Action, kind: Kind, failure: Failure | None) -> Report | None:
        return self.gate.hear(action.child, action.side, action.request, kind, epoch=action.epoch, failure=failure)

    def _work(self, attempt: Attempt) -> None:
        """One attempt, on a thread of its child's pool."""
        if not self._taken_up(attempt):
            return
        word = run(attempt, lambda stop: self._finish(attempt, Word(Kind.LANDED, stop=stop), over=False))
        leased = [ticket for ticket in attempt.tickets if ticket.lease_s is not None]
        leases = attempt.slot.leases
        if attempt.side is Side.SAVE and leased and leases is not None:
            lease = (attempt.where.request, attempt.where.epoch)
            if not leases.add(leased, lease):
                with self.change:
                    attempt.quiet = True
        self._finish(attempt, word, over=True)
        if attempt.side is Side.SAVE and (attempt.called_off or word.kind is not Kind.LANDED):
            attempt.slot.release(leased)

    def _taken_up(self, attempt: Attempt) -> bool:
        """Whether it is still wanted now that a thread is free for it."""
        with self.change:
            attempt.running = not attempt.called_off
            return attempt.running

    def _finish(self, attempt: Attempt, word: Word, *, over: bool) -> None:
        where = attempt.where
        key = (where.request, attempt.side, where.child)
        kind = word.kind
        with self.change:
            if attempt.called_off and not over:
                return
            if over:
                del self.attempts[key]
                attempt.landed = kind is Kind.LANDED and not attempt.called_off
                attempt.slot.stuck -= attempt.called_off
                if attempt.quiet and kind is Kind.BROKEN:
                    kind = Kind.FAILED
            leased = word.leased and not attempt.quiet
            if attempt.called_off and (leased or kind is Kind.BROKEN):
                return  # it was told already; the end of its leases will be its end
            report = self.gate.hear(
                where.child,
                attempt.side,
                where.request,
                kind,
                epoch=where.epoch,
                stop=word.stop,
                leased=leased,
                failure=word.failure,
            )
            self.step(report)
        self.tell()

    def _keep_time(self) -> None:
        while True:
            with self.change:
                if self._closed:
                    return
                due = self.ledger.due()
                now = time.monotonic()
                if due is None or due > now:
                    self.change.wait(None if due is None else due - now)
                    continue
                self._expire(now, now)
                self.change.notify_all()
            self.tell()

    def _expire(self, until: float, now: float) -> None:
        for report in self._act(self.ledger.expire(until), now):
            self.step(report)

    def tell(self) -> None:
        """Call the hooks with what has happened. Whoever comes while another is at it leaves it to that one."""
        while self._news and self._telling.acquire(blocking=False):
            try:
                while self._news:
                    thing, at = self._news.popleft()
                    self._hook(thing, at)
            finally:
                self._telling.release()

    def _hook(self, thing: News, at: float) -> None:
        results: list[object] = []
        if self._watch is not None:
            watch = self._watch
            results.append(contain(lambda: watch(thing, at), Where("", "watch")))
        if self._released is not None and isinstance(thing, Action) and thing.do is Do.RELEASE:
            released = self._released
            results.append(contain(lambda: released(thing.request, thing.side), Where("", "released", thing.request)))
        self.hook_failures.extend(result for result in results if is_a(result, Failure))
        del self.hook_failures[:-HOOK_FAILURES]


HOOK_FAILURES = 16
"""How many failures of hooks are kept."""


def _order(action: Action) -> Order:
    abort = action.do is Do.ABORT
    return Order(
        action.request, action.side, action.child, action.epoch, action.within_s, stop=action.stop, cancel=abort
    )
