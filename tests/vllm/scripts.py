"""What a scripted connector does, as data; and what all scripted connectors of a process have done.

An *age* counts a worker's steps since a transfer began there: 0 is the step that began it.
"""

from __future__ import annotations

import builtins
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from tiny import BLOCK

if TYPE_CHECKING:
    import torch

EVER = 1 << 30
"""As many times as it is asked."""


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One hook that does something else than its work: it is slow, it answers what it likes, or it raises."""

    hook: str
    raises: str = ""
    """The message of the exception; empty for none."""
    error: str = "RuntimeError"
    """A builtin exception's name."""
    answer: Any = msgspec.UNSET
    """Returned instead of working; a list stands for a tuple when it comes from a configuration."""
    takes_s: float = 0.0
    """By the guard's clock."""
    after: bool = False
    """The work is done before it raises."""
    skip: int = 0
    """Calls that are let through first."""
    times: int = EVER
    request: str = ""
    """Only calls about this request."""
    side: str = ""
    """Only the ``scheduler``'s object, or the ``worker``'s."""
    rank: int | None = None
    """Only on this worker."""

    def meant(self, hook: str, request: str, side: str, rank: int) -> bool:
        """This call is one that it may strike."""
        return (
            self.hook == hook
            and self.request in {"", request}
            and self.side in {"", side}
            and self.rank in {None, rank}
        )

    def exception(self) -> Exception:
        kind = getattr(builtins, self.error)
        return kind(self.raises)


class Load(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How one load goes on the worker."""

    copy: int | None = 1
    """The age at which the KV arrives; None for never. A synchronous load copies when it starts, if at all."""
    reports: tuple[int, ...] = (1,)
    """The ages at which the request is reported as received."""
    failed: tuple[int, ...] = ()
    """The ages at which it is reported as failed."""
    errors: dict[int, tuple[int, ...]] = {}
    """Age -> the blocks, counted within the load, that are reported as invalid then."""
    garbage: tuple[int, ...] = ()
    """The ages at which somebody still writes into the blocks, and not KV."""

    @property
    def last(self) -> int:
        """The age at which nothing more will come."""
        ages = [*self.reports, *self.failed, *self.errors, *self.garbage]
        return max([*ages, -1 if self.copy is None else self.copy], default=-1)


class Save(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a request's end does."""

    holds: bool = False
    """The answer: the blocks must stay until the send is reported."""
    params: dict[str, Any] | None = None
    read: int | None = 1
    """The age at which the blocks are read, if the answer was to hold them."""
    reports: tuple[int, ...] = (1,)

    @property
    def last(self) -> int:
        """The age at which nothing more will come."""
        return max([*self.reports, -1 if self.read is None else self.read])


class Phantom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A report out of nowhere, at a step of the worker since the script was put up."""

    step: int
    sent: tuple[str, ...] = ()
    received: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    blocks: tuple[int, ...] = ()


class Script(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Everything that one child does. Without a script a child offers nothing and holds nothing."""

    offer: int = 0
    """It has the KV of this many leading tokens (whole blocks), where the store has them."""
    asynchronous: bool = True
    looking: int = 0
    """Answers ``None`` this many times first."""
    pd: bool = False
    """Offers only what the request's ``do_remote_prefill`` asks it for, as a pull from a prefill engine does."""
    on_zero: str = "ignore"
    """What "nothing to load" makes it do: ``ignore``; ``load`` all the same what it had offered; ``release`` the
    producer."""
    loads: dict[str, tuple[Load, ...]] = {}
    """By request, or ``*``; by rank too (``*@1``). How the first load goes, the second, ...; the last one repeats."""
    saves: dict[str, Save] = {}
    """By request, or ``*``."""
    writes_through: bool = False
    """Saves each prompt's whole blocks in the step that computes them."""
    faults: tuple[Fault, ...] = ()
    phantoms: tuple[Phantom, ...] = ()
    counts: bool = False
    """Has statistics to tell after each step."""
    handshake: bool = False
    """Has an address to tell the other role."""

    def load(self, request: str, attempt: int, rank: int) -> Load:
        for key in (f"{request}@{rank}", f"*@{rank}", request, "*"):
            if plans := self.loads.get(key):
                return plans[min(attempt, len(plans) - 1)]
        return Load()

    def save(self, request: str) -> Save:
        return self.saves.get(request) or self.saves.get("*") or Save()


class Call(NamedTuple):
    """One call of one hook of one child."""

    step: int
    child: str
    role: str
    hook: str
    request: str
    detail: str


class Stage:
    """What the children of this process share. A case starts with an empty one."""

    def __init__(self) -> None:
        self.scripts: dict[str, Script] = {}
        self.calls: list[Call] = []
        self.step = 0
        """The engine's step."""
        self.spent_s = 0.0
        """What hooks took by their scripts."""
        self.worker_steps: Counter[str] = Counter()
        """Child -> its worker's steps; what a `Phantom` counts."""
        self.frozen: set[tuple[str, str]] = set()
        """Child and request whose transfers do not go on."""

    def of(self, child: str, hook: str, request: str = "") -> list[Call]:
        """The calls of one hook of one child, about one request if one is named."""
        return [
            call for call in self.calls if call.child == child and call.hook == hook and request in {"", call.request}
        ]

    def loaded(self, child: str, request: str) -> int:
        """The tokens that the child has copied into the request's blocks."""
        return sum(int(call.detail) for call in self.of(child, "copied", request))


STAGE = Stage()
STORE: dict[tuple[str, str], torch.Tensor] = {}
"""(prefix, layer) -> the KV of the prefix' last block."""
KNOWN: set[str] = set()
"""The prefixes of which there is KV."""
SAVED: dict[tuple[str, str, str], torch.Tensor] = {}
"""(child, prefix, layer) -> what the child read when a request's blocks were its own to read."""


def prefixes(tokens: Sequence[int]) -> Iterable[str]:
    """A name for each prefix of ``tokens`` that ends with a whole block, the shortest first."""
    digest = hashlib.blake2b(digest_size=12)
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        digest.update(bytes(tokens[start : start + BLOCK]))
        yield digest.hexdigest()


def script_of(plain: dict[str, Any]) -> Script:
    """The script that stands in a configuration."""
    return msgspec.convert(plain, Script, str_keys=True)
