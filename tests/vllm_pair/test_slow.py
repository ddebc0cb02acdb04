"""A child whose look-ups take seconds."""

from __future__ import annotations

from children import nixl, slow
from dance import decode
from server import until
from stage import Stage

SMALL_CHUNKS = {"LMCACHE_CHUNK_SIZE": "32"}
"""It looks nothing up that is shorter than a chunk."""
SLOW_S = 2.5
"""A look-up of the slow child takes 3 s or more."""


def test_circuit_opens_and_it_stops_costing(stage: Stage) -> None:
    """After its first look-ups the child is left alone, and requests are as fast as without it."""
    pair = stage.pair("slow", [nixl(), slow()], options={}, environment=SMALL_CHUNKS)
    server = pair.decode
    first = [decode(server, number, None) for number in range(3)]
    assert max(answer.seconds for answer in first) > SLOW_S, "it is not slow"
    until(lambda: server.metric("kvbelay_circuit_open", child="LMCacheConnectorV1") == 1, "its circuit is open", 30.0)
    answer = decode(server, 3, None)
    assert answer.seconds < 1.0
    for number, one in enumerate([*first, answer]):
        pair.right(number, one)
    pair.settle()
