"""What must match between prefill and decode."""

from __future__ import annotations

from collections.abc import Iterator

from kvbelay.doctor.finding import Finding, Level
from kvbelay.doctor.known import CONNECTORS, OURS, TRUSTED
from kvbelay.doctor.loads import wanted
from kvbelay.doctor.options import number_of
from kvbelay.doctor.side import Child, Side, names

EXTRA = "kv_connector_extra_config"
PRODUCER, CONSUMER = "kv_producer", "kv_consumer"
ENGINE_EQUAL = ("model", "dtype", "kv_cache_dtype", "block_size", "speculative_config", "attention_backend")
"""Arguments of the engine in which NIXL's compatibility hash or the blocks would differ."""
TP = "tensor_parallel_size"
PULL, PUSH = "pull", "push"


def differences(one: Side, other: Side) -> Iterator[Finding]:
    """Findings between two sides, whichever of them is prefill."""
    prefill, decode = (other, one) if one.config.get("kv_role") == CONSUMER else (one, other)
    yield from _roles(prefill, decode)
    yield from _connectors(prefill, decode)
    yield from _engines(prefill, decode)
    yield from _leases(prefill, decode)
    asked = wanted(decode)
    if decode.guarded and asked and not (prefill.guarded and prefill.options.get("link") is not None):
        what = "decode wants to verify what it loads, and prefill has no link over which digests could come"
        level = Level.PROBLEM if asked == "require" else Level.WARNING
        remedy = "the guard with verify and link on both sides"
        yield prefill.finds("pair", level, what, EXTRA, f"{OURS}.link", remedy=remedy)
    if prefill.guarded != decode.guarded:
        bare = decode if prefill.guarded else prefill
        what = f"only one side has the guard; {bare.source} does not"
        cause = "prefill then does not say until when its offer is good, or decode does not ask"
        remedy = "add the guard there: they work together either way, and better with both"
        yield bare.finds("pair", Level.WARNING, what, "kv_connector_module_path", cause=cause, remedy=remedy)


def _roles(prefill: Side, decode: Side) -> Iterator[Finding]:
    role = prefill.config.get("kv_role")
    if role == decode.config.get("kv_role") and role in {PRODUCER, CONSUMER}:
        what = f"both sides are {role}"
        yield decode.finds("pair", Level.PROBLEM, what, "kv_role", remedy=f"one {PRODUCER}, one {CONSUMER}")
    engine = prefill.config.get("engine_id")
    if engine is not None and engine == decode.config.get("engine_id"):
        what = f"both sides have engine_id {engine!r}, and take each other for themselves"
        yield decode.finds("pair", Level.PROBLEM, what, "engine_id", remedy="leave it away: vLLM makes one up")


def _pulling(side: Side) -> list[Child]:
    """Its P/D connectors; one that is not vLLM's is one if it says so, or if it is the only one."""

    def pulls(child: Child) -> bool:
        known = CONNECTORS.get(child.cls)
        return known.pd if known is not None else child.options.get("role") == "pd" or not side.multi

    return [child for child in side.children if pulls(child)]


def _kind(cls: str) -> tuple[str, str]:
    """What a P/D connector speaks: its family, and who moves the data."""
    if cls.startswith("Nixl"):
        return "NIXL", PUSH if "Push" in cls else PULL
    return cls, ""


def _connectors(prefill: Side, decode: Side) -> Iterator[Finding]:
    ours, theirs = _pulling(prefill), _pulling(decode)
    spoken = {_kind(child.cls) for child in ours} & {_kind(child.cls) for child in theirs}
    if (ours or theirs) and not spoken:
        what = f"the sides have no P/D connector in common: {names(ours) or 'none'}, and {names(theirs) or 'none'}"
        remedy = "use the same on both; push and pull do not understand each other"
        yield decode.finds("pair", Level.PROBLEM, what, "kv_connector", remedy=remedy)
    hybrid = [
        all(CONNECTORS[one.cls].hybrid for one in side.children if one.cls in CONNECTORS) for side in (prefill, decode)
    ]
    if hybrid[0] != hybrid[1]:
        what = "one side supports the hybrid KV cache manager, the other does not"
        cause = "vLLM turns it off there alone, and NIXL's compatibility hash differs"
        remedy = "the same children on both sides, or --disable-hybrid-kv-cache-manager on both"
        yield decode.finds("pair", Level.PROBLEM, what, EXTRA, cause=cause, remedy=remedy)
    for mine in ours:
        for other in theirs:
            if _kind(mine.cls) == _kind(other.cls):
                yield from _extras(decode, mine, other)


