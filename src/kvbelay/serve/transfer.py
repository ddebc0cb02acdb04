"""A server's part in P/D: publish the KV of a prompt, or fetch it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvbelay.core.boundary import Where, call
from kvbelay.core.children import Status
from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.model import Failure, Result, Side, Ticket
from kvbelay.core.policy import Policy
from kvbelay.core.wire import decode_tickets, encode_tickets
from kvbelay.errors import ConfigError, ProtocolViolation
from kvbelay.observability.lines import Lines
from kvbelay.observability.prometheus import Metrics
from kvbelay.observability.several import Several
from kvbelay.reference import HeldBlocks, PagedCache
from kvbelay.runtime.belay import Belay
from kvbelay.runtime.config import ChildConfig, Config, open_belay
from kvbelay.serve.settings import Settings

STEP_BLOCKS = 4
"""Blocks in one batch."""
LEASE_S = 20.0
"""How long what nobody fetches is kept."""
SAVE_S = 10.0
LOAD_S = 4.0
"""A prompt whose KV has not come by then is computed where it is needed."""
CLOSE_S = 2.0
THREADS = 16
"""Transfers of one child that run at once."""
POLICY = Policy(attempts=4, attempt_s=1.5, drain_s=0.5, circuit=CircuitPolicy(pause_max_s=5.0))


class Fetched(msgspec.Struct, frozen=True):
    """How a fetch ended."""

    watermark: int
    """Tokens that are there."""
    table: tuple[int, ...]
    """The blocks to go on in. Shorter than before, down to those that are there, where the rest are held back."""
    result: str
    """For the metrics: an outcome's result, "refused" for tickets that cannot be used, or "nothing to move"."""


class Transfer:
    """Calls may come from any thread, and block. Raises `ConfigError` if a child cannot start.

    Parameters
    ----------
    settings
        Whose part it is.
    cache
        Where the KV stands.
    freed
        Called when blocks have become free that an earlier transfer held.
    shown
        Hears what becomes of the transfers; they stand in the log too.
    """

    def __init__(self, settings: Settings, cache: PagedCache, freed: Callable[[], None], shown: Metrics) -> None:
        self.publishes = settings.publishes is not None
        self._name = settings.name
        self._sources = settings.sources
        self._cache = cache
        self._freed = freed
        self._held = HeldBlocks(cache, freed=freed)
        children = [ChildConfig(name, "stream", {"peers": [address]}) for name, address in settings.sources.items()]
        if self.publishes:
            listens = {"listen": settings.publishes, "lease_s": LEASE_S}
            children.append(ChildConfig(settings.name, "stream", listens))
        config = Config(tuple(children), POLICY, THREADS)
        hooks = {"released": self._held.released, "watch": Several(shown, Lines())}
        self._belay: Belay = open_belay(config, cache.fingerprint(), source=settings.name, **hooks)
        shown.show(self._belay)
        for state in self._belay.states():
            if state.status == Status.UNAVAILABLE.value and state.cause is not None:
                self.close()
                raise ConfigError(state.cause.detail, source=settings.name, field=state.name)

    def publish(self, request: str, tokens: tuple[int, ...], table: tuple[int, ...]) -> dict[str, Any] | None:
        """Offer what has been computed of a prompt; the table's blocks are free when nobody fetches them any more.

        Returns the ``kv_transfer_params`` for the decode side; None if the KV cannot be had from here.
        """
        movable = self._cache.transferable(len(tokens))
        blocks = movable // self._cache.block_tokens
        self._free(table[blocks:])
        lent = table[:blocks]
        if not lent:
            return self._params(request, ())
        batches = self._cache.batches(self._cache.batch_ids(tokens, STEP_BLOCKS), lent, request)
        outcome = call(lambda: self._belay.save(request, batches, SAVE_S), Where(self._name, "save", request))
        if isinstance(outcome, Failure) or not outcome.held:
            self._free(lent)
        else:
            self._held.hold(request, Side.SAVE, lent)
        if isinstance(outcome, Failure) or outcome.result is not Result.SAVED:
            return None
        return self._params(request, outcome.tickets)

    def fetch(self, request: str, tokens: tuple[int, ...], table: tuple[int, ...], packed: bytes) -> Fetched:
        """Bring the KV of a prompt into the table, as far as it can be had."""
        ids = self._cache.batch_ids(tokens, STEP_BLOCKS)
        if not ids:
            return Fetched(0, table, "nothing to move")
        tickets = call(lambda: self._usable(packed), Where(self._name, "fetch", request))
        if isinstance(tickets, Failure):
            return Fetched(0, table, "refused")
        batches = self._cache.batches(ids, table, request)
        outcome = call(lambda: self._belay.load(request, tickets, batches, LOAD_S), Where(self._name, "load", request))
        if isinstance(outcome, Failure):
            return Fetched(0, table, "refused")
        if outcome.held:
            kept = outcome.watermark // self._cache.block_tokens
            self._held.hold(request, Side.LOAD, table[kept:])
            table = table[:kept]
        return Fetched(outcome.watermark, table, outcome.result.value)

    def cancel(self, request: str) -> None:
        """Nothing more is wanted of it: a fetch ends, and what was published is withdrawn."""
        self._belay.cancel(request)

    def close(self) -> None:
        """Cancel everything, and end."""
        self._belay.close(CLOSE_S)

    def _free(self, blocks: tuple[int, ...]) -> None:
        self._cache.free(blocks)
        self._freed()

    def _params(self, request: str, tickets: tuple[Ticket, ...]) -> dict[str, Any]:
        """What vLLM's own connectors name, as far as there is such a thing here, and the tickets."""
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._name,
            "remote_request_id": request,
            "kvbelay_tickets": msgspec.Raw(encode_tickets(tickets)),
        }

    def _usable(self, packed: bytes) -> tuple[Ticket, ...]:
        """Tickets of the sources that are known here. They come from a peer, by way of a client: raises
        `ProtocolViolation` for anything else.
        """
        tickets = decode_tickets(packed)
        for ticket in tickets:
            if self._sources.get(ticket.child) != ticket.peer:
                raise ProtocolViolation("a ticket names a source that is not known here")
        return tickets
