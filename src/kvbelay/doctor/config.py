"""The check of configurations: what vLLM would refuse, what would surprise later, and what the guard would."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from kvbelay.doctor.finding import Finding, Level
from kvbelay.doctor.known import (
    ALL_EXTRAS,
    CONNECTORS,
    EXTRAS,
    FIELDS,
    GUARD,
    MULTI,
    OURS,
    REMOVED,
    RENAMED,
    ROLES,
)
from kvbelay.doctor.loads import deadlines, policies, verification
from kvbelay.doctor.options import mistakes
from kvbelay.doctor.pair import differences
from kvbelay.doctor.side import Child, Side, mapping, names, read

EXTRA = "kv_connector_extra_config"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""What the guard takes for a child's name."""


def check_configs(given: Sequence[str]) -> list[Finding]:
    """Findings in one configuration, or in those of prefill and decode and between them."""
    sides: list[Side] = []
    findings: list[Finding] = []
    for number, one in enumerate(given, 1):
        side, wrong = read(one, number)
        findings += wrong
        if side is not None:
            sides.append(side)
            for check in CHECKS:
                findings += check(side)
    for index, one_side in enumerate(sides):
        for other in sides[index + 1 :]:
            findings += differences(one_side, other)
    return findings


def keys(side: Side) -> Iterator[Finding]:
    """Unknown, misplaced and removed keys, of the whole and of each child."""
    yield from _keys(side, "", side.config)
    if side.multi:
        for child in side.children:
            yield from _keys(side, child.at, child.config)
            if "engine_id" in child.config and not side.guarded:
                what = "vLLM gives a child its engine_id itself, and fails to start"
                yield side.finds("misplaced-key", Level.PROBLEM, what, child.at, "engine_id", remedy="take it out")
            if "kv_load_failure_policy" in child.config:
                what = "a child's kv_load_failure_policy is not read"
                remedy = "set it outside, for the whole engine"
                yield side.finds(
                    "misplaced-key", Level.WARNING, what, child.at, "kv_load_failure_policy", remedy=remedy
                )
        for key in side.extra:
            if key in ALL_EXTRAS - EXTRAS[MULTI]:
                what = f"{key!r} stands outside, where no child sees it"
                remedy = f"move it into the {EXTRA} of the child that it is for"
                yield side.finds("misplaced-key", Level.WARNING, what, EXTRA, key, remedy=remedy)


def _keys(side: Side, at: str, config: Mapping[str, object]) -> Iterator[Finding]:
    for key in config:
        if key in FIELDS:
            continue
        if key in REMOVED:
            what = f"vLLM no longer has {key!r}, and refuses it"
            yield side.finds("deprecated", Level.PROBLEM, what, at, key, remedy="take it out")
        elif key in ALL_EXTRAS or key in {"name", "role", "required", "mode", "load_s", "save_s"}:
            into = EXTRA if key in ALL_EXTRAS else f"{EXTRA}.{OURS}"
            what = f"{key!r} stands in the wrong place, and vLLM refuses it there"
            yield side.finds("misplaced-key", Level.PROBLEM, what, at, key, remedy=f"move it into {into}")
        else:
            close = difflib.get_close_matches(key, FIELDS, 1)
            what = f"there is no key {key!r}, and vLLM refuses it"
            remedy = f"did you mean {close[0]!r}?" if close else f"connectors' own keys stand in {EXTRA}"
            yield side.finds("unknown-key", Level.PROBLEM, what, at, key, remedy=remedy)
    extra = config.get(EXTRA)
    if extra is not None and not isinstance(extra, dict):
        yield side.finds("unknown-key", Level.PROBLEM, f"{EXTRA} has to be an object", at, EXTRA, remedy="correct it")
    known = EXTRAS.get(str(config.get("kv_connector")), set())
    for key in mapping(extra):
        close = difflib.get_close_matches(key, known, 1, cutoff=0.8)
        if key not in known and key != OURS and close:
            what = f"nobody reads {key!r}"
            remedy = f"did you mean {close[0]!r}?"
            yield side.finds("unknown-key", Level.WARNING, what, at, EXTRA, key, remedy=remedy)


