"""A request that comes after the lease of what it was to pull."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from dance import complete, decode, prefill
from pair import LEASE_S, Pair, failures, pulled
from server import until


def test_blocks_that_the_prefill_side_uses_again(pair: Pair) -> None:
    """Stock vLLM answers with another request's KV, and says that all is well; the guard does not load it."""
    mark = pair.prefill.mark()
    with ThreadPoolExecutor(2) as pool:
        params = dict(zip((10, 11), pool.map(lambda number: prefill(pair.prefill, number), (10, 11)), strict=True))
    until(lambda: pair.prefill.log(mark).count("Releasing expired KV blocks") == 2, "the leases end", 4 * LEASE_S)
    for number in range(80, 92):  # by now each block of the small cache has been used again
        complete(pair.prefill, number, None, tokens=1)

    with pair.with_stock() as stock:
        answer = decode(stock, 10, params[10])
        assert answer.status == 200
        assert answer.text != pair.plain[10], "stock vLLM heeds leases by now"

    before, mark = (failures(pair.decode, "TicketExpired"), pulled(pair.decode)), pair.decode.mark()
    pair.right(11, decode(pair.decode, 11, params[11]))
    assert failures(pair.decode, "TicketExpired") == before[0] + 1
    assert pulled(pair.decode) == before[1]
    assert pair.decode.said(r"WARNING .*kvbelay: NixlConnector.load failed .* too late", mark)
