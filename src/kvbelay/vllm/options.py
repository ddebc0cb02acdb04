"""The guard's options: ``kv_connector_extra_config["kvbelay"]``, of the whole and of each child.

Decoded once, when the engine starts; unknown keys are refused by name. A child's own keys are passed on untouched.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeVar

import msgspec

from kvbelay.core.circuit import CircuitPolicy
from kvbelay.core.policy import Policy
from kvbelay.errors import ConfigError
from kvbelay.net.endpoint import Endpoint

KEY = "kvbelay"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
NOW_S = 1e-6
"""Drain limit of the guard's ledger: when the ranks have settled, what is not drained by then is held."""


class Mode(Enum):
    """Whether the guard acts."""

    GUARD = "guard"
    OBSERVE = "observe"
    """The host's own class does everything; what the guard would have caught is counted."""


class Exhausted(Enum):
    """What becomes of a request whose loads failed when the recompute budget does not allow it."""

    RECOMPUTE = "recompute"
    """It is computed all the same, after the longest wait."""
    FAIL = "fail"
    """It fails, and it alone."""


class Role(Enum):
    """What a child is for."""

    CACHE = "cache"
    """A tier below the engine's own KV cache."""
    PD = "pd"
    """It pulls from a prefill engine what a request's ``kv_transfer_params`` name."""


class Verify(Enum):
    """Whether what a child has loaded is compared with what the other engine offered."""

    OFF = "off"
    PREFER = "prefer"
    """Where it can be; a load that cannot is taken as it is, and counted."""
    REQUIRE = "require"
    """A load that cannot be compared is not taken."""


class ChildOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of one child."""

    name: str = ""
    """Unique; by default the connector's class name, numbered from the second on."""
    required: bool = False
    """Stop the start of the engine if this child cannot start."""
    role: Role | None = None
    """None: what is known of vLLM's own connectors, else a cache."""
    hosts: tuple[str, ...] | None = None
    """P/D: the only ``remote_host`` values that a request may name. None: any."""
    load_s: float | None = None
    """Deadline of a load through this child; None: the guard's."""
    save_s: float | None = None
    """Deadline of a save; None: the guard's."""
    lease_s: float | None = None
    """How long it keeps, for another engine, what it has offered. None: what is known of vLLM's own connectors."""
    verify: Verify | None = None
    """None: as the guard's."""


class GuardOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of the guard."""

    mode: Mode = Mode.GUARD
    load_s: float = 60.0
    """Seconds within which an asynchronous load has to be reported, on every rank."""
    save_s: float = 600.0
    """Seconds within which an asynchronous save has to be reported. Longer than the children's own leases."""
    lookup_s: float = 10.0
    """How long a child may answer a look-up with "still looking" before the request goes on without it."""
    recompute_tokens_per_s: float = float("inf")
    """Tokens a second that may be recomputed because of failed loads."""
    recompute_burst: int = 8192
    """Tokens that may be recomputed at once."""
    recompute_wait_s: float = 30.0
    """Longest wait for that budget."""
    on_exhausted: Exhausted = Exhausted.RECOMPUTE
    quarantine_cap: int = 64
    """Held transfers of one child beyond which it gets no new ones."""
    verify: Verify = Verify.OFF
    """Needs ``link``, on both sides."""
    link: Endpoint | None = None
    """Where other engines' guards reach this one's, and what they have to prove. None: there is no link."""
    circuit: CircuitPolicy = CircuitPolicy(spent_s=2.5)
    """When a child is left alone: too many failures, or too many seconds in slow hooks of the scheduler's side."""

    def policy(self) -> Policy:
        """The ledger's policy: a child that carries no attempt numbers gets one attempt a load."""
        longest_s = max(self.load_s, self.save_s)
        return Policy(
            attempts_per_child=1,
            attempt_s=longest_s,
            drain_s=NOW_S,
            held_cap=self.quarantine_cap,
            circuit=self.circuit,
        )


T = TypeVar("T", bound=msgspec.Struct)


def decode_options(raw: object, cls: type[T], *, field: str) -> T:
    """Decode what stands under the key. Raises `ConfigError` naming the field and the remedy."""
    known = cls.__struct_encode_fields__
    for key in raw if isinstance(raw, Mapping) else ():
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            remedy = f"did you mean {close[0]!r}?" if close else f"the options here are {', '.join(known)}"
            msg = "unknown option"
            raise ConfigError(msg, source="--kv-transfer-config", field=f"{field}.{key}", remedy=remedy)
    try:
        return msgspec.convert(raw, cls)
    except msgspec.ValidationError as exc:
        raise ConfigError(str(exc), source="--kv-transfer-config", field=field, remedy="correct the value") from exc


def guard_options(extra: Mapping[str, Any]) -> GuardOptions:
    """The guard's own options. Raises `ConfigError`, also for options that contradict each other."""
    field = f"kv_connector_extra_config.{KEY}"
    options = decode_options(extra.get(KEY, {}), GuardOptions, field=field)
    for name in ("load_s", "save_s", "lookup_s", "recompute_wait_s"):
        if not 0 < getattr(options, name) < float("inf"):
            msg = "must be a positive, finite number of seconds"
            raise ConfigError(msg, source="--kv-transfer-config", field=f"{field}.{name}", remedy="correct the value")
    if options.verify is not Verify.OFF and options.link is None:
        msg = "digests come over the link between engines, and there is none"
        remedy = 'add "link": {"listen": "tcp://127.0.0.1:0"}, or see docs/verified-kv.md for other hosts'
        raise ConfigError(msg, source="--kv-transfer-config", field=f"{field}.verify", remedy=remedy)
    if options.recompute_tokens_per_s <= 0 and options.on_exhausted is Exhausted.RECOMPUTE:
        msg = "a budget of no tokens contradicts on_exhausted 'recompute'"
        remedy = "allow some tokens a second, or set on_exhausted to 'fail'"
        raise ConfigError(msg, source="--kv-transfer-config", field=f"{field}.recompute_tokens_per_s", remedy=remedy)
    return options


def child_options(index: int, config: Mapping[str, Any]) -> ChildOptions:
    """One child's options."""
    extra = config.get("kv_connector_extra_config") or {}
    return decode_options(extra.get(KEY, {}), ChildOptions, field=f"connectors[{index}].{KEY}")


def name_children(classes: list[str], options: list[ChildOptions]) -> list[str]:
    """A unique name for each child: its own, or its class's, numbered where that is taken."""
    names: list[str] = []
    for index, (cls, option) in enumerate(zip(classes, options, strict=True)):
        name = option.name or cls
        if option.name and (option.name == KEY or not NAME.fullmatch(option.name)):
            msg = f"{option.name!r} cannot be a child's name"
            field = f"connectors[{index}].{KEY}.name"
            remedy = f"use at most 64 letters, digits and . _ -, and not {KEY!r}"
            raise ConfigError(msg, source="--kv-transfer-config", field=field, remedy=remedy)
        if option.name and option.name in names:
            msg = f"{option.name!r} is the name of two children"
            field = f"connectors[{index}].{KEY}.name"
            raise ConfigError(msg, source="--kv-transfer-config", field=field, remedy="give every child its own name")
        number = 2
        while name in names:
            name = f"{cls}-{number}"
            number += 1
        names.append(name)
    return names