def connectors(side: Side) -> Iterator[Finding]:
    """Which connectors there are, and whether vLLM has them."""
    outer = side.config.get("kv_connector")
    path = side.config.get("kv_connector_module_path")
    if side.guarded and outer != MULTI:
        what = f"{GUARD} has no {outer!r}: it has the class {MULTI}"
        remedy = f'set kv_connector to "{MULTI}", and list {outer!r} as its child'
        yield side.finds("guard", Level.PROBLEM, what, "kv_connector", remedy=remedy)
    if isinstance(path, str) and path != GUARD and difflib.SequenceMatcher(None, path, GUARD).ratio() > 0.75:  # noqa: PLR2004 # a slip
        what = f"there is no module {path!r}"
        remedy = f"did you mean {GUARD!r}?"
        yield side.finds("guard", Level.PROBLEM, what, "kv_connector_module_path", remedy=remedy)
    if side.multi and not side.children:
        what = f"{MULTI} has no children"
        remedy = f"list them in {EXTRA}.connectors"
        yield side.finds("children", Level.PROBLEM, what, EXTRA, "connectors", remedy=remedy)
    for child in side.children:
        yield from _named(side, child)


def _named(side: Side, child: Child) -> Iterator[Finding]:
    if not child.cls:
        what = "a connector has no kv_connector"
        yield side.finds("children", Level.PROBLEM, what, child.at or "kv_connector", remedy="name its class")
        return
    if child.cls in RENAMED:
        what = f"vLLM no longer has {child.cls}"
        remedy = f"use {RENAMED[child.cls]}"
        yield side.finds("deprecated", Level.PROBLEM, what, child.at, "kv_connector", remedy=remedy)
    elif child.cls == MULTI and child.at:
        what = f"a {MULTI} stands in a {MULTI}"
        remedy = "list its children beside the others"
        yield side.finds("children", Level.PROBLEM, what, child.at, "kv_connector", remedy=remedy)
    elif child.cls not in CONNECTORS and not child.config.get("kv_connector_module_path"):
        close = difflib.get_close_matches(child.cls, CONNECTORS, 1)
        what = f"{child.cls!r} is none of vLLM's connectors, and no module is named"
        meant = f"did you mean {close[0]!r}? Else " if close else ""
        remedy = f"{meant}set kv_connector_module_path, unless a plugin registers it"
        yield side.finds("children", Level.PROBLEM, what, child.at, "kv_connector", remedy=remedy)


def roles(side: Side) -> Iterator[Finding]:
    """Roles that are missing, unknown, deprecated, or contradict one another."""
    outer = side.config.get("kv_role")
    for at, config in [("", side.config), *((child.at, child.config) for child in side.children if child.at)]:
        role = config.get("kv_role")
        if role not in ROLES:
            what = f"kv_role is {role!r}" if role else "kv_role is missing, and vLLM refuses that"
            yield side.finds("role", Level.PROBLEM, what, at, "kv_role", remedy=f"one of {', '.join(ROLES)}")
        elif at and outer in ROLES[:2] and role != outer:
            what = f"the engine is a {outer}, and this child a {role}"
            remedy = "give both the same role"
            yield side.finds("role", Level.PROBLEM, what, at, "kv_role", remedy=remedy)
        if role == ROLES[2] and str(config.get("kv_connector", "")).startswith("Nixl"):
            what = "vLLM says that kv_both is deprecated for NIXL"
            remedy = "kv_producer on prefill engines, kv_consumer on decode engines; kv_both works until vLLM drops it"
            yield side.finds("deprecated", Level.WARNING, what, at, "kv_role", remedy=remedy)


