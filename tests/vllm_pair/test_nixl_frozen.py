"""A prefill side that stands still in the middle of a transfer, and goes on later."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dance import decode, hang_up, prefill
from pair import LOAD_S, SETTLE_S, Trio, failures, frozen, loaded
from server import until


def test_frozen_then_resumed(trio: Trio) -> None:
    """At the deadline the request is computed here; the blocks stay away until the late transfer has ended."""
    trio.shake_hands(20, 21)
    with trio.with_stock() as stock, ThreadPoolExecutor(8) as pool:
        ours, theirs = pool.map(lambda number: prefill(trio.prefill, number), (22, 23))
        before, mark = failures(trio.decode, "DeadlineExceeded"), trio.decode.mark()
        with frozen(trio.prefill):
            waits = pool.submit(decode, stock, 23, theirs)
            answer = decode(trio.decode, 22, ours)
            assert not waits.done(), "stock vLLM has a deadline by now"
            trio.right(22, answer)
            assert answer.seconds >= LOAD_S
            assert failures(trio.decode, "DeadlineExceeded") == before + 1
            assert trio.decode.said(r"WARNING .*kvbelay: load of request .* \(NixlConnector: DeadlineExceeded", mark)
            held = len(ours["remote_block_ids"][0])
            assert trio.decode.metric("kvbelay_quarantined_blocks") == held
            others = {number: pool.submit(decode, trio.decode, number, None) for number in range(24, 28)}
            for number, other in others.items():
                trio.right(number, other.result())
        trio.right(23, waits.result())
    until(lambda: serves(trio, 30), "the late transfer has ended", SETTLE_S)


def test_client_hangs_up_in_mid_transfer(trio: Trio) -> None:
    """The blocks of a request that nobody waits for any more are not used again before the transfer has ended."""
    trio.shake_hands(31)
    params = prefill(trio.prefill, 32)
    with frozen(trio.prefill):
        hang_up(trio.decode, 32, params, after_s=1.0)
        until(lambda: trio.decode.metric("kvbelay_quarantined_blocks") > 0, "the deadline is over", 4 * LOAD_S)
        trio.right(33, decode(trio.decode, 33, None))
        assert trio.decode.metric("kvbelay_quarantined_blocks") == len(params["remote_block_ids"][0])
    until(lambda: serves(trio, 34), "the late transfer has ended", SETTLE_S)


def serves(trio: Trio, number: int) -> bool:
    """Ask for something, since an idle engine does not look at its transfers; whether nothing is held back."""
    before = loaded(trio.decode)
    trio.right(number, decode(trio.decode, number, prefill(trio.prefill, number)))
    return trio.decode.metric("kvbelay_quarantined_blocks") == 0 and loaded(trio.decode) >= before
