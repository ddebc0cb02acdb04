"""What a load or save moves: batches that tile tokens x layers, in any order; anything else is refused."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbelay.core.model import BatchId, TransferBatch
from kvbelay.errors import InvalidBatch
from kvbelay.runtime.plan import Cargo

PROFILE = settings(deadline=None, derandomize=True, database=None)


class Tiling(NamedTuple):
    """Ranges of tokens and of layers, and the batches that they cut, shuffled."""

    tokens: list[tuple[int, int]]
    layers: list[tuple[int, int]]
    batches: list[TransferBatch]


def ranges(start: int, lengths: list[int]) -> list[tuple[int, int]]:
    cuts = []
    for length in lengths:
        cuts.append((start, start + length))
        start += length
    return cuts


def batch(tokens: tuple[int, int], layers: tuple[int, int]) -> TransferBatch:
    return TransferBatch(BatchId(b"f" * 16, *tokens, layers, b"p"), "r", 0, ())


@st.composite
def tilings(draw: st.DrawFn, *, min_tokens: int = 1, min_layers: int = 1) -> Tiling:
    lengths = st.integers(1, 50)
    tokens = ranges(draw(st.integers(0, 100)), draw(st.lists(lengths, min_size=min_tokens, max_size=5)))
    layers = ranges(draw(st.integers(0, 3)), draw(st.lists(st.integers(1, 4), min_size=min_layers, max_size=4)))
    batches = draw(st.permutations([batch(part, group) for part in tokens for group in layers]))
    return Tiling(tokens, layers, batches)


@PROFILE
@given(tilings())
def test_a_tiling_moves_by_tokens_then_layers(tiling: Tiling) -> None:
    """Whatever order the batches come in, they move by tokens and then by layers, all of them."""
    cargo = Cargo(iter(tiling.batches))
    assert (cargo.start, cargo.stop) == (tiling.tokens[0][0], tiling.tokens[-1][1])
    moves = [(each.id.start, each.id.stop, each.id.layers) for each, _ in cargo.beyond(cargo.start)]
    assert moves == [(*part, group) for part in tiling.tokens for group in tiling.layers]


@PROFILE
@given(tilings())
def test_reach_is_what_all_layers_have(tiling: Tiling) -> None:
    """After each batch, the reach is the first token of which some layer is still missing."""
    cargo = Cargo(tiling.batches)
    landed: set[tuple[int, tuple[int, int]]] = set()
    for each, reach in cargo.beyond(cargo.start):
        landed.add((each.id.start, each.id.layers))
        missing = [part[0] for part in tiling.tokens if any((part[0], group) not in landed for group in tiling.layers)]
        assert reach == min(missing, default=cargo.stop)
    assert reach == cargo.stop


@PROFILE
@given(tilings(), st.data())
def test_beyond_a_watermark(tiling: Tiling, data: st.DataObject) -> None:
    """Beyond a watermark lies every batch that has a token there, in the same order."""
    cargo = Cargo(tiling.batches)
    watermark = data.draw(st.integers(cargo.start, cargo.stop))
    everything = cargo.beyond(cargo.start)
    assert cargo.beyond(watermark) == [move for move in everything if move[0].id.stop > watermark]
    assert cargo.beyond(cargo.stop) == []


@PROFILE
@given(tilings(min_tokens=2, min_layers=2), st.data())
def test_a_hole_is_refused(tiling: Tiling, data: st.DataObject) -> None:
    """With any one batch missing, the others tile nothing."""
    missing = data.draw(st.sampled_from(tiling.batches))
    with pytest.raises(InvalidBatch, match="cut tokens and layers into ranges"):
        Cargo([each for each in tiling.batches if each is not missing])


@PROFILE
@given(tilings(), st.data())
def test_an_overlap_is_refused(tiling: Tiling, data: st.DataObject) -> None:
    """One batch twice, or one that reaches into another, is refused."""
    twice = data.draw(st.sampled_from(tiling.batches))
    with pytest.raises(InvalidBatch):
        Cargo([*tiling.batches, twice])
    start, stop = tiling.tokens[0]
    longer = batch((start, stop + 1), tiling.layers[0])
    with pytest.raises(InvalidBatch):
        Cargo([*tiling.batches, longer])


@PROFILE
@given(tilings(min_tokens=2), st.data())
def test_a_shift_is_refused(tiling: Tiling, data: st.DataObject) -> None:
    """One batch that begins or ends elsewhere than its range leaves a gap, an overlap or another cut."""
    which = data.draw(st.integers(0, len(tiling.batches) - 1))
    victim = tiling.batches[which].id
    inner = tiling.tokens.index((victim.start, victim.stop)) < len(tiling.tokens) - 1 or len(tiling.layers) > 1
    if not inner:
        return  # the last range alone may end where it likes
    moved = msgspec.structs.replace(victim, stop=victim.stop + data.draw(st.sampled_from([-1, 1, 7])))
    others = [each for index, each in enumerate(tiling.batches) if index != which]
    with pytest.raises(InvalidBatch):
        Cargo([*others, TransferBatch(moved, "r", 0, ())])


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        ([], "nothing to move"),
        ([((0, 0), (0, 2))], "no tokens"),
        ([((16, 0), (0, 2))], "no tokens"),
        ([((0, 16), (0, 0))], "layers from 0"),
        ([((0, 16), (2, 0))], "layers from 2"),
        ([((0, 16), (0, 1)), ((0, 16), (2, 3))], "layers from 2 on do not follow on 1"),
        ([((0, 16), (0, 2)), ((0, 16), (1, 3))], "layers from 1 on do not follow on 2"),
        ([((0, 16), (0, 2)), ((32, 48), (0, 2))], "tokens from 32 on do not follow on 16"),
        ([((0, 16), (0, 2)), ((16, 32), (0, 1)), ((16, 32), (1, 2))], "do not follow on 32"),
        ([((0, 16), (0, 1)), ((0, 16), (1, 2)), ((16, 32), (0, 1)), ((16, 32), (1, 3))], "other layers"),
    ],
)
def test_refusals_say_what_is_wrong(cuts: list[tuple[tuple[int, int], tuple[int, int]]], expected: str) -> None:
    """A caller is told where its batches do not fit together, and what to do."""
    with pytest.raises(InvalidBatch, match=expected) as caught:
        Cargo(batch(*cut) for cut in cuts)
    assert caught.value.remedy
