"""What an engine hears of the others."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import NamedTuple, TypeAlias

from kvbelay.link.messages import Gone, Offer


class Source(NamedTuple):
    """One life of an engine that has offered something."""

    endpoint: str
    incarnation: int
    host: str = ""
    """`this_host` of the engine; empty: unknown, or others call it elsewhere than where it listens."""
    process: str = ""
    """`processes.name_of` the engine's process; empty: unknown."""


class Told(NamedTuple):
    """The source's answer."""

    source: Source
    message: Offer | Gone


class Died(NamedTuple):
    """The source is dead: its process has ended, nobody listens at its endpoint any more, or another incarnation does
    (see `life`).
    """

    source: Source
    cause: str


class Freed(NamedTuple):
    """An engine that was to load an offer of ours loads it no more, nor does any other."""

    request: str
    engine: str
    kind: str
    cause: str


Event: TypeAlias = Told | Died | Freed


def this_host() -> str:
    """The same for all processes that share this one's loopback, until the host is started again."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        network = Path("/proc/self/ns/net").stat().st_ino
    except OSError:
        return ""
    return hashlib.blake2b(b"%s %d" % (boot, network), digest_size=8).hexdigest()
