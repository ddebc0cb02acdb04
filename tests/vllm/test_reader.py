"""Who hashes, and when: the engine's own thread what takes little time, another one the rest."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from kvbelay.core.model import Failure
from kvbelay.errors import UnverifiableLayout
from kvbelay.vllm import reader
from kvbelay.vllm.digest import Hasher
from kvbelay.vllm.layouts import Share, layer_layout
from kvbelay.vllm.reader import Reader
from kvbelay.vllm.readings import Reading, Run, Sums

BLOCKS, HEADS, TOKENS, VALUES = 8, 2, 16, 8
BLOCK_NBYTES = HEADS * TOKENS * 2 * VALUES * 2
NAME = "model.layers.0.attn"
CPU = torch.device("cpu")
HERE, THREAD = threading.current_thread().name, "kvbelay digest"


class Held(Hasher):
    """Hashes when it is let; it knows who does."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups)
        self.let = threading.Event()
        self.let.set()
        self.threads: list[str] = []

    def digests(self, group: int, blocks: Sequence[int], first_token: int, tokens: int) -> list[int]:
        self.threads.append(threading.current_thread().name)
        assert self.let.wait(20.0)
        return super().digests(group, blocks, first_token, tokens)


@pytest.fixture
def hasher() -> Held:
    dice = torch.Generator().manual_seed(1)
    cache = torch.randn((BLOCKS, HEADS, TOKENS, 2 * VALUES), generator=dice).to(torch.bfloat16)
    spec = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=VALUES, dtype=cache.dtype)
    share = Share(0, 1, HEADS)
    one = layer_layout(NAME, cache, spec, blocks=BLOCKS, backend="FLASH_ATTN", isa=None, share=share)
    return Held([{NAME: one}])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Reader]]:
    """Make a reader that hashes so many blocks in a step, and twice as many in an idle one."""
    made: list[Reader] = []

    def make(hasher: Hasher | Failure, at_once: int, device: torch.device | None = CPU) -> Reader:
        monkeypatch.setattr(reader, "BUSY_NBYTES", at_once * BLOCK_NBYTES)
        monkeypatch.setattr(reader, "IDLE_NBYTES", 2 * at_once * BLOCK_NBYTES)
        made.append(Reader(hasher, device))
        made[-1].begin(idle=False)
        return made[-1]

    yield make
    for one in made:
        one.close()


def reading(name: str, *blocks: int) -> Reading:
    return Reading(name, 1, (Run(0, TOKENS * len(blocks), blocks),))


def done(one: Reader, count: int) -> list[tuple[str, Sums]]:
    """So many, when they have come."""
    found: list[tuple[Reading, Sums]] = []
    give_up = time.monotonic() + 20.0
    while len(found) < count:
        found += one.done()
        assert time.monotonic() < give_up
    return [(reading.request, sums) for reading, sums in found]


def right(hasher: Held, *blocks: int) -> tuple[tuple[int, ...], ...]:
    return ((hasher.coverage(0), *Hasher.digests(hasher, 0, blocks, 0, TOKENS * len(blocks))),)


def test_little_is_hashed_at_once(hasher: Held, opened: Callable[..., Reader]) -> None:
    """It is done when the call returns, and there is no thread."""
    one = opened(hasher, 3)
    one.read(reading("a", 1, 2))
    ((what, sums),) = one.done()
    assert (what.request, sums.groups) == ("a", right(hasher, 1, 2))
    assert hasher.threads == [HERE]
    assert one.done() == []


def test_much_is_hashed_in_a_thread(hasher: Held, opened: Callable[..., Reader]) -> None:
    """No step waits for it, and the digests are the same."""
    one = opened(hasher, 3)
    hasher.let.clear()
    one.read(reading("a", 1, 2, 3, 4))
    assert one.done() == []
    hasher.let.set()
    ((_, sums),) = done(one, 1)
    assert sums.groups == right(hasher, 1, 2, 3, 4)
    assert hasher.threads == [THREAD]


def test_so_much_in_a_step(hasher: Held, opened: Callable[..., Reader]) -> None:
    """Many little ones of one step are much together; the next step has time again, and more if it is idle."""
    one = opened(hasher, 3)
    for name, blocks in (("a", (1, 2)), ("b", (3,)), ("c", (4,))):
        one.read(reading(name, *blocks))
    assert [name for name, _ in done(one, 3)] == ["a", "b", "c"]
    assert hasher.threads == [HERE, HERE, THREAD]
    one.begin(idle=False)
    one.read(reading("d", 5, 6))
    one.begin(idle=True)
    one.read(reading("e", 1, 2, 3, 4, 5, 6))
    assert hasher.threads[3:] == [HERE, HERE]


def test_one_thread_at_a_time(hasher: Held, opened: Callable[..., Reader]) -> None:
    """While the thread has something to hash, it gets everything: a hasher serves one at a time."""
    one = opened(hasher, 2)
    hasher.let.clear()
    one.read(reading("much", 1, 2, 3))
    assert one.done() == []
    one.begin(idle=False)
    one.read(reading("little", 4))
    assert one.done() == []
    hasher.let.set()
    assert [name for name, _ in done(one, 2)] == ["much", "little"]
    assert hasher.threads == [THREAD, THREAD]
    one.begin(idle=False)
    one.read(reading("again", 4))
    assert hasher.threads[2:] == [HERE]


def test_elsewhere_than_on_a_cpu(hasher: Held, opened: Callable[..., Reader]) -> None:
    """What nobody knows to lie in a CPU's memory may have to be waited for."""
    one = opened(hasher, 99, None)
    one.read(reading("a", 1))
    done(one, 1)
    assert hasher.threads == [THREAD]


def test_what_cannot_be_hashed(opened: Callable[..., Reader]) -> None:
    """The reason comes back in place of digests."""
    one = opened(Held([UnverifiableLayout("nobody knows it")]), 3)
    one.read(reading("a", 1))
    ((_, sums),) = done(one, 1)
    assert "nobody knows it" in sums.unverified
    cause = Failure("", "digest", "", 0, "UnverifiableLayout", retryable=False, detail="no KV caches were registered")
    without = opened(cause, 3)
    without.read(reading("b", 1))
    ((_, sums),) = done(without, 1)
    assert sums.unverified == cause.detail


def test_a_group_that_there_is_not(hasher: Held, opened: Callable[..., Reader]) -> None:
    """A mistake of whoever asks is a reading without digests, and nothing that a step could fail from."""
    one = opened(hasher, 3)
    run = Run(0, TOKENS, (1,))
    mistaken = Reading("a", 1, (run, run))
    one.wipe(mistaken)
    one.read(mistaken)
    ((_, sums),) = done(one, 1)
    assert "IndexError" in sums.unverified
    one.read(reading("b", 2))
    ((_, sums),) = done(one, 1)
    assert sums.groups == right(hasher, 2)
