"""What the scheduler's side has to tell the workers with the next step."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata

from kvbelay.core.model import Action, Do, Order, Side
from kvbelay.vllm.metadata import GuardMetadata
from kvbelay.vllm.readings import Reading


class Outbox:
    """Collects between two steps; `take` empties it."""

    def __init__(self) -> None:
        self._clear()

    def order(self, action: Action) -> None:
        """START, WATCH or ABORT, as an order to the gates."""
        abort = action.do is Do.ABORT
        self.orders.append(
            Order(
                action.request, action.side, action.child, action.epoch, action.within_s, stop=action.stop, cancel=abort
            )
        )

    def take(self, children: dict[str, KVConnectorMetadata], *, idle: bool) -> GuardMetadata:
        """All of it, with the children's own metadata, for a step that may be idle."""
        loads = self.orders or self.blocks or self.sync or self.pulses or self.fails or self.forget
        if not (loads or self.offered or self.released or self.wipe):
            return GuardMetadata(children, idle)
        step = GuardMetadata(
            children=children,
            idle=idle,
            orders=tuple(self.orders),
            blocks=self.blocks,
            sync=self.sync,
            pulses=tuple(self.pulses),
            fails=tuple(self.fails),
            forget=tuple(self.forget),
            checks=tuple(self.checks),
            offered=self.offered,
            released=tuple(self.released),
            wipe=tuple(self.wipe),
        )
        self._clear()
        return step

    def _clear(self) -> None:
        self.orders: list[Order] = []
        self.blocks: dict[str, frozenset[int]] = {}
        self.sync: dict[str, frozenset[int]] = {}
        self.pulses: list[tuple[str, Side, str]] = []
        self.fails: list[str] = []
        self.forget: list[tuple[str, Side]] = []
        self.checks: list[Reading] = []
        self.offered: tuple[Reading, ...] = ()
        self.released: list[tuple[str, str]] = []
        self.wipe: list[Reading] = []
