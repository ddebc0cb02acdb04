"""What clients ask of a server."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from fuzz.target import JSON, Target, same, typed
from kvbelay.reference.tokenizer import ByteTokenizer
from kvbelay.serve.requests import Chat, Completion, Refused, read

SEEDS = (
    {"model": "m", "prompt": "Why?", "max_tokens": 4, "stop": ["\n", "."], "stream": True, "n": 1, "user": "u"},
    {"prompt": [1, 2, 3], "kv_transfer_params": {"do_remote_decode": True, "remote_host": None}, "logprobs": None},
    {"prompt": [[1, 2]], "kv_transfer_params": {"do_remote_prefill": True, "kvbelay_tickets": [{}]}, "stop": "x"},
    {"messages": [{"role": "user", "content": "Why?"}], "max_completion_tokens": 4, "tools": []},
    {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}],
        "response_format": {"type": "text"},
    },
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}], "stream_options": {"include_usage": True}},
    {"prompt": "two", "n": 2, "best_of": 3},
)


def _take(data: bytes) -> None:
    for kind in (Completion, Chat):
        question = typed(lambda kind=kind: read(data, kind), Refused, heard=len(data))  # type: ignore[misc]
        if question is not None:
            typed(lambda question=question: question.tokens(ByteTokenizer()), Refused)  # type: ignore[misc]
            same(question, read(msgspec.json.encode(question), kind))


def _seeds() -> Iterable[bytes]:
    yield from map(msgspec.json.encode, SEEDS)


TARGETS = (Target("requests", _take, _seeds, JSON),)
