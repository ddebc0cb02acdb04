"""What is moved, what happened, and what is to be done: the values that every room shares.

Units stand in names (``_s`` seconds, ``nbytes`` bytes). Token positions are half-open ranges. Everything here is
frozen; nothing here decides anything.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from enum import Enum

import msgspec

LOCATOR_LIMIT = 64 * 1024
"""Most bytes that a backend may put into ``Ticket.locator``."""

PROTOCOL_VERSION = 1


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One KV cache group: shape ``(block, 2, block_tokens, kv_heads, head_dim)`` a layer. MLA has ``kv_heads = 1``."""

    group: int
    layers: tuple[int, ...]
    block_tokens: int
    kv_heads: int
    head_dim: int
    dtype: str
    order: str
    """Axis order inside a block: ``"NHD"`` (token, head, dim) or ``"HND"``."""


class Fingerprint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whose KV this is. Equal on both sides, or the transfer is refused naming the field that differs."""

    model: str
    revision: str
    layouts: tuple[Layout, ...]
    tp_rank: int = 0
    tp_size: int = 1
    version: int = PROTOCOL_VERSION

    def digest(self) -> bytes:
        """16 bytes that stand for the whole in a ``BatchId``."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    def difference(self, other: Fingerprint) -> str | None:
        """The name of the first field in which ``other`` differs, as ``field`` or ``layouts[i].field``; else None."""
        for name in self.__struct_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine == theirs:
                continue
            if name == "layouts" and len(mine) == len(theirs):
                for index, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                    for field in a.__struct_fields__:
                        if getattr(a, field) != getattr(b, field):
                            return f"layouts[{index}].{field}"
            return name
        return None


