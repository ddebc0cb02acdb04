"""What becomes of a load that fails: policies and deadlines that contradict one another."""

from __future__ import annotations

from collections.abc import Iterator

from kvbelay.doctor.finding import Finding, Level
from kvbelay.doctor.known import CONNECTORS, GUARD, OURS, POLICIES, TRUSTED
from kvbelay.doctor.options import number_of, value_of
from kvbelay.doctor.side import Side

EXTRA = "kv_connector_extra_config"
GUARD_OPTIONS = "GuardOptions"


def deadlines(side: Side) -> Iterator[Finding]:
    """Deadlines that cannot be kept, or that outlive what they wait for."""
    if not side.guarded:
        return
    load_s = number_of(side.options, "load_s", GUARD_OPTIONS)
    save_s = number_of(side.options, "save_s", GUARD_OPTIONS)
    lookup_s = number_of(side.options, "lookup_s", GUARD_OPTIONS)
    for child in side.children:
        own_s = child.options.get("load_s")
        wanted_s = own_s if own_s is not None else side.options.get("load_s")  # the default adapts itself to the lease
        lease_s = child.lease_s
        if lease_s is not None and isinstance(wanted_s, int | float) and wanted_s > lease_s * TRUSTED:
            at, where = (child.at, f"{OURS}.load_s") if own_s is not None else ("", f"{OURS}.load_s")
            what = f"load_s {wanted_s:g} is beyond two thirds of {child.cls}'s lease of {lease_s:g} s"
            cause = "the source gives the blocks away while they are still being read"
            remedy = f"at most {lease_s * TRUSTED:g}, or a longer kv_lease_duration on both sides"
            yield side.finds("deadlines", Level.PROBLEM, what, at, EXTRA, where, cause=cause, remedy=remedy)
        save = child.options.get("save_s", save_s)
        if lease_s is not None and isinstance(save, int | float) and save < lease_s:
            what = f"save_s {save:g} is shorter than {child.cls}'s lease of {lease_s:g} s"
            cause = "blocks that a consumer may still come for go into quarantine"
            remedy = f"more than {lease_s:g}"
            where = f"{OURS}.save_s"
            yield side.finds("deadlines", Level.WARNING, what, child.at, EXTRA, where, cause=cause, remedy=remedy)
    if "lookup_s" in side.options and load_s is not None and lookup_s is not None and lookup_s > load_s:
        what = f"a look-up may take longer (lookup_s {lookup_s:g}) than the load that it is for (load_s {load_s:g})"
        where = f"{OURS}.lookup_s"
        yield side.finds("deadlines", Level.WARNING, what, EXTRA, where, remedy="shorten lookup_s")


def policies(side: Side) -> Iterator[Finding]:
    """Policies that undo the fallback, or that vLLM cannot bear."""
    if side.policy not in POLICIES:
        what = f"kv_load_failure_policy {side.policy!r} is none of {', '.join(POLICIES)}"
        yield side.finds("policy", Level.PROBLEM, what, "kv_load_failure_policy", remedy="choose one of them")
    sync = [child.cls for child in side.children if child.cls in CONNECTORS and CONNECTORS[child.cls].sync]
    if side.policy == "recompute" and sync:
        where = "kv_load_failure_policy"
        what = f"{', '.join(sync)} loads within the step: under recompute with async scheduling "
        if side.guarded:
            what += "the guard refuses that"
            remedy = "leave the policy at fail: the guard recomputes all the same"
            yield side.finds("policy", Level.WARNING, what, where, remedy=remedy)
        else:
            what += "a failure ends the engine"
            yield side.finds("policy", Level.PROBLEM, what, where, remedy="use fail, or add the guard")
    if not side.guarded:
        yield from _unguarded(side)
        return
    if value_of(side.options, "mode", GUARD_OPTIONS) == "observe":
        what = "the guard only observes: a failed load is left to vLLM"
        yield side.finds("policy", Level.WARNING, what, EXTRA, f"{OURS}.mode", remedy="remove mode when you trust it")
    rate = number_of(side.options, "recompute_tokens_per_s", GUARD_OPTIONS)
    exhausted = value_of(side.options, "on_exhausted", GUARD_OPTIONS)
    if rate is not None and rate <= 0 and exhausted == "recompute":
        what = "a budget of no tokens contradicts on_exhausted recompute, and the guard refuses to start"
        remedy = "allow some tokens a second, or set on_exhausted to fail"
        yield side.finds("policy", Level.PROBLEM, what, EXTRA, f"{OURS}.recompute_tokens_per_s", remedy=remedy)
    elif exhausted == "fail":
        what = "on_exhausted fail undoes the fallback: when the budget is spent, requests fail"
        cause = "" if rate not in {None, float("inf")} else "recompute_tokens_per_s has no limit, so that it never is"
        remedy = "leave it at recompute, unless running decodes matter more than these requests"
        yield side.finds("policy", Level.WARNING, what, EXTRA, f"{OURS}.on_exhausted", cause=cause, remedy=remedy)
    required = [child for child in side.children if child.options.get("required") is True]
    for child in required:
        what = f"{child.cls} is required: the engine does not start without it"
        remedy = "leave required away, and its siblings serve meanwhile"
        yield side.finds("policy", Level.NOTE, what, child.at, EXTRA, f"{OURS}.required", remedy=remedy)


def verification(side: Side) -> Iterator[Finding]:
    """Digests that are asked for, and nothing over which they could come."""
    if side.guarded and wanted(side) and side.options.get("link") is None:
        what = "digests come over the link between engines, and there is none"
        remedy = 'add "link": {"listen": "tcp://127.0.0.1:0"}, or another address for other hosts'
        yield side.finds("verify", Level.PROBLEM, what, EXTRA, f"{OURS}.verify", remedy=remedy)


def wanted(side: Side) -> str:
    """How strongly a side wants loads to be verified: "require", "prefer", or not at all."""
    said = {str(one.get("verify", "off")) for one in (side.options, *(child.options for child in side.children))}
    return next((word for word in ("require", "prefer") if word in said), "")


def _unguarded(side: Side) -> Iterator[Finding]:
    if side.policy == "fail":
        what = "a failed load fails the request: the client is answered with HTTP 500"
        cause = "kv_load_failure_policy is fail" + ("" if "kv_load_failure_policy" in side.config else ", the default")
        remedy = f'add the guard ("kv_connector_module_path": "{GUARD}"), or set recompute where loads are asynchronous'
    else:
        what = "a failed load is asked for again, without end if the child keeps failing"
        cause = "kv_load_failure_policy is recompute (vLLM 55297)"
        remedy = "add the guard, which bounds that"
    yield side.finds("policy", Level.WARNING, what, "kv_load_failure_policy", cause=cause, remedy=remedy)
