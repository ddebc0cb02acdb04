"""The gauges of the scheduler's side: what is held back, and who is left alone."""

from __future__ import annotations

from kvbelay.core.ledger import Ledger
from kvbelay.core.series import OPENNESS
from kvbelay.vllm.peers import Peers
from kvbelay.vllm.quarantine import Quarantine
from kvbelay.vllm.series import Series
from kvbelay.vllm.staff import Staff


class Gauges:
    """Shows what has changed since it was shown last."""

    def __init__(self, series: Series, staff: Staff, ledger: Ledger, peers: Peers, quarantine: Quarantine) -> None:
        self._series = series
        self._ledger = ledger
        self._peers = peers
        self._quarantine = quarantine
        self._staff = staff
        self._pullers = tuple(name for name, child in staff.all.items() if child.pulls)
        self._shown: tuple[object, ...] = ()

    def show(self, now: float) -> None:
        """Bring the series up to date."""
        circuits, peers = self._ledger.children.circuits(now), self._peers.shut(now)
        serving = self._staff.serving
        shown = (len(self._quarantine), circuits, peers, serving)
        if shown == self._shown:
            return
        self._shown = shown
        self._series.show("quarantined_blocks", value=len(self._quarantine))
        for name, state in zip(self._ledger.children, circuits, strict=True):
            self._series.show("circuit_open", name, value=OPENNESS[state])
        for name, child in self._staff.all.items():
            self._series.show("child_unavailable", name, value=float(child not in serving))
        for name in self._pullers:
            self._series.show("peers_open", name, value=peers.get(name, 0))
