"""Without faults: the KV is really pulled, and the answers are right."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dance import decode, prefill
from pair import Pair, loaded, pulled
from server import BLOCK


def test_kv_is_pulled(pair: Pair) -> None:
    """A request's KV comes from the prefill side, all of its bytes, and nothing is computed again."""
    before = pulled(pair.decode), loaded(pair.decode), pair.decode.metric("kvbelay_recomputed_tokens_total")
    params = prefill(pair.prefill, 0)
    pair.right(0, decode(pair.decode, 0, params))
    blocks = len(params["remote_block_ids"][0])
    assert params["remote_num_tokens"] <= blocks * BLOCK
    assert pulled(pair.decode) - before[0] == blocks * pair.block_bytes
    assert loaded(pair.decode) - before[1] == 1
    assert pair.decode.metric("kvbelay_recomputed_tokens_total") == before[2]


def test_many_at_once(pair: Pair) -> None:
    """Many requests at once are all loaded, and all answered as an engine does that computes them alone."""
    before = loaded(pair.decode)
    numbers = range(1, 7)
    with ThreadPoolExecutor(len(numbers)) as pool:
        answers = list(pool.map(lambda number: decode(pair.decode, number, prefill(pair.prefill, number)), numbers))
    for number, answer in zip(numbers, answers, strict=True):
        pair.right(number, answer)
    assert loaded(pair.decode) - before == len(numbers)


def test_guarded_prefill_serves_stock_decode(pair: Pair) -> None:
    """What the guard adds to the parameters does not disturb a decode side without it."""
    with pair.with_stock() as stock:
        before = pulled(stock)
        pair.right(9, decode(stock, 9, prefill(pair.prefill, 9)))
        assert pulled(stock) > before


def test_the_engine_says_what_guards_it(pair: Pair) -> None:
    """One line at the start, in the host's log."""
    assert pair.decode.said(r"INFO .*kvbelay guards NixlConnector on vLLM")
