"""One circuit for each engine that a P/D child pulls from: one dead prefill engine must not cost the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from kvbelay.core.children import settle
from kvbelay.core.circuit import Circuit, CircuitPolicy, CircuitState
from kvbelay.core.model import Failure, Kind
from kvbelay.vllm.children import Guarded

LIMIT = 1024
"""Peers that are remembered; a client can name any."""
NAME = 128
"""Characters of a peer's name that count."""

NONE: Counter[str] = Counter()

Peer = tuple[str, str]
"""Child, and the engine's own name."""


class Peers:
    """By child and by the ``remote_engine_id`` in a request's parameters."""

    def __init__(self, policy: CircuitPolicy) -> None:
        self._policy = policy
        self._circuits: dict[Peer, Circuit] = {}
        self._blamed: set[Peer] = set()

    def named(self, child: Guarded, request: Any) -> Peer | None:
        """The engine that the request's parameters name; None where the child pulls from nobody."""
        params = request.kv_transfer_params
        name = params.get("remote_engine_id") if isinstance(params, Mapping) else None
        return (child.name, name[:NAME]) if child.pulls and type(name) is str else None

    def circuit(self, peer: Peer) -> Circuit:
        """Its circuit. Of those that were not asked for of late, none is kept."""
        circuit = self._circuits.pop(peer, None) or Circuit(self._policy)
        self._circuits[peer] = circuit
        if len(self._circuits) > LIMIT:
            oldest = next(iter(self._circuits))
            del self._circuits[oldest]
            self._blamed.discard(oldest)
        return circuit

    def ended(self, peer: Peer, kind: Kind, cause: Failure | None, now: float) -> None:
        """A load from it is over."""
        circuit = self.circuit(peer)
        settle(circuit, kind, cause, now)
        if circuit.state(now) is not CircuitState.CLOSED:
            self._blamed.add(peer)

    def shut(self, now: float) -> Counter[str]:
        """How many peers of each child are left alone or probed."""
        if self._blamed:
            self._blamed = {peer for peer in self._blamed if self._circuits[peer].state(now) is not CircuitState.CLOSED}
        return Counter(child for child, _ in self._blamed) if self._blamed else NONE
