"""What happens: threads that load, save and cancel, and one that kills, freezes and restarts the peer meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

from kvbelay.core import boundary
from kvbelay.core.model import BatchId, Failure, Outcome, Result, Side, Ticket
from soak.blocks import Blocks, Shape
from soak.layer import Layer
from soak.remote import Remote

THREADS = 4
WITHIN_S = (0.05, 0.3, 2.0, 20.0)
"""How long requests of a storm may take, in seconds."""
TRIES = 20
PAUSE_S = 0.25
"""Between two tries, in seconds: longer than a circuit is open."""
PATIENT_S = 600.0
"""How long a single large request may take."""
PIECE_NBYTES = (64, 1000, 4096, 16 << 10, 64 << 10)
FAULTY_S = (0.05, 0.6)
"""Between two blows at the peer, in seconds."""


class Storm:
    """One layer and one peer, and counts of what was done with them."""

    def __init__(self, layer: Layer, remote: Remote, seed: int) -> None:
        self.layer = layer
        self.remote = remote
        self.seed = seed
        self.wrong: list[str] = []
        self.requests = 0
        self.kills = 0
        self.batches = 0
        self.nbytes = 0
        self._lock = threading.Lock()
        self._numbers = 0

    def rage(self, seconds: float, least: int) -> None:
        """Storm for so long, and until every thread has done ``least`` requests."""
        ends_at = time.monotonic() + seconds
        over = threading.Event()
        self._numbers += 1
        threads = [
            threading.Thread(target=self._guarded(self._work), args=(f"{self._numbers}.{index}", ends_at, least))
            for index in range(THREADS)
        ]
        striker = threading.Thread(target=self._guarded(self._strike), args=(over,))
        for thread in (*threads, striker):
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        striker.join()

    def load_whole(self, request: str, shape: Shape, seed: int) -> None:
        """One request without faults, from a peer that lives: it must arrive as soon as no circuit is open any more."""
        for turn in range(TRIES):
            name = f"{request}.{turn}"
            tickets = self.remote.save(name, shape, seed)
            if self._load(name, shape, tickets, PATIENT_S).result is Result.LOADED:
                return
            time.sleep(PAUSE_S)
        self.wrong.append(f"{request}: {TRIES} loads of {shape} in a row did not arrive")

    def _guarded(self, work: Callable[..., None]) -> Callable[..., None]:
        """A thread that ends of an error is a finding."""

        def run(*args: object) -> None:
            said = boundary.call(partial(work, *args), boundary.Where("soak", "storm"))
            if isinstance(said, Failure):
                self.wrong.append(f"a thread of the storm ended: {said.detail}")

        return run

    def _work(self, name: str, ends_at: float, least: int) -> None:
        dice = random.Random(f"{self.seed} {name}")  # noqa: S311  # reproducible
        turn = 0
        while time.monotonic() < ends_at or turn < least:
            turn += 1
            request = f"{name}.{turn}"
            shape = Shape(dice.randint(1, 6), dice.randint(1, 24), dice.choice(PIECE_NBYTES))
            within_s = dice.choice(WITHIN_S)
            canceller = None
            if dice.random() < 0.2:  # noqa: PLR2004  # one of five
                canceller = threading.Timer(dice.random() * 0.05, self.layer.belay.cancel, (request,))
                canceller.start()
            if dice.random() < 0.25:  # noqa: PLR2004  # one of four
                self._save(request, shape, turn, within_s)
            else:
                tickets = self.remote.save(request, shape, turn)
                self._load(request, shape, dice.sample(tickets, dice.randint(0, len(tickets))), within_s, tickets)
            if canceller is not None:
                canceller.join()

    def _strike(self, over: threading.Event) -> None:
        """Blows at the peer until it is over; one at least."""
        dice = random.Random(f"{self.seed} strike")  # noqa: S311  # reproducible
        while True:
            done = over.wait(dice.uniform(*FAULTY_S))
            if dice.random() < 0.3:  # noqa: PLR2004  # one of three
                self.remote.freeze()
                over.wait(dice.uniform(*FAULTY_S))
                self.remote.thaw()
            else:
                self.kills += 1
                self.remote.restart()
            if done:
                return

    def _save(self, request: str, shape: Shape, seed: int, within_s: float) -> None:
        blocks = Blocks(request, shape).fill(seed)
        before = blocks.digests()
        outcome = self.layer.belay.save(request, blocks.batches, within_s)
        self._count(outcome, shape)
        if outcome.held:
            self.layer.keep(request, Side.SAVE, blocks)
        if blocks.digests() != before:
            self.wrong.append(f"{request}: a save changed its own blocks")

    def _load(
        self,
        request: str,
        shape: Shape,
        tickets: list[Ticket] | tuple[Ticket, ...],
        within_s: float,
        known: tuple[Ticket, ...] = (),
    ) -> Outcome:
        promised: dict[BatchId, bytes | None] = {ticket.batch: ticket.digest for ticket in (*known, *tickets)}
        blocks = Blocks(request, shape)
        outcome = self.layer.belay.load(request, tickets, blocks.batches, within_s)
        self._count(outcome, shape)
        if outcome.held:
            self.layer.keep(request, Side.LOAD, blocks)
        landed = {batch.id: batch for batch in blocks.batches if batch.id.stop <= outcome.watermark}
        digests = blocks.digests() if landed else {}
        for key in landed:
            if promised.get(key, digests[key]) != digests[key]:
                self.wrong.append(f"{request}: tokens before the watermark {outcome.watermark} are wrong")
        return outcome

    def _count(self, outcome: Outcome, shape: Shape) -> None:
        with self._lock:
            self.requests += 1
            self.nbytes += outcome.nbytes
            if outcome.result in {Result.LOADED, Result.SAVED}:
                self.batches += shape.batches
