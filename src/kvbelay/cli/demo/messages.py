"""What the demo's processes say to one another: a line of JSON a message, on standard input and output."""

from __future__ import annotations

import sys
from typing import IO, Any, TypeVar

import msgspec

from kvbelay.connectors.faulty import Fault, Strike
from kvbelay.core.model import Outcome, Ticket
from kvbelay.errors import ProtocolViolation

LINE_LIMIT = 16 << 20
"""Most bytes of one message."""
LEASE_S = 30.0
"""How long prefill keeps what nobody has fetched."""
STORE_NBYTES = 1 << 30


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line that a worker reads."""

    model: str
    weights: str
    """Directory with the weights that all processes map."""
    near: str
    """Address of the child ``near``."""
    store: str
    """Directory of the child ``store``."""
    blocks: int
    seed: int
    strikes: dict[str, tuple[Strike, ...]] = {}
    """What strikes the decode side's children, by name."""

    def near_config(self) -> tuple[str, dict[str, Any]]:
        """The child ``near`` on the prefill side: connector and configuration."""
        return "stream", {"listen": self.near, "lease_s": LEASE_S}

    def store_config(self) -> tuple[str, dict[str, Any]]:
        """The child ``store``, the same on both sides."""
        return "file", {"path": self.store, "capacity_nbytes": STORE_NBYTES}


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The worker has its model and its children."""


class Refused(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refused"):
    """The worker cannot go on; the sentence says why."""

    sentence: str


class Prompt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request, to the prefill process and then to the decode process; also to the one that answers alone."""

    id: str
    tokens: tuple[int, ...]
    max_new: int
    disk_full: bool = False
    """Prefill: the operating system refuses to let files grow while this one is saved."""
    tickets: tuple[Ticket, ...] = ()
    """Decode: what prefill gave."""


class Prefilled(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prefilled"):
    """The prefill process is done with a request."""

    id: str
    outcome: Outcome | None
    """None: the prompt is too short to move anything."""
    took_s: float


class StruckNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="struck"):
    """A fault strikes at this moment."""

    id: str
    child: str
    fault: Fault


class Loaded(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="loaded"):
    """The decode process knows how the transfer ended."""

    id: str
    outcome: Outcome | None
    nbytes: int
    """Bytes that children moved, in all attempts."""
    log: tuple[str, ...]
    """What was decided, step by step."""


class Answered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="answered"):
    """The answer."""

    id: str
    tokens: tuple[int, ...]
    recomputed: int
    took_s: float


class Ended(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ended"):
    """The decode process's last word: what changed nothing, and what is left over."""

    swallowed: dict[str, int]
    """Completions that changed nothing, by child and reason."""
    pending: int
    """Requests of which the layer still holds something."""
    blocks: int
    """Blocks of the KV cache that are not free."""


FromWorker = Ready | Refused | Prefilled | StruckNow | Loaded | Answered | Ended

T = TypeVar("T")


def write(stream: IO[bytes], message: msgspec.Struct) -> None:
    """Send one message."""
    stream.write(msgspec.json.encode(message) + b"\n")
    stream.flush()


def say(message: FromWorker) -> None:
    """A worker's word to the stage."""
    write(sys.stdout.buffer, message)


def decode(line: bytes, kind: type[T]) -> T:
    """Read one message. Raises `ProtocolViolation`."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.DecodeError as exc:
        msg = f"a message of {len(line)} bytes cannot be read: {exc}"
        raise ProtocolViolation(msg) from exc
