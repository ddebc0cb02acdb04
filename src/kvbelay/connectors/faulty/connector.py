"""A connector around another one, that breaks as planned."""

from __future__ import annotations

import errno
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from kvbelay.connectors.faulty.effects import EFFECTS, Blow, land, load_elsewhere
from kvbelay.connectors.faulty.plan import Fault, Operation, Plan, Strike, Struck
from kvbelay.connectors.port import Connector, Deadline, Publishes, Unfenced
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.core import boundary
from kvbelay.core.model import BatchId, BatchResult, Failure, Miss, Ticket, TransferBatch
from kvbelay.errors import Closed, DeadlineExceeded, PeerLost

LOOK_S = 0.005
"""How often, in seconds, a call that waits looks whether it may go on."""
JOIN_S = 2.0
"""How long, in seconds, close waits for each of the connector's threads."""

log = logging.getLogger(__name__)


class Faulty(Wrapper):
    """Makes the strikes of a plan at the calls of ``inner``; what no strike hits goes through unchanged.

    It is `Unfenced` if the plan has late writes or ``inner`` is: wrap it in `kvbelay.connectors.staged.Staged` then.

    Parameters
    ----------
    inner
        Any connector.
    plan
        What strikes.
    child
        The connector's name.
    struck
        Hears of each strike, before it takes effect.
    echo
        Hears request, epoch and result of completions that are told once more (`Fault.DUPLICATE`, `Fault.LATE`).
    """

    digest_in_pass: ClassVar[bool] = False
    """Its results may lie: whoever believes them checks the destination."""

    def __init__(
        self,
        inner: Connector,
        plan: Plan,
        *,
        child: str,
        struck: Callable[[Struck], None] | None = None,
        echo: Callable[[str, int, object], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        if isinstance(inner, Publishes):
            self._inner_released = self.released
            self.released = self._released
        if isinstance(inner, Unfenced) or any(strike.fault is Fault.LATE_WRITE for strike in plan.strikes):
            self._inner_drain = self.drain if isinstance(inner, Unfenced) else None
            self.drain = self._drain
        self._child = child
        self._schedule = _Schedule(plan)
        self._dice = random.Random(f"{plan.seed} bits")  # noqa: S311  # reproducible, and nobody's secret
        self._tell = struck
        self._echo = echo
        self._clock = clock
        self._dead_until = self._frozen_until = -math.inf
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._going = threading.Event()
        self._threads: list[threading.Thread] = []
        self._writers: list[tuple[TransferBatch, threading.Thread]] = []
        self._own_effects: Mapping[Fault, Callable[[Blow], Any]] = {
            Fault.DROP: self._drop,
            Fault.DUPLICATE: self._duplicate,
            Fault.LATE: self._late,
            Fault.HANG: self._hang,
            Fault.DIE: self._strike_dead,
            Fault.FREEZE: self._strike_frozen,
            Fault.LATE_WRITE: self._late_write,
        }

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        tickets: Sequence[Ticket] = self._make(Operation.LOOKUP, partial(self.inner.lookup, ids, within), within)
        return tickets

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        ticket: Ticket = self._make(Operation.PUT, partial(self.inner.put, batch, within), within, batch)
        return ticket

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        call = partial(self.inner.get, batch, ticket, within)
        result: BatchResult | Miss = self._make(Operation.GET, call, within, batch, ticket)
        return result

    def release(self, ticket: Ticket, within: Deadline) -> None:
        self._make(Operation.RELEASE, partial(self.inner.release, ticket, within), within)

    def probe(self, within: Deadline) -> None:
        self._make(Operation.PROBE, partial(self.inner.probe, within), within)

    def let_go(self) -> None:
        """End the calls that hang now."""
        with self._lock:
            going, self._going = self._going, threading.Event()
        going.set()

    def die(self, seconds: float = math.inf) -> None:
        """From now on every call says that the peer is lost."""
        self._dead_until = self._clock() + seconds

    def revive(self) -> None:
        """End a death."""
        self._dead_until = -math.inf

    def freeze(self, seconds: float = math.inf) -> None:
        """From now on every call waits."""
        self._frozen_until = self._clock() + seconds

    def thaw(self) -> None:
        """End a frost."""
        self._frozen_until = -math.inf

    def close(self) -> None:
        """Close the inner one, end calls that wait, and join threads; echoes and late writes still to come do not."""
        self._closing.set()
        self.let_go()
        self.inner.close()
        with self._lock:
            threads = [*self._threads]
        for thread in threads:
            thread.join(JOIN_S)

    def _make(
        self,
        operation: Operation,
        call: Callable[[], Any],
        within: Deadline,
        batch: TransferBatch | None = None,
        ticket: Ticket | None = None,
    ) -> Any:
        self._serve(operation, within)
        request, epoch = (batch.request, batch.epoch) if batch is not None else ("", 0)
        number, strike = self._schedule.next(operation, request)
        if strike is None:
            return call()
        if self._tell is not None:
            record = Struck(self._child, strike.fault, operation, number, request, epoch)
            self._hook(partial(self._tell, record))
        blow = Blow(strike, self.inner, call, within, batch, ticket, self._dice)
        effect = self._own_effects.get(strike.fault) or EFFECTS[strike.fault]
        return effect(blow)

    def _serve(self, operation: Operation, within: Deadline) -> None:
        """Raise if the peer is dead; wait while it is frozen."""
        while self._clock() < self._frozen_until:
            self._pause(within)
        if self._clock() < self._dead_until:
            msg = "the peer is down, as planned"
            raise PeerLost(msg, child=self._child, operation=operation.value)

    def _pause(self, within: Deadline) -> None:
        if self._closing.is_set():
            msg = "the connector was closed"
            raise Closed(msg, child=self._child)
        within.sleep(LOOK_S)

    def _drop(self, blow: Blow) -> Any:
        blow.call()
        while True:
            self._pause(blow.within)

    def _duplicate(self, blow: Blow) -> Any:
        result = blow.call()
        self._say_again(blow, result)
        return result

    def _late(self, blow: Blow) -> Any:
        result = blow.call()
        self._afterwards(blow.strike.seconds, partial(self._say_again, blow, result))
        return result

    def _hang(self, blow: Blow) -> Any:
        with self._lock:
            going = self._going
        if not self._closing.is_set():
            going.wait(blow.strike.seconds or None)
        if self._closing.is_set():
            msg = "the connector was closed"
            raise Closed(msg, child=self._child)
        blow.within.remaining_s()
        return blow.call()

    def _strike_dead(self, blow: Blow) -> Any:
        self.die(blow.strike.seconds or math.inf)
        self._serve(blow.strike.operation, blow.within)
        return blow.call()

    def _strike_frozen(self, blow: Blow) -> Any:
        self.freeze(blow.strike.seconds or math.inf)
        self._serve(blow.strike.operation, blow.within)
        return blow.call()

    def _late_write(self, blow: Blow) -> Any:
        _, memory = load_elsewhere(blow)
        stale = memoryview(bytes(byte ^ 0xFF for byte in memory))
        writer = self._afterwards(blow.strike.seconds, partial(land, blow.moved, stale))
        with self._lock:
            self._writers.append((blow.moved, writer))
        raise ConnectionResetError(errno.ECONNRESET, "connection reset by the plan; a writer is still at it")

    def _released(self, within: Deadline) -> Sequence[Ticket]:
        tickets: Sequence[Ticket] = self._make(Operation.RELEASED, partial(self._inner_released, within), within)
        return tickets

    def _drain(self, batch: TransferBatch, within: Deadline) -> bool:
        with self._lock:
            mine = [thread for other, thread in self._writers if _same_attempt(other, batch)]
        try:
            for thread in mine:
                while thread.is_alive():
                    thread.join(min(within.remaining_s(), LOOK_S))
        except DeadlineExceeded:
            return False
        return self._inner_drain is None or self._inner_drain(batch, within)

    def _say_again(self, blow: Blow, result: object) -> None:
        if self._echo is not None:
            self._hook(partial(self._echo, blow.moved.request, blow.moved.epoch, result))

    def _afterwards(self, seconds: float, action: Callable[[], None]) -> threading.Thread:
        def wait_and_act() -> None:
            if not self._closing.wait(seconds):
                self._hook(action)

        thread = threading.Thread(target=wait_and_act, name=f"kvbelay faulty {self._child}", daemon=True)
        with self._lock:
            self._threads = [*(other for other in self._threads if other.is_alive()), thread]
            self._writers = [(batch, other) for batch, other in self._writers if other.is_alive()]
            thread.start()
        return thread

    def _hook(self, action: Callable[[], None]) -> None:
        said = boundary.call(action, boundary.Where(self._child, "hook"))
        if isinstance(said, Failure):
            log.warning("a hook of connector %r raised: %s", self._child, said.detail)


def _same_attempt(one: TransferBatch, other: TransferBatch) -> bool:
    return (one.request, one.epoch, one.id) == (other.request, other.epoch, other.id)


class _Schedule:
    """Counts the calls, and says which strike is due."""

    def __init__(self, plan: Plan) -> None:
        self._lock = threading.Lock()
        self._calls = dict.fromkeys(Operation, 0)
        self._seen = [0] * len(plan.strikes)
        self._left = [strike.times for strike in plan.strikes]
        self._strikes = [
            (strike, random.Random(f"{plan.seed} {index}"))  # noqa: S311  # reproducible, and nobody's secret
            for index, strike in enumerate(plan.strikes)
        ]

    def next(self, operation: Operation, request: str) -> tuple[int, Strike | None]:
        """The number of this call of the operation, and the strike that hits it."""
        with self._lock:
            self._calls[operation] += 1
            due: int | None = None
            for index, (strike, dice) in enumerate(self._strikes):
                if strike.operation is not operation or strike.request not in {"", request}:
                    continue
                self._seen[index] += 1
                drawn = dice.random() < strike.rate  # at every call, so that one strike never changes another's luck
                ripe = self._seen[index] >= strike.nth if strike.nth else drawn
                if due is None and self._left[index] and ripe:
                    due = index
            if due is None:
                return self._calls[operation], None
            self._left[due] -= 1
            return self._calls[operation], self._strikes[due][0]
