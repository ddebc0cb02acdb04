"""Tickets from a peer: decoded with limits, or refused as a breach of the protocol, and never anything else."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbelay.core.model import LOCATOR_LIMIT, BatchId, Ticket
from kvbelay.core.wire import NBYTES_LIMIT, TICKETS_LIMIT, decode_tickets, encode_tickets
from kvbelay.errors import ProtocolViolation

PROFILE = settings(deadline=None, derandomize=True, database=None, max_examples=150)
U63 = st.integers(0, 2**63 - 1)
IDS = st.builds(
    BatchId,
    fingerprint=st.binary(max_size=32),
    start=st.integers(0, 2**40),
    stop=st.integers(2**40 + 1, 2**50),
    layers=st.tuples(st.integers(0, 99), st.integers(100, 2**63 - 1)),
    prefix=st.binary(max_size=32),
)
TICKETS = st.builds(
    Ticket,
    child=st.text(max_size=20),
    batch=IDS,
    peer=st.text(max_size=40),
    incarnation=U63,
    nbytes=U63,
    digest=st.none() | st.binary(min_size=16, max_size=16),
    lease_s=st.none() | st.floats(0, 1e6),
    locator=st.binary(max_size=200),
)
ONE = Ticket("near", BatchId(b"f" * 16, 0, 16, (0, 2), b"p" * 16), "unix:///tmp/x", 7, 1536, b"d" * 16, 30.0, b"\x01")


@PROFILE
@given(st.lists(TICKETS, max_size=4))
def test_tickets_come_back_as_they_were(tickets: list[Ticket]) -> None:
    """Whatever a source writes a reader reads."""
    assert decode_tickets(encode_tickets(tickets)) == tuple(tickets)


def decode_or_refuse(data: bytes) -> None:
    """The only two things that may happen."""
    try:
        tickets = decode_tickets(data)
    except ProtocolViolation:
        return
    assert all(type(ticket) is Ticket and ticket.nbytes >= 0 for ticket in tickets)


@PROFILE
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    """Bytes of any kind are decoded or refused."""
    decode_or_refuse(data)


@PROFILE
@given(st.lists(TICKETS, min_size=1, max_size=2), st.data())
def test_damaged_bytes(tickets: list[Ticket], data: st.DataObject) -> None:
    """Tickets with bytes changed, cut out or put in are decoded or refused."""
    raw = bytearray(encode_tickets(tickets))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        raw[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    decode_or_refuse(bytes(raw))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@PROFILE
@given(st.data())
def test_fields_of_other_types(data: st.DataObject) -> None:
    """A field of any other type or value is decoded where it is sound, else refused."""
    raw: list[dict[str, Any]] = json.loads(encode_tickets([ONE]))
    owner = data.draw(st.sampled_from([raw[0], raw[0]["batch"]]))
    owner[data.draw(st.sampled_from([*owner, "unknown"]))] = data.draw(JSON)
    decode_or_refuse(json.dumps(raw).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[",
        b"null",
        b"{}",
        b"[[]]",
        b"[" * 100_000,
        b'[{"child":' + b"[" * 100_000,
        b'[{"child":"\xff\xfe"}]',
        b'[{"child":"\\ud800"}]',
        b'[{"nbytes":' + b"9" * 5000 + b"}]",
        b'[{"lease_s":1e999}]',
        b'{"a":' * 50_000,
        b"\x80\x04K\x01.",
    ],
    ids=range(13),
)
def test_hostile_bytes(data: bytes) -> None:
    """Depth, size, encodings and numbers beyond any measure are refused."""
    with pytest.raises(ProtocolViolation):
        decode_tickets(data)


def test_numbers_that_no_encoding_takes() -> None:
    """An integer of any size is legal JSON; one that no connector could write down again is refused."""
    raw = json.loads(encode_tickets([ONE]))
    raw[0]["batch"]["stop"] = 10**40
    with pytest.raises(ProtocolViolation, match="near"):
        decode_tickets(json.dumps(raw).encode())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("locator", bytes(LOCATOR_LIMIT + 1)),
        ("nbytes", -1),
        ("batch", msgspec.structs.replace(ONE.batch, start=16)),
        ("batch", msgspec.structs.replace(ONE.batch, start=17)),
        ("batch", msgspec.structs.replace(ONE.batch, start=-16)),
        ("batch", msgspec.structs.replace(ONE.batch, stop=1 << 63)),
        ("batch", msgspec.structs.replace(ONE.batch, layers=(2, 2))),
        ("batch", msgspec.structs.replace(ONE.batch, layers=(-1, 2))),
        ("batch", msgspec.structs.replace(ONE.batch, layers=(0, 1 << 63))),
        ("nbytes", 1 << 63),
        ("incarnation", -1),
        ("incarnation", 1 << 63),
        ("lease_s", -1.0),
    ],
)
def test_fields_out_of_range(field: str, value: object) -> None:
    """A ticket whose numbers make no sense, or whose locator is too long, is refused, naming its child."""
    with pytest.raises(ProtocolViolation, match="near"):
        decode_tickets(encode_tickets([ONE, msgspec.structs.replace(ONE, **{field: value})]))


def test_limits() -> None:
    """As many tickets as allowed are taken, one more is not; nor is an encoding that is too long."""
    assert len(decode_tickets(encode_tickets([ONE] * TICKETS_LIMIT))) == TICKETS_LIMIT
    with pytest.raises(ProtocolViolation, match=str(TICKETS_LIMIT)):
        decode_tickets(encode_tickets([ONE] * (TICKETS_LIMIT + 1)))
    with pytest.raises(ProtocolViolation, match=str(NBYTES_LIMIT)):
        decode_tickets(b" " * (NBYTES_LIMIT + 1))
