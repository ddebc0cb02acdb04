"""What the router reads of a request's body, and the bodies that it makes of it.

Fields stay the bytes that the client sent: only those that the protocol changes are written anew.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec

from kvbelay.errors import ProtocolViolation
from kvbelay.router.config import Routing

OFFER = msgspec.Raw(
    msgspec.json.encode(
        {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    )
)
"""What vLLM's P/D protocol sends to the prefill side."""
PARAMS = "kv_transfer_params"
ONE = msgspec.Raw(b"1")
MESSAGE_CHARS = 16
"""What a chat template adds to a message, roughly."""
SEVERAL = ("n", "best_of")
WHOLE = ("prompt_logprobs", "use_beam_search")
"""Where these are asked for, the instance that answers has to compute the prompt itself."""

Fields = dict[str, msgspec.Raw]


class _Part(msgspec.Struct):
    text: str = ""


class _Message(msgspec.Struct):
    content: str | list[_Part] | None = None


class _Prefilled(msgspec.Struct):
    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


_fields = msgspec.json.Decoder(Fields).decode
_messages = msgspec.json.Decoder(list[_Message]).decode
_prefilled = msgspec.json.Decoder(_Prefilled).decode
_encode = msgspec.json.Encoder().encode


class Asked(msgspec.Struct, frozen=True):
    """A request."""

    body: bytes
    """As it came."""
    fields: Fields
    tokens: int
    """Of the prompt: counted where the client sent token ids, else estimated."""
    key: bytes
    """What it begins with; empty if no instance is to be preferred for it."""
    direct: str
    """Why it needs no prefill instance; empty if it does."""
    stream: bool = False


NOTHING = Asked(b"", {}, 0, b"", "no prompt")
"""What has none, such as the list of models."""


def read(body: bytes, routing: Routing) -> Asked:
    """What there is to know of a request. Raises `ProtocolViolation` if it is no JSON object."""
    try:
        fields = _fields(body)
        tokens, prompts = _count(fields, routing.chars_per_token)
        direct = _direct(fields, tokens, prompts, routing)
        stream = _value(fields, "stream") is True
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolViolation("the request's body cannot be read as a JSON object") from exc
    prompt = fields.get("prompt", fields.get("messages", msgspec.Raw(b"null")))
    key = bytes(memoryview(prompt)[: routing.affinity_chars])
    return Asked(body, fields, tokens, key, direct, stream)


def _direct(fields: Fields, tokens: int, prompts: int, routing: Routing) -> str:
    if _value(fields, PARAMS) is not None:
        return "its own transfer parameters"
    if prompts > 1 or any(_value(fields, name) not in (None, 1) for name in SEVERAL):
        return "several answers"
    if any(_value(fields, name) not in (None, False) for name in WHOLE):
        return "needs the whole prompt"
    if _value(fields, "echo") is True and _value(fields, "logprobs") is not None:
        return "needs the whole prompt"
    return "short" if tokens <= routing.short_tokens else ""


def _value(fields: Fields, name: str) -> Any:
    """A field's value, None if there is none; objects need not be decoded to be known as such."""
    raw = fields.get(name)
    return None if raw is None else msgspec.json.decode(raw)


def _count(fields: Fields, chars_per_token: float) -> tuple[int, int]:
    """Tokens of the prompt, and how many prompts there are."""
    if "prompt" in fields:
        prompt = _value(fields, "prompt")
        parts = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        return sum(_length(part, chars_per_token) for part in parts), len(parts)
    raw = fields.get("messages", msgspec.Raw(b"[]"))
    try:
        messages = _messages(raw)
    except msgspec.ValidationError:  # a shape that the instance may know
        return _estimate(len(memoryview(raw)), chars_per_token), 1
    chars = len(memoryview(fields.get("tools", msgspec.Raw(b""))))
    for message in messages:
        texts = [message.content] if isinstance(message.content, str) else [p.text for p in message.content or ()]
        chars += MESSAGE_CHARS + sum(map(len, texts))
    return _estimate(chars, chars_per_token), 1


def _length(part: object, chars_per_token: float) -> int:
    """Tokens of one prompt, a text or a list of them; 0 of what is neither."""
    if isinstance(part, str):
        return _estimate(len(part), chars_per_token)
    return len(part) if isinstance(part, list) else 0


def _estimate(chars: int, chars_per_token: float) -> int:
    return math.ceil(chars / chars_per_token)


def for_prefill(asked: Asked) -> bytes:
    """The client's body with one token to generate, and the offer to fetch what was computed."""
    fields = {**asked.fields, "max_tokens": ONE, PARAMS: OFFER}
    if "max_completion_tokens" in fields:
        fields["max_completion_tokens"] = ONE
    if "min_tokens" in fields:
        least = _value(fields, "min_tokens")
        if isinstance(least, int) and least > 1:
            fields["min_tokens"] = ONE
    if "stream" in fields:
        fields["stream"] = msgspec.Raw(b"false")
    fields.pop("stream_options", None)
    return _encode(fields)


def params_of(answer: bytes, peer: str) -> msgspec.Raw:
    """The transfer parameters in a prefill's answer, unchanged. Raises `ProtocolViolation` if it has none."""
    try:
        params = _prefilled(answer).kv_transfer_params
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        msg = f"{peer} answered with something that is no JSON object"
        raise ProtocolViolation(msg) from exc
    if not isinstance(msgspec.json.decode(params), dict) or len(memoryview(params)) <= len(b"{}"):
        remedy = "does the instance run with a KV connector?"
        msg = f"{peer} answered without kv_transfer_params"
        raise ProtocolViolation(msg, remedy=remedy)
    return params


def for_decode(asked: Asked, params: msgspec.Raw | None) -> bytes:
    """The client's body, with the transfer parameters if there are any."""
    return asked.body if params is None else _encode({**asked.fields, PARAMS: params})