def together(side: Side) -> Iterator[Finding]:
    """Children that cannot work with one another."""
    children = side.children
    layouts = {known.layout for child in children if (known := CONNECTORS.get(child.cls)) and known.layout}
    if len(layouts) > 1:
        need = ", ".join(f"{one.cls} {CONNECTORS[one.cls].layout}" for one in children if one.cls in CONNECTORS)
        what = f"children need different layouts of the KV cache ({need.strip()})"
        remedy = "choose children that agree, or a model with MLA, to which it does not matter"
        yield side.finds("layouts", Level.PROBLEM, what, EXTRA, "connectors", remedy=remedy)
    alone = [child for child in children if child.cls in CONNECTORS and not CONNECTORS[child.cls].hybrid]
    if alone:
        what = f"{names(alone)} does not support the hybrid KV cache manager: vLLM turns it off for the whole engine"
        remedy = "replace it if the model has sliding windows or Mamba layers, else --disable-hybrid-kv-cache-manager"
        yield side.finds("hybrid", Level.WARNING, what, alone[0].at, "kv_connector", remedy=remedy)
    pulling = [child for child in children if child.cls in CONNECTORS and CONNECTORS[child.cls].pd]
    if len(pulling) > 1:
        level = Level.WARNING if side.guarded else Level.PROBLEM
        what = f"{len(pulling)} P/D connectors ({names(pulling)}) answer with the same kv_transfer_params"
        cause = "" if side.guarded else "vLLM ends the engine at the first request that both answer"
        remedy = "keep one" + (": the other is only heard by another guard" if side.guarded else ", or add the guard")
        yield side.finds("two-pd", level, what, EXTRA, "connectors", cause=cause, remedy=remedy)
    pools = [child for child in children if child.extra.get("custom_mem_pool")]
    if len(pools) > 1:
        what = "two children bring a memory pool for the KV cache"
        remedy = "set custom_mem_pool for one of them"
        yield side.finds("two-pools", Level.PROBLEM, what, pools[1].at, EXTRA, "custom_mem_pool", remedy=remedy)
    yield from _alike(side, children)


def _alike(side: Side, children: Iterable[Child]) -> Iterator[Finding]:
    classes = Counter(child.cls for child in children)
    for cls, count in classes.items():
        if count > 1 and cls and not side.guarded:
            what = f"{count} children are {cls}, and make the same Prometheus series"
            yield side.finds("twins", Level.PROBLEM, what, EXTRA, "connectors", remedy="keep one, or add the guard")
    for child in children:
        name = child.options.get("name")
        if isinstance(name, str) and name and (name == OURS or not NAME.fullmatch(name)):
            what = f"{name!r} cannot be a child's name"
            remedy = f"at most 64 letters, digits and . _ -, and not {OURS!r}"
            yield side.finds("guard-option", Level.PROBLEM, what, child.at, EXTRA, f"{OURS}.name", remedy=remedy)
    given = Counter(str(child.options["name"]) for child in children if "name" in child.options)
    for name, count in given.items():
        if count > 1:
            what = f"{count} children are named {name!r}"
            remedy = "give every child its own name"
            yield side.finds("guard-option", Level.PROBLEM, what, EXTRA, "connectors", remedy=remedy)


def guard_options(side: Side) -> Iterator[Finding]:
    """Options that the guard refuses, and options that nobody reads."""
    told = [("", side.extra, "GuardOptions")] if side.multi else []
    told += [(child.at, child.extra, "ChildOptions") for child in side.children if child.at or not side.multi]
    for at, extra, cls in told:
        if OURS not in extra:
            continue
        if not side.guarded:
            what = f"options under {OURS!r}, and no guard that reads them"
            remedy = f'add "kv_connector_module_path": "{GUARD}"'
            yield side.finds("guard", Level.WARNING, what, at, EXTRA, OURS, remedy=remedy)
            continue
        for wrong in mistakes(extra[OURS], cls, OURS):
            yield side.finds("guard-option", Level.PROBLEM, wrong.what, at, EXTRA, wrong.field, remedy=wrong.remedy)


CHECKS: tuple[Callable[[Side], Iterable[Finding]], ...] = (
    keys,
    connectors,
    roles,
    together,
    guard_options,
    deadlines,
    policies,
    verification,
)
