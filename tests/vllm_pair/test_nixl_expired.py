"""A request that comes after the lease of what it was to pull."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import nixl
from dance import complete, decode, prefill
from pair import Trio, failures, pulled
from server import Server, until

LEASE_S = 6.0
"""How long the prefill side keeps what was offered and not pulled; 30 s by default."""


@pytest.fixture
def hasty(trio: Trio, tmp_path: Path) -> Iterator[Server]:
    """A guarded prefill side that does not wait long, with so small a cache that blocks are soon used again."""
    child = nixl(kv_lease_duration=LEASE_S)
    server = Server("hasty", trio.decode.model, tmp_path, children=[child], options={}, blocks=24)
    trio.prefill.kill()  # its core is needed
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.close()


def test_blocks_that_the_prefill_side_uses_again(trio: Trio, hasty: Server) -> None:
    """Stock vLLM answers with another request's KV, and says that all is well; the guard does not load it."""
    with ThreadPoolExecutor(2) as pool:
        params = dict(zip((10, 11), pool.map(lambda number: prefill(hasty, number), (10, 11)), strict=True))
    until(lambda: hasty.log().count("Releasing expired KV blocks") == 2, "the leases end", 4 * LEASE_S)
    for number in range(80, 88):  # by now each block of the small cache has been used again
        complete(hasty, number, None, tokens=1)

    with trio.with_stock() as stock:
        answer = decode(stock, 10, params[10])
        assert answer.status == 200
        assert answer.text != trio.plain[10], "stock vLLM heeds leases by now"

    before, mark = (failures(trio.decode, "TicketExpired"), pulled(trio.decode)), trio.decode.mark()
    trio.right(11, decode(trio.decode, 11, params[11]))
    assert failures(trio.decode, "TicketExpired") == before[0] + 1
    assert pulled(trio.decode) == before[1]
    assert trio.decode.said(r"WARNING .*kvbelay: NixlConnector.load failed .* too late", mark)
