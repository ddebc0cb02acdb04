"""P/D between two servers: the decode side's answers are right, whatever becomes of the KV."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

Alone = Callable[..., str]
BLOCK = 16


def prompt(number: int) -> str:
    return f"{number}. The clerk copied the ledger of the harbour by hand, ship after ship, and left no line out. " * 3


def movable(text: str) -> int:
    return (len(text) - 1) // BLOCK * BLOCK


def test_kv_moves(pair: Any, alone: Alone) -> None:
    """What was prefilled is fetched, but for the tail, and the answer is the engine's own, streamed or not."""
    prefill, decode = pair
    before = decode.metric('kvbelay_serve_transfers_total{result="loaded",side="fetch"}')
    for stream in (False, True):
        text = prompt(stream)
        params = prefill.offer(text)
        assert params["do_remote_prefill"] is True
        answer = decode.complete(text, params=params, stream=stream)
        pieces = [*answer] if stream else [answer]
        assert "".join(piece.choices[0].text for piece in pieces) == alone(text)
        if not stream:
            assert answer.usage.prompt_tokens_details.cached_tokens == movable(text)
    assert decode.metric('kvbelay_serve_transfers_total{result="loaded",side="fetch"}') == before + 2
    prefill.until(lambda: prefill.metric("kvbelay_serve_free_blocks") == 512)


def test_kv_moves_for_an_answer_that_is_stopped(pair: Any, alone: Alone) -> None:
    """An answer that a text ends says what was brought, too."""
    prefill, decode = pair
    stop = alone(prompt(5))[2:4]
    answer = decode.complete(prompt(5), params=prefill.offer(prompt(5)), stop=stop)
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens_details.cached_tokens == movable(prompt(5))


def test_kv_moves_for_a_chat(pair: Any) -> None:
    """The chat of both sides is the same conversation."""
    prefill, decode = pair
    asked = {"model": "tiny", "messages": [{"role": "user", "content": prompt(3)}], "max_tokens": 8}
    create = prefill.client.chat.completions.create
    offer = {"kv_transfer_params": {"do_remote_decode": True}}
    params = create(**{**asked, "max_tokens": 1}, extra_body=offer).kv_transfer_params
    plain = decode.client.chat.completions.create(**asked)
    answer = decode.client.chat.completions.create(**asked, extra_body={"kv_transfer_params": params})
    assert answer.choices[0].message.content == plain.choices[0].message.content
    assert answer.usage.prompt_tokens_details.cached_tokens == movable("user: " + prompt(3) + "\nassistant:")


def test_many_at_once(pair: Any, alone: Alone) -> None:
    """Eight at a time, each gets its own KV, and nothing is left on either side."""
    prefill, decode = pair

    def dance(number: int) -> tuple[str, int]:
        answer = decode.complete(prompt(number), params=prefill.offer(prompt(number)))
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(dance, range(100, 124))]
    assert answers == [(alone(prompt(number)), movable(prompt(number))) for number in range(100, 124)]
    for server in pair:
        server.until(lambda server=server: server.metric("kvbelay_serve_free_blocks") == 512)


def test_a_prompt_without_whole_blocks(pair: Any, alone: Alone) -> None:
    """A prompt that is too short to move anything is answered all the same."""
    prefill, decode = pair
    answer = decode.complete("short", params=prefill.offer("short"))
    assert answer.choices[0].text == alone("short")


BAD: dict[str, Callable[[list[Any]], Any]] = {
    "nothing": lambda _: None,
    "no list": lambda _: "tickets",
    "an empty list": lambda _: [],
    "no tickets": lambda _: [{}],
    "an unknown field": lambda good: [{**good[0], "more": 1}],
    "a field of another type": lambda good: [{**good[0], "nbytes": "many"}],
    "another size": lambda good: [{**ticket, "nbytes": 1} for ticket in good],
    "too many": lambda good: good[:1] * 4097,
}


