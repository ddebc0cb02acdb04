"""What is measured on a pair of engines."""

from __future__ import annotations

from statistics import mean, median

import msgspec

from kvbelay.cli.bench.bars import ratio


class First(msgspec.Struct):
    """Latency of a first token, from the prefill request on: seconds, a round each."""

    tokens: int
    """Of the prompt."""
    off_s: list[float] = []
    """Without verification: the round's median."""
    on_s: list[float] = []

    @property
    def ratio(self) -> float:
        """With verification against without, the median of the rounds' ratios."""
        return ratio(self.on_s, self.off_s)


class Steps(msgspec.Struct):
    """Time between two tokens of one stream while others' KV is loaded: seconds, by round."""

    tokens: int
    """Of each prompt that is loaded."""
    off_s: list[list[float]] = []
    on_s: list[list[float]] = []

    @property
    def median_ratio(self) -> float:
        """With verification against without, the median of the ratios of the rounds' medians."""
        return ratio(map(median, self.on_s), map(median, self.off_s))

    @property
    def mean_ratio(self) -> float:
        """The same of the rounds' means, in which a single long step shows."""
        return ratio(map(mean, self.on_s), map(mean, self.off_s))


class Judged(msgspec.Struct):
    """Loads of the pair that verifies, while time was measured."""

    loads: int = 0
    same: int = 0
    """Compared, and found right. Fewer than there were: less was measured than it seems."""


class Death(msgspec.Struct):
    """How long it takes until the decode side knows that the prefill side is dead: seconds, a death each."""

    what: str
    linked: bool
    decided_s: list[float] = []
    """Until it logs that the load has failed."""
    answered_s: list[float] = []
    """Until the first token, which it then computes itself."""


class Healthy(msgspec.Struct):
    """Loads of which nothing was spoilt."""

    caching: bool
    """Whether prompts that begin alike shared blocks."""
    asked: int
    same: int
    alarms: int
    """Found different."""
    unknown: int
    """Taken without a comparison: the digests came too late."""
    failed: int
    """Not loaded: a deadline, say. The guard's other failures."""
    lengths: int
    """How many lengths of prompts there were."""
    took_s: float


class Paired(msgspec.Struct):
    """All of it."""

    model: str
    first: list[First] = []
    steps: Steps | None = None
    judged: Judged = msgspec.field(default_factory=Judged)
    deaths: list[Death] = []
    healthy: list[Healthy] = []
