"""What a fuzz target is, and what each of them asserts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import msgspec

from kvbelay.errors import KvbelayError

T = TypeVar("T")

TEXT_LIMIT = 4000
"""Most characters that an error may have beyond what it was told."""


class Shape(NamedTuple):
    """How the bytes of a target are built, for mutations that keep them decodable."""

    load: Callable[[bytes], Any]
    """Their content as plain values. Raises where they have none."""
    dump: Callable[[Any], bytes]


class Target(NamedTuple):
    """One decoder of foreign bytes."""

    name: str
    take: Callable[[bytes], None]
    """Decode, and raise for whatever must not be."""
    seeds: Callable[[], Iterable[bytes]]
    """Inputs that it understands, and some that it just does not."""
    shape: Shape | None = None
    short: int = 3000
    """Inputs in a short campaign: about a second's worth."""


class Finding(AssertionError):
    """Something came out of a decoder that must not."""


MSGPACK = Shape(msgspec.msgpack.decode, msgspec.msgpack.encode)
JSON = Shape(json.loads, lambda value: json.dumps(value).encode())
"""The standard library's: it writes what msgspec would refuse to, such as integers of any size and lone surrogates."""


def typed(decode: Callable[[], T], *leaves: type[KvbelayError], heard: int = 0) -> T | None:
    """What it returns, or None if it raised one of these leaves. Any other exception passes through.

    ``heard`` is the size of the input, in bytes: an error may repeat it, and little more.
    """
    try:
        return decode()
    except leaves as exc:
        told = str(exc).encode()  # a text that cannot be encoded would break whoever logs it
        if len(told) > TEXT_LIMIT + 8 * heard:
            msg = f"{len(told)} bytes of error for {heard} bytes of input"
            raise Finding(msg) from exc
        return None


def same(value: object, again: object) -> None:
    """What was decoded must come back equal when it has been encoded."""
    if value != again:
        msg = f"decoded {value!r:.400}, and {again!r:.400} once encoded and decoded again"
        raise Finding(msg)