class BatchId(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a batch holds, without saying for which request: P/D transfers and caches address alike."""

    fingerprint: bytes
    """``Fingerprint.digest()`` of the KV cache that it is a part of."""
    start: int
    stop: int
    """Tokens [start, stop), whole blocks."""
    layers: tuple[int, int]
    """Layers [first, last)."""
    prefix: bytes
    """``chain_prefix`` over tokens [0, stop)."""


def chain_prefix(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Chained hash of a token prefix (16 bytes): ``parent`` is the hash of all tokens before these, b"" at first."""
    return hashlib.blake2b(parent + array("Q", tokens).tobytes(), digest_size=16).digest()


class BlockSpan(msgspec.Struct, frozen=True):
    """Equal pieces of one region of memory. Never on the wire.

    ``region`` is a flat view of bytes (``memoryview(x).cast("B")``), writable where a load lands in it; the caller owns
    it until the call that takes it has returned or raised. ``offsets`` (typecode ``"Q"``) are bytes into the region,
    one a piece, and each piece is ``nbytes`` long.
    """

    region: memoryview
    offsets: array[int]
    nbytes: int


class TransferBatch(msgspec.Struct, frozen=True):
    """One attempt at a batch: its bytes are the pieces of ``spans``, in order, one after the other."""

    id: BatchId
    request: str
    epoch: int
    spans: tuple[BlockSpan, ...]


class Ticket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All that a reader needs to fetch one batch. From a peer it is data, to be decoded with limits."""

    child: str
    batch: BatchId
    peer: str
    incarnation: int
    nbytes: int
    digest: bytes | None = None
    """`connectors.spans.digest_pieces` of the batch (16 bytes); None: the source sends it with the data."""
    lease_s: float | None = None
    """None: copied out, the source's blocks were free when ``put`` returned. Else how long the source serves it."""
    locator: bytes = b""
    """The backend's own, at most LOCATOR_LIMIT bytes."""


class BatchResult(msgspec.Struct, frozen=True):
    """What a connector says of a ``get`` that ended well. The layer compares the digests, never the connector."""

    nbytes: int
    source_digest: bytes | None
    landed_digest: bytes | None
    """Of the destination after the last write; None costs the layer a second pass over the bytes."""
    failed_blocks: tuple[int, ...] = ()
    """For diagnosis. Not empty means that the batch failed, whatever else the result says."""


class Miss(Enum):
    """The source works and does not have it. ``None`` is not a miss: it says nothing, and counts as a failure."""

    MISS = "miss"


class Side(Enum):
    """The direction of a transfer, seen from the engine."""

    LOAD = "load"
    SAVE = "save"


class Leg(Enum):
    """The state of one child's part in one request and direction."""

    WAITING = "waiting"
    ACTIVE = "active"
    DRAINING = "draining"
    HELD = "held"
    DONE = "done"


class Kind(Enum):
    """What can happen. BEGIN concerns a request, all others reach its legs."""

    BEGIN = "begin"
    LANDED = "landed"
    MISSED = "missed"
    FAILED = "failed"
    """It failed, and nobody touches the blocks any more."""
    BROKEN = "broken"
    """It failed, and somebody may still touch the blocks."""
    DRAINED = "drained"
    """Nobody touches the blocks any more; it says nothing of success."""
    DUE = "due"
    """The leg's one timer: backoff, attempt deadline or drain limit."""
    CANCEL = "cancel"
    LOST = "lost"
    """The child was removed or is dead."""


class Swallow(Enum):
    """Why a completion changed nothing."""

    LATE = "late"
    """It speaks of an attempt that is over and gone."""
    UNKNOWN_REQUEST = "unknown request"
    """It names no attempt, and nothing is expected of the child for this request: late, or a phantom."""
    DUPLICATE = "duplicate"
    """It says again what is known."""
    EARLY = "early"
    """It speaks of a call that has not come back yet; the call's return is what counts."""
    STALE_EPOCH = "stale epoch"
    """It belongs to an earlier attempt than the one in progress."""
    NEVER_BEGUN = "never begun"
    """Nobody ordered what it speaks of."""
    UNKNOWN_CHILD = "unknown child"


class Result(Enum):
    """How a request's transfer in one direction ended."""

    LOADED = "loaded"
    SAVED = "saved"
    MISSED = "missed"
    RECOMPUTE = "recompute"
    """Compute locally from the watermark on."""
    HAND_BACK = "hand back"
    """Serve this request without disaggregation."""
    FAILED = "failed"
    CANCELLED = "cancelled"


class Failure(msgspec.Struct, frozen=True):
    """One thing that went wrong. Made by the boundary and the verdict alone; making one cannot raise."""

    child: str
    operation: str
    request: str
    epoch: int
    kind: str
    """Name of the leaf in ``kvbelay.errors``."""
    retryable: bool
    detail: str
    """The first cause, clipped."""
    handling: str = ""
    """What broke while the first cause was being handled or looked at."""


class Event(msgspec.Struct, frozen=True):
    """What the host says: BEGIN or CANCEL of a request in one direction, or LOST of a child. (Ranks send `Report`s.)"""

    kind: Kind
    side: Side = Side.LOAD
    request: str = ""
    child: str = ""
    """LOST: the child that was removed or is dead; with a ``request``, only that request's peer."""
    failure: Failure | None = None
    """LOST of one request: why."""
    plan: tuple[str, ...] = ()
    """BEGIN: the children; a load tries them one after another, a save goes to all."""
    bystanders: tuple[str, ...] = ()
    """BEGIN of a load: children that were not chosen and are known to touch the blocks all the same."""
    observed: bool = False
    """BEGIN: the host drives the children of the plan itself, the first one of a load. They are watched, and neither
    refused nor tried again."""
    start: int = 0
    stop: int = 0
    """BEGIN: tokens [start, stop) are wanted; what lies before ``start`` is there."""
    within_s: float = 0.0
    """BEGIN: seconds until the request's deadline in this direction."""


class Outcome(msgspec.Struct, frozen=True):
    """What the caller hears, exactly once a request and direction."""

    result: Result
    request: str
    side: Side
    watermark: int
    """Tokens [0, watermark) are good in all layers."""
    held: bool
    """Some child may still touch the blocks. After a load: go on in fresh blocks. After a save: keep them for now."""
    failures: tuple[Failure, ...]
    """In the order in which they happened: the first is the first cause."""
    attempts: int
    elapsed_s: float
    child: str = ""
    """The child that completed it; empty where none did."""
    nbytes: int = 0
    """Bytes that all attempts together moved, as far as the driver counts them."""
    tickets: tuple[Ticket, ...] = ()
    """After a save: what a reader needs, all children's."""


class Order(msgspec.Struct, frozen=True):
    """Ledger to gates: arm, or cancel. A duration, never a time on somebody else's clock.

    Each gate gets them in the order in which the ledger gave them; one that comes again changes nothing.
    """

    request: str
    side: Side
    child: str
    epoch: int
    within_s: float
    stop: int = 0
    """START and WATCH: the action's. LANDED below it is progress, not the end."""
    cancel: bool = False


class Report(msgspec.Struct, frozen=True):
    """Gates to ledger: what one rank saw. Reports of many ranks and steps merge by set union (`gate.merge`)."""

    request: str
    side: Side
    child: str
    epoch: int
    rank: int
    kind: Kind
    stop: int = 0
    leased: bool = False
    failure: Failure | None = None


class Do(Enum):
    """What whoever drives the ledger has to do."""

    START = "start"
    WATCH = "watch"
    """Listen to the child, without asking it for anything."""
    ABORT = "abort"
    TELL = "tell"
    HOLD = "hold"
    """The leg's end could not be confirmed, or readers have a lease."""
    RELEASE = "release"
    """Nobody touches the blocks any more that an outcome said were held. Once for each such outcome."""


class Action(msgspec.Struct, frozen=True):
    """One thing to do, in order."""

    do: Do
    request: str
    side: Side
    child: str = ""
    epoch: int = 0
    start: int = 0
    stop: int = 0
    """START: tokens [start, stop) are wanted; what lies before ``start`` is there."""
    within_s: float = 0.0
    """START: seconds until the attempt's deadline."""
    outcome: Outcome | None = None
    """TELL: the outcome."""
