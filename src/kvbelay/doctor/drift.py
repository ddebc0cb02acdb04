"""Drift: what the installed vLLM has that the guard's table of hooks does not know, found without importing vLLM.

``host.json`` holds the hooks, their parameters and the fields of results of the version that the guard was tested
with; ``tools/hooks.py --known`` writes it.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import msgspec

from kvbelay.doctor.finding import Evidence, Finding, Level, unchecked

PAGE = "docs/doctor.md#drift"
KNOWN = Path(__file__).with_name("host.json")
TABLE = Path(__file__).parents[1] / "vllm" / "hooks.py"
HOST = Path(__file__).parents[1] / "vllm" / "host.py"
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
OUTPUTS = "v1/outputs.py"
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
RESULTS = {"KVConnectorTransferResults": BASE, "KVConnectorOutput": OUTPUTS}
"""What the host reads of transfers, and where it is defined."""
CONSTRUCTOR = "__init__"


class Root(Protocol):
    """A folder: a path, or one in a wheel."""

    def joinpath(self, *other: str) -> Root: ...

    def read_text(self, encoding: str) -> str: ...


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the guard relies on in one version of vLLM."""

    version: str
    hooks: dict[str, str]
    """Name to parameters, without types; the constructor among them."""
    results: dict[str, list[str]]
    """Class to its fields."""


def check_drift(root: Path | None = None) -> list[Finding]:
    """Compare the installed vLLM, or the one in that folder, with what is known."""
    folder = root or installed()
    if folder is None:
        return [Finding("drift.vllm", Level.NOTE, "vLLM is not installed here: its hooks were not compared")]
    try:
        found = read(folder, version_in(folder))
    except (OSError, SyntaxError, ValueError, KeyError) as exc:
        why = f"{type(exc).__name__}: {exc}"
        remedy = "a vLLM this different is not one that the guard works with; see docs/vllm.md#versions"
        return [unchecked("drift.vllm", f"the connector classes of vLLM in {folder} could not be read", why, remedy)]
    known = msgspec.json.decode(KNOWN.read_bytes(), type=Facts)
    return [*_hooks(found, known, folder), *_results(found, known, folder), *_version(found)]


def installed() -> Path | None:
    """Where vLLM is; it is not imported."""
    spec = importlib.util.find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    return Path(places[0]) if places else None


def version_in(folder: Path) -> str:
    """The release that the package says it is, without a build's suffix."""
    path = folder / "_version.py"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    found = re.search(r"^(?:__version__ = )?version = ['\"]([^'\"+]+)", text, re.MULTILINE) or re.search(
        r"__version__ = (?:version = )?['\"]([^'\"+]+)", text
    )
    return found[1] if found else "unknown"


def read(root: Root, version: str) -> Facts:
    """The facts of a package in that folder. Raises what reading and parsing raise."""
    trees = {path: ast.parse(root.joinpath(*path.split("/")).read_text(encoding="utf-8")) for path in (BASE, OUTPUTS)}
    classes = {(path, node.name): node for path in trees for node in trees[path].body if isinstance(node, ast.ClassDef)}
    hooks = {
        node.name: parameters(node)
        for cls in CLASSES
        for node in classes[BASE, cls].body
        if isinstance(node, ast.FunctionDef)
        and (not node.name.startswith("_") or (node.name, cls) == (CONSTRUCTOR, CLASSES[0]))
    }
    results = {cls: fields(classes[path, cls]) if (path, cls) in classes else [] for cls, path in RESULTS.items()}
    return Facts(version, dict(sorted(hooks.items())), results)


