"""Without faults: the KV is really pulled, and the answers are right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dance import decode, prefill
from pair import Trio, loaded, pulled
from server import BLOCK


def test_kv_is_pulled(trio: Trio) -> None:
    """A request's KV comes from the prefill side, all of its bytes, and nothing is computed again."""
    trio.shake_hands(13)
    before = pulled(trio.decode), loaded(trio.decode), trio.decode.metric("kvbelay_recomputed_tokens_total")
    params = prefill(trio.prefill, 0)
    trio.right(0, decode(trio.decode, 0, params))
    blocks = len(params["remote_block_ids"][0])
    assert params["remote_num_tokens"] <= blocks * BLOCK
    assert pulled(trio.decode) - before[0] == blocks * trio.block_bytes
    assert loaded(trio.decode) - before[1] == 1
    assert trio.decode.metric("kvbelay_recomputed_tokens_total") == before[2]


def test_many_at_once(trio: Trio) -> None:
    """Many requests at once are all loaded, and all answered as an engine does that computes them alone."""
    before = loaded(trio.decode)
    numbers = range(1, 7)
    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = list(pool.map(lambda number: decode(trio.decode, number, prefill(trio.prefill, number)), numbers))
    for number, answer in zip(numbers, answers, strict=True):
        trio.right(number, answer)
    assert loaded(trio.decode) - before == len(numbers)


def test_guarded_prefill_serves_stock_decode(trio: Trio) -> None:
    """What the guard adds to the parameters does not disturb a decode side without it."""
    with trio.with_stock() as stock:
        before = pulled(stock)
        trio.right(9, decode(stock, 9, prefill(trio.prefill, 9)))
        assert pulled(stock) > before


def test_stock_prefill_serves_guarded_decode(trio: Trio) -> None:
    """A prefill side without the guard is loaded from as any other."""
    with trio.with_stock() as stock:
        trio.right(14, decode(trio.decode, 14, prefill(stock, 14)))  # they meet
        before = pulled(trio.decode), loaded(trio.decode)
        params = prefill(stock, 8)
        assert "kvbelay" not in params
        trio.right(8, decode(trio.decode, 8, params))
        assert pulled(trio.decode) > before[0]
        assert loaded(trio.decode) == before[1] + 1


def test_the_engine_says_what_guards_it(trio: Trio) -> None:
    """One line at the start, in the host's log."""
    assert trio.decode.said(r"INFO .*kvbelay guards NixlConnector on vLLM")
