"""The memory connector's store: shared by name, bounded, and gone with its last connector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.memory import BACKEND, MemoryConfig, MemoryConnector, _stores
from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Layout, Miss, TransferBatch
from kvbelay.errors import Closed, ConfigError, FingerprintMismatch, InvalidBatch, StoreFull
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import Scattered

OURS = Fingerprint("tiny", "1", (Layout(0, (0,), 16, 1, 8, "float32", "NHD"),))
NAME = "test_memory"
NBYTES = 1000


def opened(fingerprint: Fingerprint = OURS, store: str = NAME, capacity_nbytes: int = 3 * NBYTES) -> MemoryConnector:
    return BACKEND.open(MemoryConfig(store, capacity_nbytes), child="near", fingerprint=fingerprint)


@pytest.fixture
def connector() -> Iterator[MemoryConnector]:
    each = opened()
    yield each
    each.close()


def batch(index: int, nbytes: int = NBYTES, fingerprint: Fingerprint = OURS) -> tuple[TransferBatch, Scattered]:
    memory = Scattered([(1, nbytes)])
    key = BatchId(fingerprint.digest(), 16 * index, 16 * index + 16, (0, 1), b"%d" % index)
    return TransferBatch(key, "r", 1, memory.spans), memory


def put(connector: MemoryConnector, index: int) -> tuple[Any, bytes]:
    source, memory = batch(index)
    content = memory.fill(index)
    return connector.put(source, Until(5)), content


def test_store_is_shared_by_name(connector: MemoryConnector) -> None:
    """Connectors that name one store see each other's batches; another name is another store."""
    ticket, content = put(connector, 0)
    for name, hit in ((NAME, True), (f"{NAME} two", False)):
        other = opened(store=name)
        target, memory = batch(0)
        result = other.get(target, ticket, Until(5))
        assert (result is not Miss.MISS) == hit
        assert (memory.content() == content) == hit
        other.close()


def test_store_goes_with_its_last_connector() -> None:
    """Closing one of two connectors keeps the batches, closing both loses them."""
    first, second = opened(), opened()
    ticket, _ = put(first, 0)
    first.close()
    assert list(second.lookup([ticket.batch], Until(5))) == [ticket]
    second.close()
    gc.collect()
    assert NAME not in _stores
    third = opened()
    assert list(third.lookup([ticket.batch], Until(5))) == []
    third.close()


def test_one_store_has_one_size(connector: MemoryConnector) -> None:
    """Opening a store again with another size is refused, naming the field."""
    assert connector is not None
    with pytest.raises(ConfigError, match="3000 bytes, not 7") as caught:
        opened(capacity_nbytes=7)
    assert caught.value.field == "capacity_nbytes"


@pytest.mark.parametrize("raw", [{"size": 1}, {"capacity_nbytes": "big"}, {"capacity_nbytes": 0}, {"store": ""}])
def test_bad_configuration(raw: dict[str, Any]) -> None:
    """Unknown fields, wrong types and values that make no store are refused."""
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(raw, MemoryConfig)


def test_oldest_unused_leaves_first(connector: MemoryConnector) -> None:
    """A read and a lookup count as a use."""
    for index in range(3):
        put(connector, index)
    target, _ = batch(0)
    connector.lookup([target.id], Until(5))
    put(connector, 3)
    ids = [batch(index)[0].id for index in range(4)]
    found = [bool(connector.lookup([key], Until(5))) for key in ids]
    assert found == [True, False, True, True]


def test_never_more_than_its_capacity(connector: MemoryConnector) -> None:
    """Whatever is put, the store holds at most its capacity, and its count is exact."""
    for index, nbytes in enumerate([900, 3000, 1, 1500, 1499, 700, 900, 2000]):
        source, memory = batch(index % 5, nbytes)
        memory.fill(index)
        connector.put(source, Until(5))
        store: Any = connector._store
        assert store._nbytes == sum(len(entry.data) for entry in store._entries.values()) <= 3000


def test_too_large_evicts_nothing(connector: MemoryConnector) -> None:
    """A batch larger than the store is StoreFull, and the rest stays."""
    ticket, _ = put(connector, 0)
    with pytest.raises(StoreFull, match="raise capacity_nbytes"):
        connector.put(batch(1, 3001)[0], Until(5))
    assert list(connector.lookup([ticket.batch], Until(5))) == [ticket]


def test_ticket_of_replaced_bytes_is_a_miss(connector: MemoryConnector) -> None:
    """The same id with other bytes is not what the old ticket named."""
    old, _ = put(connector, 0)
    source, memory = batch(0)
    content = memory.fill(99)
    new = connector.put(source, Until(5))
    target, landed = batch(0)
    assert connector.get(target, old, Until(5)) is Miss.MISS
    assert isinstance(connector.get(target, new, Until(5)), BatchResult)
    assert landed.content() == content


def test_mismatch_names_the_field(connector: MemoryConnector) -> None:
    """The error says in which field the two fingerprints differ."""
    ticket, _ = put(connector, 0)
    other = msgspec.structs.replace(OURS, tp_size=2)
    reader = opened(other)
    with pytest.raises(FingerprintMismatch, match="tp_size differs") as caught:
        reader.get(batch(0, fingerprint=other)[0], ticket, Until(5))
    assert caught.value.field == "tp_size"
    reader.close()


def test_ticket_and_destination_must_agree(connector: MemoryConnector) -> None:
    """A ticket for one batch does not fill the memory of another."""
    ticket, _ = put(connector, 0)
    target, memory = batch(1)
    with pytest.raises(InvalidBatch):
        connector.get(target, ticket, Until(5))
    assert memory.intact()


def test_closed_says_who(connector: MemoryConnector) -> None:
    """After close the error names the connector and the call."""
    connector.close()
    with pytest.raises(Closed, match=r"connector 'near', probe\(\)"):
        connector.probe(Until(5))
