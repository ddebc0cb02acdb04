"""The API of one server: the official client gets what the engine answers alone, and clear errors."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

Alone = Callable[..., str]
PROMPT = "A climber who belays well is forgotten; one who does not is remembered twice."
TURNS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Why?"}]}]


@pytest.fixture(scope="module")
def server(start: Any) -> Any:
    server = start("alone")
    server.wait()
    return server


def test_completion(server: Any, alone: Alone) -> None:
    """A completion is the engine's own answer, its usage counts the tokens, and it says why it is over."""
    answer = server.complete(PROMPT, 24)
    assert answer.choices[0].text == alone(PROMPT, 24)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (77, 24, 101)
    assert (answer.choices[0].finish_reason, answer.object, answer.model) == ("length", "text_completion", "tiny")
    assert answer.usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("prompt", [list(PROMPT.encode()), [PROMPT], [list(PROMPT.encode())]])
def test_prompts_of_other_shapes(server: Any, alone: Alone, prompt: Any) -> None:
    """Tokens, or a list of one prompt, are prompts too."""
    assert server.complete(prompt).choices[0].text == alone(PROMPT)


def test_stream(server: Any, alone: Alone) -> None:
    """The pieces of a stream together are the whole answer, the last one says why it is over, and the usage follows."""
    *pieces, last, usage = server.complete(PROMPT, 24, stream=True, stream_options={"include_usage": True})
    assert len(pieces) > 1
    assert "".join(piece.choices[0].text for piece in [*pieces, last]) == alone(PROMPT, 24)
    assert [piece.choices[0].finish_reason for piece in pieces] == [None] * len(pieces)
    assert last.choices[0].finish_reason == "length"
    assert (usage.choices, usage.usage.completion_tokens) == ([], 24)
    assert len({piece.id for piece in pieces}) == 1


def test_chat(server: Any, alone: Alone) -> None:
    """A chat is a completion of the conversation as text, streamed or not."""
    expected = alone("system: Be brief.\nuser: Why?\nassistant:", 12)
    answer = server.client.chat.completions.create(model="tiny", messages=TURNS, max_completion_tokens=12)
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].message.role == "assistant"
    first, *pieces = server.client.chat.completions.create(model="tiny", messages=TURNS, max_tokens=12, stream=True)
    assert first.choices[0].delta.role == "assistant"
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "length"


def test_stop(server: Any, alone: Alone) -> None:
    """An answer ends before the first of the texts that are to stop it, whole and in a stream alike."""
    whole = alone(PROMPT, 64)
    stop = [whole[20:23], "never said"]
    expected = whole[: whole.find(stop[0])]
    answer = server.complete(PROMPT, 64, stop=stop)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")
    pieces = [*server.complete(PROMPT, 64, stop=stop, stream=True)]
    assert "".join(piece.choices[0].text for piece in pieces) == expected
    assert pieces[-1].choices[0].finish_reason == "stop"


def test_many_at_once(server: Any, alone: Alone) -> None:
    """Requests that share the engine's thread get the answers that they get alone."""
    prompts = [f"{number}. {PROMPT[: 7 * number]}" for number in range(1, 11)]
    with ThreadPoolExecutor(8) as pool:
        answers = [*pool.map(lambda prompt: server.complete(prompt, 20).choices[0].text, prompts)]
    assert answers == [alone(prompt, 20) for prompt in prompts]


def test_a_short_request_beside_a_long_one(server: Any, alone: Alone) -> None:
    """A long answer keeps nobody waiting; when its client hangs up, it ends, and its blocks are free."""
    free, before = (
        server.metric("kvbelay_serve_free_blocks"),
        server.metric('kvbelay_serve_requests_total{end="cancelled"}'),
    )
    with server.complete("long", 4000, stream=True, extra={"ignore_eos": True}) as long:
        assert next(long).choices[0].finish_reason is None
        assert server.complete(PROMPT, 4).choices[0].text == alone(PROMPT, 4)
        assert server.metric("vllm:num_requests_running") == 1
        assert server.metric("kvbelay_serve_free_blocks") < free
    server.until(lambda: server.metric("kvbelay_serve_free_blocks") == free)
    assert server.metric('kvbelay_serve_requests_total{end="cancelled"}') == before + 1


