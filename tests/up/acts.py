"""A storm in acts: in each of them something happens to a server, and afterwards it is well again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from clients import Storm, healthy, prefilled, storm
from ensemble import Up, until

ACT = 34
"""Requests in an act."""
EARLY, LATE = 8, 22
"""The request before which something happens, and the one before which it is over: others are under way."""
PROBES = range(200, 300)
"""Prompts of requests that find out whether all is well."""


class Play:
    """Runs acts through the router, and through an ordinary proxy at the same time."""

    def __init__(self, up: Up, model: str) -> None:
        self.up = up
        self.router, self.ordinary = Storm(), Storm()
        self._model = model
        self._proxy = up.ordinary_proxy()
        self._probes = iter(PROBES)
        until(lambda: healthy(self._proxy, "/ready"), "the ordinary proxy is ready")

    def act(self, at: Mapping[int, Callable[[], None]]) -> None:
        """``at`` names what happens before which request of the router."""
        first = len(self.router.answers)
        numbers = range(first, first + ACT)
        with ThreadPoolExecutor(1) as pool:
            beside = pool.submit(storm, self._proxy, self._model, numbers, clients=4)
            self.router.answers += storm(self.up.urls["router"], self._model, numbers, at).answers
            self.ordinary.answers += beside.result().answers

    def well(self) -> None:
        """Wait until prefill serves, and the router knows."""
        until(lambda: healthy(self.up.urls["prefill-1"]), "prefill serves")
        router = self.up.urls["router"]
        until(lambda: prefilled(router, self._model, next(self._probes)), "requests are prefilled again", 60.0)

    def killed_and_restarted(self) -> None:
        """An act: prefill is killed; then it is started again."""
        self.act({EARLY: lambda: self.up.kill("prefill-1")})
        self.up.restart("prefill-1")
        self.well()

    def frozen(self) -> None:
        """An act: prefill stands still for a while."""
        self.act({EARLY: lambda: self.up.freeze("prefill-1"), LATE: lambda: self.up.thaw("prefill-1")})
        self.well()

    def says(self) -> str:
        """The score."""
        router, ordinary = self.router, self.ordinary
        return (
            f"\nrouter: {len(router.lost())} of {len(router.answers)} requests lost, {router.recomputed()} served "
            f"without prefill; an ordinary proxy: {len(ordinary.lost())} of {len(ordinary.answers)} lost\n"
        )
