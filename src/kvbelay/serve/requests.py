"""What a client asks, decoded once: the parts of the OpenAI API that the reference engine knows.

Sampling parameters are accepted and change nothing: the engine is greedy. What would change the answer's shape is
refused, and fields that nobody knows are ignored, as vLLM does.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from kvbelay.errors import KvbelayError
from kvbelay.reference import Tokenizer

BODY_NBYTES = 4 << 20
"""Most bytes of a request's body."""
COMPLETION_TOKENS = 16
"""Length of a completion that does not say; the OpenAI API's own default."""
CHAT_TOKENS = 256
"""Length of a chat's answer that does not say."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Stop = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Stops = Annotated[tuple[Stop, ...], msgspec.Meta(max_length=16)]


class Refused(KvbelayError):
    """A request that cannot be served; ``status`` is HTTP's, ``field`` the parameter that is to blame."""

    def __init__(self, what: str, *, status: int = 400, field: str | None = None, code: str | None = None) -> None:
        super().__init__(what)
        self.status = status
        self.field = field
        self.code = code


class Transfers(msgspec.Struct, frozen=True):
    """``kv_transfer_params``: vLLM's two switches, and what `transfer.Transfer` packs. Routers may add fields."""

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    kvbelay_tickets: msgspec.Raw = msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream is to say besides the text."""

    include_usage: bool = False


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    stop: Stop | Stops | None = None
    ignore_eos: bool = False
    kv_transfer_params: Transfers | None = None
    n: int | None = None
    logprobs: bool | int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the answer."""
        return (self.stop,) if isinstance(self.stop, str) else self.stop or ()

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage


class Completion(Ask, frozen=True, kw_only=True):
    """``/v1/completions``."""

    prompt: str | list[str | int | list[int]]
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    @property
    def length(self) -> int:
        """Most tokens of the answer."""
        return self.max_tokens or COMPLETION_TOKENS

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Of the prompt: a text, its tokens, or a list with one of the two."""
        prompt = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            (prompt,) = prompt  # type: ignore[assignment]
        if isinstance(prompt, str):
            return tokenizer.encode(prompt)
        tokens = [token for token in prompt if isinstance(token, int)]
        if len(tokens) < len(prompt):
            raise Refused("one prompt a request", field="prompt")
        return tokens


class Part(msgspec.Struct, frozen=True):
    """A part of a message."""

    type: str
    text: str = ""


class Message(msgspec.Struct, frozen=True):
    """One turn of a conversation."""

    role: str
    content: str | list[Part] | None = None

    @property
    def text(self) -> str:
        """Its parts' text; raises `Refused` for pictures and the like."""
        if isinstance(self.content, list):
            if any(part.type != "text" for part in self.content):
                raise Refused("the reference engine reads text only", field="messages")
            return "".join(part.text for part in self.content)
        return self.content or ""


class Chat(Ask, frozen=True, kw_only=True):
    """``/v1/chat/completions``."""

    messages: Annotated[list[Message], msgspec.Meta(min_length=1)]
    max_completion_tokens: Positive | None = None
    tools: list[Any] | None = None
    response_format: dict[str, Any] | None = None

    @property
    def length(self) -> int:
        """Most tokens of the answer."""
        return self.max_completion_tokens or self.max_tokens or CHAT_TOKENS

    def tokens(self, tokenizer: Tokenizer) -> list[int]:
        """Of the whole conversation."""
        return tokenizer.conversation([(message.role, message.text) for message in self.messages])


Question = TypeVar("Question", Completion, Chat)


def read(body: bytes, kind: type[Question]) -> Question:
    """Decode a body. Raises `Refused`."""
    try:
        question = msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as exc:
        msg = f"the body cannot be read: {exc}"
        raise Refused(msg) from exc
    for field, plain in {"n": 1, "best_of": 1, "logprobs": 0, "echo": 0, "suffix": "", "tools": []}.items():
        if getattr(question, field, None) not in (None, plain):
            msg = f"the reference engine does not know {field}"
            raise Refused(msg, field=field)
    if getattr(question, "response_format", None) not in (None, {"type": "text"}):
        raise Refused("the reference engine answers with plain text only", field="response_format")
    return question
