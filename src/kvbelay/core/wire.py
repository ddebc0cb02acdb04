"""Tickets on their way from the prefill to the decode side. What comes in is a peer's data: typed, and limited."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvbelay.core.model import LOCATOR_LIMIT, Ticket
from kvbelay.errors import ProtocolViolation

TICKETS_LIMIT = 4096
"""Most tickets of one request."""
NBYTES_LIMIT = 16 << 20
"""Most bytes of their encoding."""
NUMBER_LIMIT = (1 << 63) - 1
"""The largest number in a ticket: what every backend's own encoding can take."""

_DECODER = msgspec.json.Decoder(tuple[Ticket, ...])


def encode_tickets(tickets: Iterable[Ticket]) -> bytes:
    """JSON, fit to travel inside ``kv_transfer_params``; byte strings stand in it as base64."""
    return msgspec.json.encode(tuple(tickets))


def decode_tickets(data: bytes) -> tuple[Ticket, ...]:
    """The reverse. Raises `ProtocolViolation` on anything that is not a reasonable list of tickets."""
    if len(data) > NBYTES_LIMIT:
        msg = f"{len(data)} bytes of tickets, at most {NBYTES_LIMIT} are taken"
        raise ProtocolViolation(msg)
    try:
        tickets = _DECODER.decode(data)
    except msgspec.DecodeError as exc:
        msg = f"tickets cannot be decoded: {exc}"
        raise ProtocolViolation(msg) from exc
    if len(tickets) > TICKETS_LIMIT:
        msg = f"{len(tickets)} tickets, at most {TICKETS_LIMIT} are taken"
        raise ProtocolViolation(msg)
    for ticket in tickets:
        if not _in_range(ticket):
            msg = f"a ticket of {ticket.child!r} is out of range"
            raise ProtocolViolation(msg)
    return tickets


def _in_range(ticket: Ticket) -> bool:
    batch = ticket.batch
    return (
        len(ticket.locator) <= LOCATOR_LIMIT
        and 0 <= ticket.nbytes <= NUMBER_LIMIT
        and 0 <= ticket.incarnation <= NUMBER_LIMIT
        and 0 <= batch.start < batch.stop <= NUMBER_LIMIT
        and 0 <= batch.layers[0] < batch.layers[1] <= NUMBER_LIMIT
        and (ticket.lease_s is None or 0 <= ticket.lease_s < float("inf"))
    )
