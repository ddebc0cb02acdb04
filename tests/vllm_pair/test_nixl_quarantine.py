"""A transfer that goes on after everybody has given it up, into blocks that others may have by now."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from children import nixl
from dance import LONG, LONG_TOKENS, complete, hang_up, prefill
from pair import LOAD_S, Trio, failures, frozen
from server import Server, until

BLOCKS = 1 + 3 + len(LONG) * 6
"""The host's own, those of the request that hangs up, and what the others need in the end: the cache is full."""
FILLED = 0.5
"""When so much of the cache is used by the others, the blocks that came free last have long been taken."""


def no_quarantine() -> None:
    """Break the guard: what may still be written is free for others."""
    from kvbelay.vllm.quarantine import Quarantine  # noqa: PLC0415 # in a server's process

    def nothing(_self: Quarantine, *_args: object, **_kwargs: object) -> None: ...

    Quarantine.hold = nothing


@contextmanager
def decoding(trio: Trio, folder: Path, before: Callable[[], None] | None) -> Iterator[Server]:
    """A decode side of its own."""
    server = Server(
        "careless" if before else "careful",
        trio.decode.model,
        folder,
        children=[nixl()],
        options={"load_s": LOAD_S},
        blocks=BLOCKS,
        before=before,
    )
    try:
        server.start()
        server.wait()
        yield server
    finally:
        server.close()


def wrong_answers(trio: Trio, server: Server, numbers: tuple[int, int]) -> int:
    """How many live requests answer wrongly when a transfer of before ends in the midst of them."""
    first, second = numbers
    complete(server, first, prefill(trio.prefill, first))  # they meet
    params = prefill(trio.prefill, second)
    with ThreadPoolExecutor(len(LONG)) as pool:
        with frozen(trio.prefill):
            hang_up(server, second, params, after_s=1.0)
            until(lambda: failures(server, "DeadlineExceeded") > 0, "the deadline is over", 4 * LOAD_S)
            answers = {n: pool.submit(complete, server, n, None, tokens=LONG_TOKENS) for n in LONG}
            until(lambda: server.metric("vllm:kv_cache_usage_perc") > FILLED, "the others run", 60.0)
        texts = {number: answer.result()["choices"][0]["text"] for number, answer in answers.items()}
    return sum(text != trio.plain.long[number] for number, text in texts.items())


def test_late_transfer_hits_nobody(trio: Trio, tmp_path: Path) -> None:
    """With the quarantine all answers are right, without it the late transfer changes blocks of live requests."""
    with decoding(trio, tmp_path, None) as server:
        assert wrong_answers(trio, server, (15, 16)) == 0
    with decoding(trio, tmp_path, no_quarantine) as server:
        assert wrong_answers(trio, server, (17, 18)) > 0
