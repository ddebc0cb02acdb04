"""What is measured of the guard for vLLM."""

from __future__ import annotations

from statistics import median

import msgspec

from kvbelay.cli.bench.bars import ratio


class Effort(msgspec.Struct, frozen=True):
    """How much is measured."""

    rounds: int
    steps: int
    """Steps a round, and passes over the layers."""
    batch: int
    """Requests that are loaded, and then saved, at once."""


class Pair(msgspec.Struct):
    """The same work by both: processor time, seconds, a round each."""

    stock_s: list[float] = []
    guard_s: list[float] = []

    @property
    def ratio(self) -> float:
        """The guard's share, the median of the rounds' ratios."""
        return ratio(self.guard_s, self.stock_s)

    @property
    def added_s(self) -> float:
        """What the guard adds, the median of the rounds' differences."""
        return median(guard - stock for guard, stock in zip(self.guard_s, self.stock_s, strict=True))


class Row(msgspec.Struct):
    """One number of children and of running requests."""

    children: int
    running: int
    step: Pair = msgspec.field(default_factory=Pair)
    """All hooks of a step except those in the model."""
    layers: Pair = msgspec.field(default_factory=Pair)
    """The hooks of a model's layers."""
    whole: Pair = msgspec.field(default_factory=Pair)
    """Both."""
    load: Pair = msgspec.field(default_factory=Pair)
    """An asynchronous load, beyond the steps that it takes."""
    save: Pair = msgspec.field(default_factory=Pair)
    """The same of a save."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All of them."""
        return self.step, self.layers, self.whole, self.load, self.save


class Worn(msgspec.Struct):
    """A guard that has seen many requests end, and a new one beside it."""

    ended: int
    new_s: list[float] = []
    """A step of the new one, a round each."""
    worn_s: list[float] = []
    kept: int = 0
    """Objects that the worn one holds more than it held after its first requests."""


class Measured(msgspec.Struct):
    """All of it."""

    vllm: str
    layers: int
    """In the model."""
    rows: list[Row]
    worn: Worn


class Hashed(msgspec.Struct):
    """Blocks of one form, hashed, and copied on the same thread: processor time, seconds, a round each."""

    what: str
    form: str
    bytes: int
    """A round."""
    hash_s: list[float] = []
    copy_s: list[float] = []
    piece_s: list[float] = []
    """The longest piece of a round: nobody who shares the thread waits longer."""

    @property
    def ratio(self) -> float:
        """Throughput against the copy's."""
        return ratio(self.copy_s, self.hash_s)

    @property
    def hash_bytes_per_s(self) -> float:
        """Median throughput."""
        return self.bytes / median(self.hash_s)

    @property
    def copy_bytes_per_s(self) -> float:
        """Median throughput of the copy."""
        return self.bytes / median(self.copy_s)
