"""What the processes of a raw engine are asked, and what they answer."""

from __future__ import annotations

import msgspec


class Setup(msgspec.Struct, frozen=True):
    """What a process is for."""

    engine: str
    nbytes: int
    """Of the largest batch."""
    seed: int


class Ask(msgspec.Struct, frozen=True):
    """Where does the source's batch of that size stand? The answer is a `Standing`."""

    piece_nbytes: int
    nbytes: int


class Standing(msgspec.Struct, frozen=True):
    """Where the source can be asked, and the address of each piece."""

    peer: str
    addresses: list[int]


class Get(msgspec.Struct, frozen=True):
    """Read it into the reader's batch of that size. The answer is `Got`."""

    piece_nbytes: int
    nbytes: int
    standing: Standing
    look: bool = False
    """Whether the destination is poisoned before, and looked at after."""


class Got(msgspec.Struct, frozen=True):
    """How long it took, and the digest of what landed, if that was asked for."""

    took_s: float
    landed: bytes = b""
