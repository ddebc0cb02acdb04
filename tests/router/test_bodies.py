"""What is read of a body, and of a stream, whatever they hold."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbelay.errors import KvbelayError, PeerFailed, ProtocolViolation
from kvbelay.router.body import PARAMS, for_decode, for_prefill, params_of, read
from kvbelay.router.config import Routing
from kvbelay.router.events import HELD_MOST, Events, failure

ROUTING = Routing()
LIMIT = 4096

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
known = st.sampled_from(
    ["prompt", "messages", "n", "best_of", "stream", "max_tokens", "min_tokens", "stream_options", "echo", PARAMS]
)
bodies = st.dictionaries(known | st.text(max_size=6), values, max_size=6)


@given(bodies)
def test_any_object(body: dict[str, Any]) -> None:
    """Whatever its fields hold, a JSON object is understood, and only the protocol's own fields are changed in it."""
    raw = json.dumps(body).encode()
    asked = read(raw, ROUTING)
    assert asked.tokens >= 0
    assert for_decode(asked, None) == raw
    changed = {"max_tokens", "max_completion_tokens", "min_tokens", "stream", "stream_options", PARAMS}
    prefill = json.loads(for_prefill(asked))
    assert {k: v for k, v in prefill.items() if k not in changed} == {k: v for k, v in body.items() if k not in changed}
    assert prefill["max_tokens"] == 1
    assert prefill[PARAMS]["do_remote_decode"] is True
    assert prefill.get("stream", False) is False
    decode = json.loads(for_decode(asked, msgspec.Raw(b'{"x":1}')))
    assert decode == {**body, PARAMS: {"x": 1}}


@given(st.binary(max_size=64) | bodies.map(lambda body: json.dumps(body).encode()[:-1]))
def test_any_bytes(raw: bytes) -> None:
    """Bytes that are no JSON object are refused with an error of ours."""
    with contextlib.suppress(ProtocolViolation):
        read(raw, ROUTING)


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": "x" * 401}, 101),
        ({"prompt": "漢" * 400}, 100),
        ({"prompt": list(range(77))}, 77),
        ({"prompt": [[1, 2, 3], [4]]}, 4),
        ({"prompt": ["x" * 40, "x" * 41]}, 21),
        ({"prompt": None}, 0),
        ({"prompt": []}, 0),
        ({"prompt": 5}, 0),
        ({"messages": [{"role": "user", "content": "x" * 384}]}, 100),
        (
            {"messages": [{"content": [{"text": "x" * 384}, {"image_url": "data"}]}]},
            100,
        ),
        ({"messages": [{"content": None}]}, 4),
        ({"messages": [{"role": "user", "content": "x" * 384}], "tools": ["x" * 396]}, 200),
        ({"messages": "odd"}, 2),
        ({}, 0),
    ],
)
def test_tokens(body: dict[str, Any], tokens: int) -> None:
    """Token ids are counted; texts have a token for four characters; a message costs sixteen characters more."""
    assert read(json.dumps(body).encode(), ROUTING).tokens == tokens


@pytest.mark.parametrize("answer", [b"", b"{", b"[]", b"{}", b'{"kv_transfer_params": 1}', b"[" * 100_000])
def test_no_parameters(answer: bytes) -> None:
    """A prefill's answer without parameters is an error that names the instance and what to look at."""
    with pytest.raises(ProtocolViolation, match="p1"):
        params_of(answer, "p1")


def test_a_prompts_beginning() -> None:
    """Prompts that begin alike have the same key; those that do not, have not."""

    def key(text: str, **fields: Any) -> bytes:
        return read(json.dumps({"prompt": text, **fields}).encode(), ROUTING).key

    long = "x" * 2000
    assert key(long + "a") == key(long + "b", user="another")
    assert key("a" + long) != key("b" + long)


TOKEN = b'data: {"choices": [{"text": "a"}]}\n\n'
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}\n\n'


@given(st.lists(st.integers(0, 400), max_size=8).map(sorted), st.sampled_from([b"\n\n", b"\r\n\r\n"]))
def test_cut_anywhere(cuts: list[int], mark: bytes) -> None:
    """However a stream is cut, whole events come out, in order and complete; the end is seen."""
    whole = (ROLE + b": a comment\n\n" + TOKEN * 4 + b"data: [DONE]\n\n").replace(b"\n\n", mark)
    events, out = Events("d1", LIMIT), []
    for start, stop in zip([0, *cuts], [*cuts, len(whole)], strict=True):
        out.append(events.feed(whole[start:stop]))
    assert b"".join(out) == whole
    assert all(not piece or piece.endswith(mark) for piece in out)
    assert events.done
    assert not events.broken


@given(st.lists(st.binary(max_size=40) | st.sampled_from([TOKEN, ROLE, b"data: ", b"\n\n", b"{}"]), max_size=12))
def test_any_stream(pieces: list[bytes]) -> None:
    """Bytes of any kind come out as they are, or are refused with an error of ours."""
    events, out = Events("d1", LIMIT), b""
    try:
        for piece in pieces:
            out += events.feed(piece)
    except KvbelayError:
        return
    assert b"".join(pieces).startswith(out)


@pytest.mark.parametrize(
    ("event", "begins"),
    [
        (b'{"choices": [{"text": ""}]}', False),
        (b'{"choices": [{"text": "a"}]}', True),
        (b'{"choices": [{"text": "", "finish_reason": "stop"}]}', True),
        (b'{"choices": [{"delta": {"role": "assistant", "content": ""}}]}', False),
        (b'{"choices": [{"delta": {"content": "a"}}]}', True),
        (b'{"choices": [{"delta": {"reasoning": "a"}}]}', True),
        (b'{"choices": [{"delta": {"tool_calls": [{}]}}]}', True),
        (b'{"choices": [], "usage": {}}', False),
        (b'{"choices": [{"text": 5}]}', True),
        (b'{"error": null, "choices": []}', False),
        (b"[DONE]", True),
    ],
)
def test_where_an_answer_begins(event: bytes, begins: bool) -> None:
    """Roles and empty texts are no beginning; a token, a reason to stop, and what is not understood are."""
    events = Events("d1", LIMIT)
    assert bool(events.feed(b"data: " + event + b"\n\n")) is begins
    assert events.begun is begins


def test_what_is_held_has_a_limit() -> None:
    """A stream that only ever sends empty texts is let through before it takes memory without end."""
    events = Events("d1", LIMIT)
    pieces = [events.feed(ROLE) for _ in range(HELD_MOST // len(ROLE) + 2)]
    assert b"".join(pieces) == ROLE * len(pieces)


def test_an_error_before_and_after() -> None:
    """An error before the first token is the instance's failure; one after it is passed on and remembered."""
    error = b'data: {"error": {"message": "the prompt", "code": 500}}\n\n'
    with pytest.raises(PeerFailed, match=r"d1 has sent an error .* .code 500.") as caught:
        Events("d1", LIMIT).feed(ROLE + error)
    assert "the prompt" not in str(caught.value)
    events = Events("d1", LIMIT)
    assert events.feed(TOKEN + error) == TOKEN + error
    assert events.broken


def test_our_own_error() -> None:
    """What ends a broken stream is one event in the API's form, and the end."""
    first, second, rest = failure("why").split(b"\n\n")
    assert json.loads(first.removeprefix(b"data: "))["error"]["message"] == "why"
    assert (second, rest) == (b"data: [DONE]", b"")
