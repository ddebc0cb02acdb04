"""The block allocator against a plain model."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvbelay.errors import CacheFull, Fault, InvalidBatch
from kvbelay.reference.blocks import BlockAllocator

BLOCKS = 9


class Allocations(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(BLOCKS)
        self.tables: list[tuple[int, ...]] = []

    @property
    def held(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @rule(count=st.integers(0, BLOCKS + 2))
    def allocate(self, count: int) -> None:
        room = BLOCKS - len(self.held)
        if count > room:
            with pytest.raises(CacheFull):
                self.allocator.allocate(count)
            return
        table = self.allocator.allocate(count)
        assert len(table) == count
        self.tables.append(table)

    @rule(data=st.data())
    def free_a_part(self, data: st.DataObject) -> None:
        if not self.tables:
            return
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        cut = data.draw(st.integers(0, len(table)))
        self.allocator.free(table[cut:])
        self.tables.append(table[:cut])

    @rule(blocks=st.lists(st.integers(-1, BLOCKS), min_size=1, max_size=4))
    def free_what_is_not_held(self, blocks: list[int]) -> None:
        if set(blocks) <= set(self.held) and len(set(blocks)) == len(blocks):
            return
        with pytest.raises(InvalidBatch):
            self.allocator.free(blocks)

    @invariant()
    def every_block_has_one_owner(self) -> None:
        held = self.held
        assert len(set(held)) == len(held)
        assert set(held) <= set(range(BLOCKS))
        assert self.allocator.free_blocks == BLOCKS - len(held)

    def teardown(self) -> None:
        for table in self.tables:
            self.allocator.free(table)
        assert sorted(self.allocator.allocate(BLOCKS)) == list(range(BLOCKS))


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=60, stateful_step_count=25, deadline=None)


def test_full_says_whether_waiting_helps() -> None:
    """A sequence longer than the whole cache is told so; one that only came at a bad time is told what is free."""
    allocator = BlockAllocator(4)
    held = allocator.allocate(3)
    with pytest.raises(CacheFull, match="needs 5 blocks and the whole KV cache has 4; shorten") as too_long:
        allocator.allocate(5)
    with pytest.raises(CacheFull, match="needs 2 blocks and 1 of 4 are free; free"):
        allocator.allocate(2)
    assert too_long.value.fault is Fault.CALLER
    allocator.free(held)
    assert len(allocator.allocate(2)) == 2


def test_negative_counts_are_refused() -> None:
    """Nobody can allocate less than nothing."""
    with pytest.raises(InvalidBatch):
        BlockAllocator(4).allocate(-1)
