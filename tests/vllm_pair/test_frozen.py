"""A prefill side that stands still in the middle of a transfer, and goes on later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dance import decode, hang_up, prefill
from pair import LOAD_S, SETTLE_S, Pair, failures, frozen, loaded
from server import until


def test_frozen_then_resumed(pair: Pair) -> None:
    """At the deadline the request is computed here; the blocks stay away until the late transfer has ended."""
    pair.shake_hands(20, 21)
    with ThreadPoolExecutor(8) as pool, pair.with_stock() as stock:
        ours, theirs = pool.map(lambda number: prefill(pair.prefill, number), (22, 23))
        before, mark = failures(pair.decode, "DeadlineExceeded"), pair.decode.mark()
        with frozen(pair.prefill):
            waits = pool.submit(decode, stock, 23, theirs)
            answer = decode(pair.decode, 22, ours)
            assert not waits.done(), "stock vLLM has a deadline by now"
            pair.right(22, answer)
            assert answer.seconds >= LOAD_S
            assert failures(pair.decode, "DeadlineExceeded") == before + 1
            assert pair.decode.said(r"WARNING .*kvbelay: load of request .* NixlConnector: DeadlineExceeded", mark)
            held = len(ours["remote_block_ids"][0])
            assert pair.decode.metric("kvbelay_quarantined_blocks") == held
            others = {number: pool.submit(decode, pair.decode, number, None) for number in range(24, 28)}
            until(lambda: pair.decode.metric("vllm:num_requests_running") > 0, "others run meanwhile", SETTLE_S)
        for number, other in others.items():
            pair.right(number, other.result())
        pair.right(23, waits.result())
    until(lambda: serves(pair, 30), "the late transfer has ended", SETTLE_S)


def test_client_hangs_up_in_mid_transfer(pair: Pair) -> None:
    """The blocks of a request that nobody waits for any more are not used again before the transfer has ended."""
    pair.shake_hands(31)
    params = prefill(pair.prefill, 32)
    with frozen(pair.prefill):
        hang_up(pair.decode, 32, params, after_s=1.0)
        until(lambda: pair.decode.metric("kvbelay_quarantined_blocks") > 0, "the deadline is over", 4 * LOAD_S)
        pair.right(33, decode(pair.decode, 33, None))
        assert pair.decode.metric("kvbelay_quarantined_blocks") == len(params["remote_block_ids"][0])
    until(lambda: serves(pair, 34), "the late transfer has ended", SETTLE_S)


def serves(pair: Pair, number: int) -> bool:
    """Ask for something, since an idle engine does not look at its transfers; whether nothing is held back."""
    before = loaded(pair.decode)
    pair.right(number, decode(pair.decode, number, prefill(pair.prefill, number)))
    return pair.decode.metric("kvbelay_quarantined_blocks") == 0 and loaded(pair.decode) >= before
