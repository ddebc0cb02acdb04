"""What the bench and its processes say to each other."""

from __future__ import annotations

import msgspec

SHORT = "Hello"
LONG = "The clerk copies the ledger of the harbour, ship after ship, and leaves no line out. " * 4
"""Long enough to be prefilled by one engine and decoded by the other."""


class Engine(msgspec.Struct):
    """Setup of an engine."""

    name: str


class Where(msgspec.Struct, tag=True):
    """Ask an engine for its port."""


class Release(msgspec.Struct, tag=True):
    """Let an engine end the streams that it holds open."""


class Port(msgspec.Struct):
    """The answer to both."""

    port: int


class Client(msgspec.Struct):
    """Setup of the load."""


class Load(msgspec.Struct, tag=True):
    """Ask for that many requests, as many at once as there are connections."""

    port: int
    prompt: str
    connections: int
    requests: int


class Open(msgspec.Struct, tag=True):
    """Open that many streams, and come back when each has its first token."""

    port: int
    prompt: str
    streams: int


class Finish(msgspec.Struct, tag=True):
    """Come back when the open streams have ended."""


class Loaded(msgspec.Struct):
    """What came of it."""

    answered: int
    """With 200, or in a stream that is as far as it was to come."""
    took_s: float
    median_s: float = 0.0
    p99_s: float = 0.0
