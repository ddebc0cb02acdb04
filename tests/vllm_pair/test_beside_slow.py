"""A child whose look-ups take seconds."""

from __future__ import annotations

from children import nixl, slow
from dance import decode
from stage import Stage

CIRCUIT = {"spent_s": 2.0, "pause_s": 60.0}
"""By default it is tried again after a second, and then ever more rarely."""
SLOW_S = 2.5
"""A look-up of the slow child takes 3 s or more."""
SMALL_CHUNKS = {"LMCACHE_CHUNK_SIZE": "32"}
"""It looks nothing up that is shorter than a chunk."""


def test_circuit_opens_and_it_stops_costing(stage: Stage) -> None:
    """After its first look-up the child is left alone, and requests are as fast as without it."""
    pair = stage.pair("slow", [nixl(), slow()], options={"circuit": CIRCUIT}, environment=SMALL_CHUNKS)
    server = pair.decode
    answers = [decode(server, number, None) for number in range(4)]
    assert answers[0].seconds > SLOW_S, "it is not slow"
    assert server.metric("kvbelay_circuit_open", child="LMCacheConnectorV1") == 1
    assert max(answer.seconds for answer in answers[1:]) < 1.0
    for number, answer in enumerate(answers):
        pair.right(number, answer)
    pair.right(4, pair.dance(4))
    pair.settle()
