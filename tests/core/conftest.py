"""What the ledger's tests share: a truthful world whose actions can be read in words."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.model import Kind, Outcome, Side
from kvbelay.core.policy import Policy
from kvbelay.testing.traces import in_words
from kvbelay.testing.truthful import Truthful


class Scene(Truthful):
    """A world with children; those whose name ends in ``~`` do not number their attempts."""

    def __init__(self, children: str = "a b", policy: Policy | None = None, *, ranks: int = 1) -> None:
        super().__init__(policy, ranks=ranks)
        for child in children.split():
            self.add(child.rstrip("~"), epochs=not child.endswith("~"))
        self._read = 0

    def load(self, request: str = "r", via: str = "a b", **more: object) -> list[str]:
        """Begin a load of 512 tokens."""
        self.simulation.begin(Side.LOAD, request, 512, via.split(), **more)  # type: ignore[arg-type]
        return self.news()

    def save(self, request: str = "r", via: str = "a b", **more: object) -> list[str]:
        """Begin a save of 512 tokens."""
        self.simulation.begin(Side.SAVE, request, 512, via.split(), **more)  # type: ignore[arg-type]
        return self.news()

    def word(self, words: str, why: str = "", **more: object) -> list[str]:
        """``"a load r landed"``: the child says it of its latest attempt; ``why`` names a leaf of errors."""
        child, side, request, kind = words.split()
        attempt = self.latest(child, Side(side), request)
        assert attempt is not None
        if why:
            where = Where(child, "get", request, attempt.epoch)
            more["failure"] = fail(getattr(errors, why)("the test says so"), where)
        self.say(attempt, Kind(kind), **more)  # type: ignore[arg-type]
        return self.news()

    def cancel(self, side: Side = Side.LOAD, request: str = "r") -> list[str]:
        """The host wants nothing more."""
        self.simulation.cancel(side, request)
        return self.news()

    def lose(self, child: str) -> list[str]:
        """A child is removed."""
        self.simulation.lose(child)
        return self.news()

    def wait(self, seconds: float) -> list[str]:
        """Time passes."""
        self.simulation.wait(seconds)
        return self.news()

    def news(self) -> list[str]:
        """What was done since it was last asked."""
        new = self.simulation.log[self._read :]
        self._read = len(self.simulation.log)
        return [in_words(action) for _, action in new]

    def last(self) -> Outcome:
        """The last outcome."""
        return self.simulation.told[-1]


@pytest.fixture
def scene() -> Callable[..., Scene]:
    """Makes a `Scene`."""
    return Scene
