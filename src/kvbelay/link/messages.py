"""What two engines tell each other (see `kvbelay.net.frames`)."""

from __future__ import annotations

import re
import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, TypeAlias

import msgspec

from kvbelay.net.frames import MAX_TEXT, Message, Number, Refused

VERSION = 1
"""Of what is said; the frames have one of their own."""
MAX_NAME = 512
MAX_KIND = 64
MAX_GROUPS = 64
MAX_WRITERS = 256
MAX_DIGESTS_NBYTES = 14 << 16
"""Of all KV cache groups together, some 114,000 blocks: with all else that is said of an offer they fit a message."""

_SURROGATES = re.compile("[\ud800-\udfff]")
"""What Python's text can hold, and no encoding can."""

Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Kind: TypeAlias = Annotated[str, msgspec.Meta(max_length=MAX_KIND)]


class Hello(Message, frozen=True, tag=32):
    """The first message of both sides, the caller's first."""

    version: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)]
    engine: Name
    incarnation: Number
    """Which life of the engine this is."""
    endpoint: Name
    """Where it can be dialled; empty: nowhere."""
    host: Name = ""
    """`events.this_host` of the engine; empty: unknown."""


class Process(Message, frozen=True):
    """One process of a host; see `kvbelay.link.processes`."""

    space: Kind
    pid: Annotated[int, msgspec.Meta(ge=1, le=(1 << 31) - 1)]
    started: Number


class Want(Message, frozen=True, tag=33):
    """I load what you have offered for this request. The answer is `Offer` or `Gone`, as soon as there is one."""

    request: Name


class Offer(Message, frozen=True, tag=34):
    """What was offered, and is still there."""

    request: Name
    lease_s: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """Seconds for which its blocks are kept; 0: they are free, and nothing may be loaded from them any more."""
    tokens: Number
    """Of the prompt."""
    digests: Annotated[
        tuple[Annotated[bytes, msgspec.Meta(max_length=MAX_DIGESTS_NBYTES)], ...], msgspec.Meta(max_length=MAX_GROUPS)
    ]
    """For each KV cache group a number that both sides' digests have in common, then the digests of its blocks, the
    first block's first; see `packed`.
    """
    forms: Annotated[tuple[Text, ...], msgspec.Meta(max_length=MAX_GROUPS)]
    """For each group what both sides' digests have to have in common to be compared."""
    unverified: Text = ""
    """Why there are no digests."""
    writers: Annotated[tuple[Process, ...], msgspec.Meta(max_length=MAX_WRITERS)] = ()
    """The processes that move it, where they are what writes."""


class Gone(Message, frozen=True, tag=35):
    """It was never offered, or is not there any more; ``kind`` (a leaf of `kvbelay.errors`) and ``cause`` say why, as
    far as anybody knows.
    """

    request: Name
    kind: Kind = ""
    cause: Text = ""


class Ended(Message, frozen=True, tag=36):
    """I load nothing more of it, and nobody reads it for me. ``kind`` and ``cause`` say what went wrong; empty: it was
    loaded, and the connector has told its other side itself.
    """

    request: Name
    kind: Kind = ""
    cause: Text = ""


Said: TypeAlias = Want | Offer | Gone | Ended

HELLO = msgspec.msgpack.Decoder(Hello)
WELCOME: msgspec.msgpack.Decoder[Hello | Refused] = msgspec.msgpack.Decoder(Hello | Refused)
"""What a caller is answered."""
SAID: msgspec.msgpack.Decoder[Said] = msgspec.msgpack.Decoder(Said)


def sayable(name: str) -> bool:
    """Whether a request of that name can be spoken of. Clients choose the names, and peers refuse long ones."""
    return len(name) <= MAX_NAME and not _SURROGATES.search(name)


def clipped(text: str, most: int = MAX_TEXT) -> str:
    """As much of a text as can be said."""
    return _SURROGATES.sub("?", text[:most])


def packed(digests: Sequence[int]) -> bytes:
    """Unsigned words of 64 bits, the lowest byte first."""
    return _little(array("Q", digests)).tobytes()


def unpacked(data: bytes) -> array[int]:
    """What `packed` packed; a rest that is no whole word is left out."""
    return _little(array("Q", data[: len(data) // 8 * 8]))


def _little(words: array[int]) -> array[int]:
    if sys.byteorder == "big":
        words.byteswap()
    return words
