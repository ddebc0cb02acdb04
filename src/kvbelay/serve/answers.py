"""What a client gets: bodies and chunks of the OpenAI API, as JSON."""

from __future__ import annotations

import time
from typing import Any, ClassVar

import msgspec

from kvbelay.serve.requests import Refused


class Usage(msgspec.Struct):
    """What a request took."""

    prompt: int
    brought: int = 0
    """Tokens of the prompt that a transfer brought, or that were computed before."""
    answer: int = 0

    def to_builtins(self) -> dict[str, Any]:
        """As the API says it."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.answer,
            "total_tokens": self.prompt + self.answer,
            "prompt_tokens_details": {"cached_tokens": self.brought},
        }


class Form:
    """How the answers of one endpoint look; this one's are completions."""

    prefix: ClassVar[str] = "cmpl"
    whole: ClassVar[str] = "text_completion"
    piece: ClassVar[str] = "text_completion"

    def __init__(self, request: str, model: str) -> None:
        self._head = {"id": f"{self.prefix}-{request}", "created": int(time.time()), "model": model}

    def body(self, text: str, finish: str, usage: Usage, params: dict[str, Any] | None) -> bytes:
        """The answer to a request that does not stream."""
        return msgspec.json.encode(
            self._head
            | {
                "object": self.whole,
                "choices": [{"index": 0, "finish_reason": finish, "logprobs": None, **self._said(text)}],
                "usage": usage.to_builtins(),
                "kv_transfer_params": params,
            }
        )

    def first(self) -> bytes:
        """The chunk before any text; empty where there is none."""
        return b""

    def chunk(self, text: str, finish: str | None = None, params: dict[str, Any] | None = None) -> bytes:
        """A piece of a stream."""
        return self._chunk(self._adds(text), finish, params)

    def usage(self, usage: Usage) -> bytes:
        """The chunk that says what it took."""
        return event(self._head | {"object": self.piece, "choices": [], "usage": usage.to_builtins()})

    def _chunk(self, says: dict[str, Any], finish: str | None, params: dict[str, Any] | None) -> bytes:
        choice = {"index": 0, "finish_reason": finish, "logprobs": None, **says}
        more = {} if params is None else {"kv_transfer_params": params}
        return event(self._head | {"object": self.piece, "choices": [choice]} | more)

    def _said(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _adds(self, text: str) -> dict[str, Any]:
        return {"text": text}


class ChatForm(Form):
    """How the answers of chats look."""

    prefix = "chatcmpl"
    whole = "chat.completion"
    piece = "chat.completion.chunk"

    def first(self) -> bytes:
        return self._chunk({"delta": {"role": "assistant", "content": ""}}, None, None)

    def _said(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}}

    def _adds(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}


END = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error(refused: Refused) -> dict[str, Any]:
    """The body of an error."""
    kind = "invalid_request_error" if refused.status < 500 else "server_error"  # noqa: PLR2004 # HTTP's classes
    return {"error": {"message": refused.what, "type": kind, "param": refused.field, "code": refused.code}}