def parameters(node: ast.FunctionDef) -> str:
    """Names and kinds of the parameters; one that has a default ends in ``=``."""
    given = node.args
    plain = [one.arg for one in (*given.posonlyargs, *given.args)]
    first_default = len(plain) - len(given.defaults)
    told = [name + ("=" if index >= first_default else "") for index, name in enumerate(plain)]
    told += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    told += [
        one.arg + ("=" if default else "") for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    told += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return ", ".join(told)


def fields(node: ast.ClassDef) -> list[str]:
    """The fields of a dataclass."""
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def in_table(path: Path = TABLE) -> set[str]:
    """The hooks that the guard's table has."""
    return {
        str(call.args[0].value)
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "Hook"
        and isinstance(call.args[0], ast.Constant)
    }


def versions_tested(path: Path = HOST) -> set[str]:
    """The versions that the guard was tested with."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r"^TESTED = frozenset\((\{[^}]*\})\)", text, re.MULTILINE)
    return set(ast.literal_eval(found[1])) if found else set()


def _hooks(found: Facts, known: Facts, folder: Path) -> Iterator[Finding]:
    evidence = (Evidence(str(folder / BASE)),)
    table = in_table() | {CONSTRUCTOR}
    unknown = sorted(found.hooks.keys() - table)
    if unknown:
        what = f"vLLM {found.version} has hooks that the guard's table does not know: {', '.join(unknown)}"
        cause = "children are not asked these"
        remedy = "upgrade kvbelay"
        yield Finding("drift.hooks", Level.WARNING, what, evidence, cause, remedy, PAGE)
    for name in sorted(found.hooks.keys() & known.hooks.keys()):
        if found.hooks[name] != known.hooks[name]:
            what = f"{name} has other parameters in vLLM {found.version}: ({found.hooks[name]})"
            cause = f"in {known.version}, with which the guard was tested, it is ({known.hooks[name]})"
            remedy = "upgrade kvbelay, or use a tested vLLM"
            yield Finding("drift.parameters", Level.WARNING, what, evidence, cause, remedy, PAGE)
    gone = sorted(known.hooks.keys() - found.hooks.keys())
    if gone:
        what = f"vLLM {found.version} does not have these hooks of {known.version}: {', '.join(gone)}"
        yield Finding("drift.hooks", Level.NOTE, what, evidence, "they are not called there", "", PAGE)


def _results(found: Facts, known: Facts, folder: Path) -> Iterator[Finding]:
    for cls, path in RESULTS.items():
        evidence = (Evidence(str(folder / path), 0, cls),)
        gone = [name for name in known.results[cls] if name not in found.results[cls]]
        new = [name for name in found.results[cls] if name not in known.results[cls]]
        if not found.results[cls]:
            what = f"vLLM {found.version} has no {cls}"
            cause = "it cannot be told that the load of one request has failed, and the guard refuses to start on it"
            yield Finding("drift.results", Level.PROBLEM, what, evidence, cause, "use vLLM 0.30 or newer", PAGE)
            continue
        if gone:
            renamed = [f"{name}, now {close[0]}" for name in gone if (close := difflib.get_close_matches(name, new, 1))]
            what = f"fields of {cls} are gone in vLLM {found.version}: {', '.join(gone)}"
            cause = f"renamed, it seems: {'; '.join(renamed)}" if renamed else "whoever reads them raises"
            remedy = "use a tested vLLM, and do not start the guard on this one"
            yield Finding("drift.results", Level.PROBLEM, what, evidence, cause, remedy, PAGE)
        if new:
            what = f"{cls} has fields that the guard does not know: {', '.join(new)}"
            cause = "what vLLM reads there stays at its default"
            yield Finding("drift.results", Level.WARNING, what, evidence, cause, "upgrade kvbelay", PAGE)


def _version(found: Facts) -> Iterator[Finding]:
    known = versions_tested()
    if found.version not in known:
        what = f"the guard was not tested with vLLM {found.version}"
        cause = f"it was with {', '.join(sorted(known))}; elsewhere a failed load is left to kv_load_failure_policy"
        remedy = "use a tested version, or set kv_load_failure_policy to recompute"
        yield Finding("drift.version", Level.WARNING, what, (), cause, remedy, "docs/vllm.md#versions")


def encoded(facts: Facts) -> bytes:
    """As the file holds them."""
    return msgspec.json.format(msgspec.json.encode(facts), indent=1) + b"\n"
