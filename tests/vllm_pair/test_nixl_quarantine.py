"""A transfer that goes on after everybody has given it up, into blocks that others may have by now."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import nixl
from dance import LONG, LONG_TOKENS, complete, hang_up, prefill
from pair import LOAD_S, Trio, failures, frozen
from server import Server, until

FILLED = 0.5
"""When so much of the cache is used by the others, the blocks that came free last have long been taken. In the end
they need nearly all of it.
"""
TRIES = 3
"""Of the control: a late transfer may come so late that nobody is left whom it could hit."""
SOON_S = 3.0
"""Deadline of a load from a side that has been met before."""


def no_quarantine() -> None:
    """Break the guard: what may still be written is free for others."""
    from kvbelay.vllm.quarantine import Quarantine  # noqa: PLC0415 # in a server's process

    def nothing(_self: Quarantine, *_args: object, **_kwargs: object) -> None: ...

    Quarantine.hold = nothing


@pytest.fixture
def careless(trio: Trio, tmp_path: Path) -> Iterator[Server]:
    """A decode side as the trio's, without the quarantine."""
    server = Server(
        "careless",
        trio.decode.model,
        tmp_path,
        children=[nixl()],
        options={"load_s": SOON_S},
        blocks=trio.decode.blocks,
        before=no_quarantine,
    )
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.close()


def wrong_answers(trio: Trio, server: Server, first: int, second: int) -> int:
    """How many live requests answer wrongly when a transfer of before ends in the midst of them."""
    complete(server, first, prefill(trio.prefill, first))  # they meet
    params = prefill(trio.prefill, second)
    before = failures(server, "DeadlineExceeded")
    with ThreadPoolExecutor(len(LONG)) as pool:
        with frozen(trio.prefill):
            hang_up(server, second, params, after_s=1.0)
            until(lambda: failures(server, "DeadlineExceeded") > before, "the deadline is over", 4 * LOAD_S)
            answers = {n: pool.submit(complete, server, n, None, tokens=LONG_TOKENS) for n in LONG}
            until(lambda: server.metric("vllm:kv_cache_usage_perc") > FILLED, "the others run", 60.0)
        texts = {number: answer.result()["choices"][0]["text"] for number, answer in answers.items()}
    return sum(text != trio.plain.long[number] for number, text in texts.items())


def test_late_transfer_hits_nobody(trio: Trio) -> None:
    """Blocks into which a transfer may still be written are nobody else's, though the cache is full."""
    assert wrong_answers(trio, trio.decode, 15, 16) == 0


def test_late_transfer_without_quarantine(trio: Trio, careless: Server) -> None:
    """The control: without the quarantine it changes blocks of live requests."""
    assert any(wrong_answers(trio, careless, 90 + 2 * n, 91 + 2 * n) for n in range(TRIES)), "nobody was hit"