def test_hanging_up_without_a_stream(server: Any) -> None:
    """A client that waits for a whole answer and goes away cancels it too."""
    free, before = (
        server.metric("kvbelay_serve_free_blocks"),
        server.metric('kvbelay_serve_requests_total{end="cancelled"}'),
    )
    with pytest.raises(openai.APITimeoutError):
        server.complete("long", 4000, extra={"ignore_eos": True}, timeout=0.3)
    server.until(lambda: server.metric('kvbelay_serve_requests_total{end="cancelled"}') == before + 1)
    assert server.metric("kvbelay_serve_free_blocks") == free


def test_models_and_health(server: Any) -> None:
    """The one model is listed, and the server is healthy."""
    (model,) = server.client.models.list().data
    assert (model.id, model.max_model_len) == ("tiny", 4096)
    assert server.get("/health")[0] == 200


COMPLETION = {"model": "tiny", "prompt": "x", "max_tokens": 1}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
PICTURE = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}
REFUSED: dict[str, tuple[int, dict[str, Any], str]] = {
    "another model": (404, COMPLETION | {"model": "gpt"}, "'gpt' does not exist; 'tiny' does"),
    "no prompt": (400, {"model": "tiny"}, "missing required field `prompt`"),
    "an empty prompt": (400, COMPLETION | {"prompt": ""}, "the prompt is empty"),
    "two prompts": (400, COMPLETION | {"prompt": ["a", "b"]}, "one prompt a request"),
    "no token": (400, COMPLETION | {"prompt": [257]}, "a token is not one of the model's 257"),
    "too long": (400, COMPLETION | {"max_tokens": 4096}, "do not fit into 4096"),
    "no tokens wanted": (400, COMPLETION | {"max_tokens": 0}, ">= 1"),
    "two answers": (400, COMPLETION | {"n": 2}, "does not know n"),
    "an echo": (400, COMPLETION | {"echo": True}, "does not know echo"),
    "probabilities": (400, COMPLETION | {"logprobs": 3}, "does not know logprobs"),
    "an empty stop": (400, COMPLETION | {"stop": ""}, "$.stop"),
    "a picture": (400, CHAT | PICTURE, "reads text only"),
    "tools": (400, CHAT | {"tools": [{"type": "function"}]}, "does not know tools"),
    "a form": (400, CHAT | {"response_format": {"type": "json_object"}}, "plain text only"),
    "nothing said": (400, CHAT | {"messages": []}, "$.messages"),
    "odd transfer parameters": (400, COMPLETION | {"kv_transfer_params": 7}, "$.kv_transfer_params"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(server: Any, case: str) -> None:
    """What cannot be served is refused in the API's own form, with a sentence that says what is wrong."""
    status, body, sentence = REFUSED[case]
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    found, answer = server.post(path, json.dumps(body).encode())
    assert found == status
    assert sentence in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"


def test_bodies_that_are_none(server: Any) -> None:
    """A body that is no JSON, too deep, or too large, and a path that there is not, are refused in the same form."""
    for body in (b"", b"{", b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt":' + b"[" * 5000):
        assert server.post("/v1/completions", body)[0] == 400
    status, answer = server.post("/v1/completions", b'{"prompt": "' + b"x" * (5 << 20) + b'"}')
    assert (status, "error" in answer) == (413, True)
    assert server.post("/v1/nothing", b"{}")[0] == 404


def test_a_port_that_is_taken(start: Any) -> None:
    """The server says which port, in one sentence, and exits with code 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = start("late", port=taken.getsockname()[1])
        assert server.process.wait(30) == 1
    (sentence,) = [line for line in server.log.read_text().splitlines() if line.startswith("Error")]
    assert str(taken) not in sentence
    assert "address already in use" in sentence
