"""This engine's link to others, as the desk uses it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbelay import errors
from kvbelay.core.model import Event, Outcome, Report, Side
from kvbelay.link.events import Died, Freed, Told
from kvbelay.link.links import Links
from kvbelay.link.messages import MAX_WRITERS
from kvbelay.vllm import host
from kvbelay.vllm.case import Case
from kvbelay.vllm.checking import Checking
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.host import Shape
from kvbelay.vllm.lines import Lines
from kvbelay.vllm.metadata import GuardWorkerMetadata
from kvbelay.vllm.offering import Offering
from kvbelay.vllm.options import GuardOptions, Verify
from kvbelay.vllm.readings import OFFERED, Reading
from kvbelay.vllm.series import Series

log = host.logger(__name__)


class Liaison:
    """``offering`` is None where there is no link. Raises `ConfigError` where it cannot listen."""

    def __init__(
        self, options: GuardOptions, shapes: tuple[Shape, ...], series: Series, *, engine: str, ranks: int
    ) -> None:
        self.links = None if options.link is None else Links(options.link, engine=engine, log=log)
        self.checking = Checking(self.links, shapes, options.verify, series, ranks=ranks)
        self.offering: Offering | None = None
        if self.links is not None:
            verify = options.verify is not Verify.OFF
            self.offering = Offering(self.links, shapes, ranks=ranks, verify=verify)
        self._series = series
        self._freed: list[Freed] = []
        self._lines = Lines(log)

    def arrived(self, case: Case) -> None:
        """A request with parameters has come."""
        if self.offering is not None:
            self.offering.arrived(case.request)
            self.checking.arrived(case)

    def offered(self, scheduler_output: Any) -> tuple[Reading, ...]:
        """What the ranks have to hash after this step."""
        return () if self.offering is None else self.offering.readings(scheduler_output)

    def told(self, request_id: str, offering: list[Guarded], blocks: tuple[list[int], ...]) -> Mapping[str, Any]:
        """A request is over, and offered; what goes to other engines with it."""
        return {} if self.offering is None else self.offering.told(request_id, offering, blocks)

    def sent(self, request_id: str) -> None:
        """The host may use an offer's blocks for something else."""
        if self.offering is not None:
            self.offering.sent(request_id)

    def ended(self, outcome: Outcome) -> None:
        """The ledger has told an outcome."""
        if outcome.side is Side.LOAD:
            self.checking.told(outcome)
        elif self.offering is not None:
            self.offering.failed(outcome)

    def over(self, case: Case) -> None:
        """Nobody waits for the request any more."""
        if self.offering is not None:
            self.offering.over(case.request.request_id)
            self.checking.over(case)

    def freed(self) -> list[Freed]:
        """Offers of this engine that nobody loads any more, since this was asked last; each stands in the log."""
        freed, self._freed = self._freed, []
        for offer in freed:
            kind = offer.kind if hasattr(errors, offer.kind) else errors.PeerFailed.__name__
            self._series.count("failures", "", "remote load", kind)
            text = "kvbelay: engine %s does not load request %s: %s: %s"
            self._lines.warn(kind, text, offer.engine, offer.request, kind, offer.cause)
        return freed

    def learned(self, meta: GuardWorkerMetadata) -> None:
        """What the ranks have to say of themselves, and of blocks that they have hashed."""
        if meta.processes and self.links is not None:
            self.links.offers.writers = tuple({*self.links.offers.writers, *meta.processes})[:MAX_WRITERS]
        for (request_id, epoch), of_ranks in meta.sums.items():
            if epoch != OFFERED:
                self.checking.learned(request_id, epoch, of_ranks)
            elif self.offering is not None:
                self.offering.learned(request_id, of_ranks)

    def hear(self, now: float) -> list[Event | Report]:
        """What the ledger has to know of what was heard. Once a step, before the ranks get their orders: what ends a
        quarantine comes a step after what began it, so that the gates hear of both in turn.
        """
        if self.links is None:
            return []
        found: list[Event | Report] = [*self.checking.ends_of_quarantine()]
        for event in self.links.take():
            if isinstance(event, Told):
                found += self.checking.answered(event.source, event.message, now)
            elif isinstance(event, Died):
                found += self.checking.died(event.source, event.cause)
            else:
                self._freed.append(event)
        return found + self.checking.verdicts(now)

    def close(self) -> None:
        """The engine ends."""
        if self.links is not None:
            self.links.close()