def _extras(decode: Side, mine: Child, other: Child) -> Iterator[Finding]:
    for key in ("mooncake_protocol", "backends", "enforce_handshake_compat", "bidirectional_kv_xfer", "read_mode"):
        if mine.extra.get(key) != other.extra.get(key):
            what = f"{key} is {mine.extra.get(key)!r} on one side and {other.extra.get(key)!r} on the other"
            yield decode.finds("pair", Level.PROBLEM, what, other.at, EXTRA, key, remedy="make them alike")
    if mine.options.get("name") != other.options.get("name"):
        what = "the same child has different names on the two sides"
        remedy = "give it one name: where two children use one key, the guards tell them apart by name"
        yield decode.finds("pair", Level.WARNING, what, other.at, EXTRA, f"{OURS}.name", remedy=remedy)


def _engines(prefill: Side, decode: Side) -> Iterator[Finding]:
    mine, other = ({key.replace("-", "_"): value for key, value in side.engine.items()} for side in (prefill, decode))
    for key in ENGINE_EQUAL:
        if key in mine and key in other and mine[key] != other[key]:
            what = f"{key} is {mine[key]!r} on one side and {other[key]!r} on the other"
            yield decode.finds("pair", Level.PROBLEM, what, key, remedy="make them alike")
    sizes = [side.get(TP, 1) for side in (mine, other)]
    if all(type(size) is int and size > 0 for size in sizes) and max(sizes) % min(sizes):
        what = f"tensor parallel sizes {sizes[0]} and {sizes[1]}: neither divides the other"
        remedy = "NIXL and Mooncake need one to be a multiple of the other"
        yield decode.finds("pair", Level.PROBLEM, what, TP, remedy=remedy)
    for child in decode.children:
        wanted = child.extra.get("prefill_tp_sizes")
        if isinstance(wanted, list) and TP in mine and mine[TP] not in wanted:
            what = f"prefill_tp_sizes {wanted} does not have prefill's {TP} {mine[TP]}"
            yield decode.finds("pair", Level.PROBLEM, what, child.at, EXTRA, "prefill_tp_sizes", remedy="add it")


def _leases(prefill: Side, decode: Side) -> Iterator[Finding]:
    for mine in _pulling(prefill):
        for other in _pulling(decode):
            if mine.lease_s is None or other.lease_s is None or _kind(mine.cls) != _kind(other.cls):
                continue
            if mine.lease_s != other.lease_s:
                what = f"prefill keeps its blocks for {mine.lease_s:g} s, decode counts on {other.lease_s:g} s"
                level = Level.PROBLEM if mine.lease_s < other.lease_s else Level.WARNING
                remedy = "the same kv_lease_duration on both sides"
                yield decode.finds("pair", level, what, other.at, EXTRA, "kv_lease_duration", remedy=remedy)
            load_s = number_of(other.options or decode.options, "load_s", "GuardOptions")
            explicit = "load_s" in other.options or "load_s" in decode.options
            if decode.guarded and explicit and load_s is not None and load_s > mine.lease_s * TRUSTED:
                what = f"decode waits {load_s:g} s for a load, prefill keeps the blocks for {mine.lease_s:g} s"
                remedy = f"load_s at most {mine.lease_s * TRUSTED:g}"
                yield decode.finds("pair", Level.PROBLEM, what, EXTRA, f"{OURS}.load_s", remedy=remedy)