@pytest.mark.parametrize("case", BAD)
def test_tickets_that_cannot_be_used(pair: Any, alone: Alone, case: str) -> None:
    """Whatever stands in the tickets, the prompt is computed where it is needed."""
    prefill, decode = pair
    text = prompt(7)
    params = prefill.offer(text)
    params["kvbelay_tickets"] = BAD[case](params["kvbelay_tickets"])
    answer = decode.complete(text, params=params)
    assert answer.choices[0].text == alone(text)


def test_tickets_for_another_prompt(pair: Any, alone: Alone) -> None:
    """KV of other tokens is not taken for this prompt's."""
    prefill, decode = pair
    answer = decode.complete(prompt(8), params=prefill.offer(prompt(9)))
    assert answer.choices[0].text == alone(prompt(8))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_a_ticket_of_a_stranger(pair: Any, alone: Alone) -> None:
    """Nobody is dialled but the sources that the server was told of."""
    prefill, decode = pair
    text = prompt(10)
    params = prefill.offer(text)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        address = f"tcp://127.0.0.1:{stranger.getsockname()[1]}"
        forged = [{**ticket, "peer": address} for ticket in params["kvbelay_tickets"]]
        answer = decode.complete(text, params=params | {"kvbelay_tickets": forged})
        stranger.setblocking(False)
        with pytest.raises(BlockingIOError):
            stranger.accept()
    assert answer.choices[0].text == alone(text)
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


def test_prefill_killed(frail: Any, alone: Alone) -> None:
    """The KV is gone with its process: the answer is right, computed here. The next process serves again."""
    prefill, decode = frail
    params = prefill.offer(prompt(20))
    prefill.kill()
    answer = decode.complete(prompt(20), params=params)
    assert answer.choices[0].text == alone(prompt(20))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    prefill.start()
    prefill.wait()

    def moves() -> bool:  # once the child's circuit has closed again
        answer = decode.complete(prompt(21), params=prefill.offer(prompt(21)))
        assert answer.choices[0].text == alone(prompt(21))
        return answer.usage.prompt_tokens_details.cached_tokens > 0

    decode.until(moves)


def test_prefill_frozen(frail: Any, alone: Alone, freeze: Any) -> None:
    """A source that stands still costs a bounded time, and nothing is left of it when it goes on."""
    prefill, decode = frail
    params = prefill.offer(prompt(30))
    freeze(prefill.process.pid)
    try:
        answer = decode.complete(prompt(30), params=params)
    finally:
        os.kill(prefill.process.pid, signal.SIGCONT)
    assert answer.choices[0].text == alone(prompt(30))
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    decode.until(lambda: decode.metric("kvbelay_serve_free_blocks") == 512)


def test_a_client_that_hangs_up_while_kv_moves(frail: Any, alone: Alone, freeze: Any) -> None:
    """The fetch ends with its client, and leaves no block behind."""
    prefill, decode = frail
    params = prefill.offer(prompt(40))
    freeze(prefill.process.pid)
    try:
        with pytest.raises(openai.APITimeoutError):
            decode.complete(prompt(40), params=params, timeout=0.3)
        decode.until(lambda: decode.metric('kvbelay_serve_requests_total{end="cancelled"}') == 1)
    finally:
        os.kill(prefill.process.pid, signal.SIGCONT)
    decode.until(lambda: decode.metric("kvbelay_serve_free_blocks") == 512)
    assert decode.complete(prompt(41)).choices[0].text == alone(prompt(41))


def test_a_server_that_publishes_nothing(pair: Any) -> None:
    """Asked for KV that it cannot lend, a server says so by saying nothing; the router goes elsewhere."""
    _, decode = pair
    answer = decode.complete("x", 1, params={"do_remote_decode": True})
    assert answer.kv_transfer_params is None


def test_an_address_that_is_taken(start: Any) -> None:
    """A server whose KV could not be fetched does not start."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start("late", publishes=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        assert server.process.wait(30) == 1
    assert "in use" in server.log.read_text().splitlines()[-1]
