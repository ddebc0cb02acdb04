"""Tickets as they travel inside a request, and what connectors do with one that is nonsense."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp

import msgspec

from fuzz.samples import FINGERPRINT, KEY, TICKET, blocks
from fuzz.target import JSON, Target, same, typed
from kvbelay.connectors.file import BACKEND as FILE
from kvbelay.connectors.file import FileConfig
from kvbelay.connectors.memory import MemoryConnector, Store
from kvbelay.connectors.port import Connector
from kvbelay.connectors.stream import BACKEND as STREAM
from kvbelay.connectors.stream import StreamConfig
from kvbelay.connectors.stream.frames import number_of
from kvbelay.core.model import Ticket, TransferBatch
from kvbelay.core.wire import decode_tickets, encode_tickets
from kvbelay.errors import ConfigError, KvbelayError, ProtocolViolation
from kvbelay.net.sockets import parse
from kvbelay.runtime.deadline import Until


@cache
def _readers() -> tuple[Connector, ...]:
    """Connectors that hold nothing."""
    folder = mkdtemp(prefix="kvbelay-fuzz-")
    return (
        FILE.open(
            FileConfig(path=str(Path(folder) / "store"), capacity_nbytes=1 << 20), child="near", fingerprint=FINGERPRINT
        ),
        MemoryConnector(Store("fuzz", 1 << 20), child="near", fingerprint=FINGERPRINT),
        STREAM.open(StreamConfig(), child="near", fingerprint=FINGERPRINT),
    )


def _take(data: bytes) -> None:
    tickets = typed(partial(decode_tickets, data), ProtocolViolation, heard=len(data))
    for ticket in tickets or ():
        typed(partial(number_of, ticket), ProtocolViolation)
        typed(partial(parse, ticket.peer, field="peer"), ConfigError, heard=len(data))
        _use(ticket, len(data))
    if tickets is not None:
        same(tickets, decode_tickets(encode_tickets(tickets)))


def _use(ticket: Ticket, heard: int) -> None:
    """A reader whose destination is what the ticket names."""
    batch = TransferBatch(ticket.batch, "fuzz", 1, blocks(1, 64)[1])
    dead = msgspec.structs.replace(ticket, peer="unix:///nowhere")
    for reader in _readers():
        typed(partial(reader.get, batch, dead, Until(5.0)), *_leaves(KvbelayError), heard=heard)
        typed(partial(reader.release, dead, Until(5.0)), *_leaves(KvbelayError), heard=heard)


def _leaves(error: type[KvbelayError]) -> list[type[KvbelayError]]:
    found = [error]
    for leaf in type.__subclasses__(error):  # an error may be anybody's, and odd
        found += _leaves(leaf)
    return found[1:] if error is KvbelayError else found


def _seeds() -> Iterable[bytes]:
    other = msgspec.structs.replace(TICKET, digest=None, lease_s=None, locator=b"", peer="file:/var/kv")
    far = msgspec.structs.replace(TICKET, peer="tcp://127.0.0.1:7000", batch=msgspec.structs.replace(KEY, stop=1 << 40))
    yield from (encode_tickets(tickets) for tickets in ([], [TICKET], [other, far], [TICKET] * 3))
    yield encode_tickets([TICKET])[:-2]


TARGETS = (Target("tickets", _take, _seeds, JSON, short=600),)
