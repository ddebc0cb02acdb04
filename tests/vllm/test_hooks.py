"""The table of hooks against vLLM: the installed one, and the signatures of others (tests/vllm/signatures)."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1 import base
from vllm.model_executor.layers.attention import kv_transfer_utils

import kvbelay.vllm
import vllm
from kvbelay.vllm import host
from kvbelay.vllm.hooks import HOOKS, Hook, Rule, Side, unknown
from kvbelay.vllm.multi import MultiConnector

HERE = Path(__file__).parent
VERSIONS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in (HERE / "signatures").glob("*.json")}
TABLE = {hook.name: hook for hook in HOOKS}
GUARD = Path(kvbelay.vllm.__file__).parent
WITHOUT = {"0.26.0": {"KVConnectorTransferResults"}}
"""What the guard imports and a version does not have: it cannot be loaded there."""
MADE = {Rule.EACH, Rule.ANY, Rule.EVERY}
Kinds = inspect._ParameterKind


def tool() -> ModuleType:
    """tools/hooks.py as a module."""
    spec = importlib.util.spec_from_file_location("hooks_of_wheels", HERE.parents[1] / "tools" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def signature_of(text: str) -> inspect.Signature:
    """A written signature, without its types."""
    function = ast.parse(f"def hook{text}: ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    given = function.args
    some = object()
    plain = [*given.posonlyargs, *given.args]
    optional = {argument.arg for argument in plain[len(plain) - len(given.defaults) :]}
    optional |= {one.arg for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True) if default}

    def parameters(arguments: list[Any], kind: Kinds) -> list[inspect.Parameter]:
        return [
            inspect.Parameter(one.arg, kind, default=some if one.arg in optional else inspect.Parameter.empty)
            for one in arguments
            if one is not None
        ]

    return inspect.Signature(
        [
            *parameters(given.posonlyargs, Kinds.POSITIONAL_ONLY),
            *parameters(given.args, Kinds.POSITIONAL_OR_KEYWORD),
            *parameters([given.vararg], Kinds.VAR_POSITIONAL),
            *parameters(given.kwonlyargs, Kinds.KEYWORD_ONLY),
            *parameters([given.kwarg], Kinds.VAR_KEYWORD),
        ]
    )


def refused(ours: inspect.Signature, theirs: inspect.Signature) -> str:
    """Why a call that theirs allows is one that ours does not; empty if every one is."""
    named = [one for one in theirs.parameters.values() if one.kind in {Kinds.POSITIONAL_OR_KEYWORD, Kinds.KEYWORD_ONLY}]
    by_position = [one for one in theirs.parameters.values() if one.kind is not Kinds.KEYWORD_ONLY]
    plain = [one.name for one in by_position if one.kind not in {Kinds.VAR_POSITIONAL, Kinds.VAR_KEYWORD}]
    needed = {one.name for one in named if one.default is inspect.Parameter.empty}
    kinds = {one.kind for one in theirs.parameters.values()}
    more = {"something": 0} if Kinds.VAR_KEYWORD in kinds else {}
    calls: list[tuple[list[str], dict[str, Any]]] = [
        (plain, {one.name: 0 for one in named if one.name not in plain} | more),
        (plain[:1], {one.name: 0 for one in named if one.name != plain[0]} | more),
        (plain[:1], dict.fromkeys(needed - {plain[0]}, 0)),
    ]
    if Kinds.VAR_POSITIONAL in kinds:
        calls.append(([*plain, "more"], {}))
    return next(filter(None, (refusal(ours, positional, keywords) for positional, keywords in calls)), "")


def refusal(signature: inspect.Signature, positional: list[str], keywords: dict[str, Any]) -> str:
    """Why it cannot be called so; empty if it can."""
    try:
        signature.bind(*positional, **keywords)
    except TypeError as exc:
        return f"({', '.join(positional)}, {keywords}): {exc}"
    return ""


def drift(known: dict[str, Hook], version: dict[str, Any]) -> list[str]:
    """Hooks of a version that the table does not know."""
    return [
        f"vLLM {version['version']} has a hook {name}{hook['signature']} ({hook['kind']} of {hook['of']})"
        for name, hook in version["hooks"].items()
        if name not in known
    ]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_table_knows_every_hook(version: str) -> None:
    """A hook that the table does not know is named, with its version and its signature."""
    assert not drift(TABLE, VERSIONS[version])


def test_an_unknown_hook_is_named() -> None:
    """The comparison can fail, and then says all that one needs to know."""
    less = {name: hook for name, hook in TABLE.items() if name != "on_new_request"}
    (said,) = drift(less, VERSIONS["0.32.0"])
    assert "0.32.0" in said
    assert "on_new_request(self, request: Request) -> None" in said


def test_the_table_has_no_stale_hook() -> None:
    """Every row is a hook of some version."""
    assert TABLE.keys() == {name for version in VERSIONS.values() for name in version["hooks"]}


def test_versions_are_there() -> None:
    """The versions that must be compared are, and those that are called tested are among them."""
    assert {"0.26.0", "0.30.0", "0.32.0"} <= VERSIONS.keys()
    assert VERSIONS.keys() >= host.TESTED


def test_the_installed_version_is_what_is_written_of_it() -> None:
    """The installed vLLM's hooks, read from its source and asked of its classes, stand in the file of its version."""
    written = VERSIONS[vllm.__version__.partition("+")[0]]
    source = Path(inspect.getfile(base)).read_text(encoding="utf-8")
    for key, value in tool().read_hooks(source).items():
        assert written[key] == value, "run tools/hooks.py"
    public = {
        name
        for cls in (base.KVConnectorBase_V1, base.SupportsHMA)
        for name in dir(cls)
        if not name.startswith("_") and hasattr(cls, name)
    }
    assert public == written["hooks"].keys()
    assert unknown(base.KVConnectorBase_V1) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_sides(version: str) -> None:
    """A hook's side in the table is the section of the base class in which it stands, where it has one side only."""
    for name, hook in VERSIONS[version]["hooks"].items():
        side = TABLE[name].side
        assert (hook["kind"] == "classmethod") is (side is Side.CLASS), name
        if hook["section"] and side in {Side.SCHEDULER, Side.WORKER}:
            assert hook["section"] == side.value, name


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_the_guard_has_what_the_table_says(hook: Hook) -> None:
    """A hook is written out, or made from the table, or left to the base class, as its rule says."""
    own = vars(MultiConnector).get(hook.name)
    if hook.rule is Rule.BASE:
        assert own is None
        return
    method = own.fget if isinstance(own, property) else getattr(own, "__func__", own)
    assert inspect.isfunction(method)
    assert (method.__module__ == "kvbelay.vllm.hooks") is (hook.rule in MADE)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.name)
def test_the_guard_takes_every_call(hook: Hook, version: str) -> None:
    """Whatever call a version's base class takes, the guard's method takes."""
    theirs = VERSIONS[version]["hooks"].get(hook.name)
    if theirs is None or hook.rule is Rule.BASE:
        return
    ours = vars(MultiConnector)[hook.name]
    kinds = {property: "property", classmethod: "classmethod"}
    assert kinds.get(type(ours), "method") == theirs["kind"]
    function = ours.fget if isinstance(ours, property) else getattr(ours, "__func__", ours)
    assert not refused(inspect.signature(function), signature_of(theirs["signature"])), theirs["signature"]


@pytest.mark.parametrize("version", VERSIONS)
def test_imports(version: str) -> None:
    """Whatever the guard imports from vLLM is there, in every version for which it is not known to be missing."""
    names = VERSIONS[version]["names"]
    imported = {
        (node.module, name.name)
        for path in GUARD.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm.")
        for name in node.names
    }
    assert imported
    whole = {f"{module}.{name}" for module, name in imported} & names.keys()
    missing = {
        name for module, name in imported if name not in names.get(module, ()) and f"{module}.{name}" not in whole
    }
    assert missing == WITHOUT.get(version, set())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_guard_is_made_as_the_base_class_is(version: str) -> None:
    """The guard's constructor takes what a version's base class takes."""
    theirs = signature_of(VERSIONS[version]["constructor"])
    assert not refused(inspect.signature(MultiConnector.__init__), theirs)
    assert not refused(inspect.signature(MultiConnector.__new__), theirs)


def test_layer_hooks_are_called_with_these_arguments_alone() -> None:
    """A tested host passes the layer hooks' arguments by position and no more: the guard's fast way takes no others."""
    calls = {
        node.func.attr: (len(node.args), len(node.keywords))
        for node in ast.walk(ast.parse(inspect.getsource(kv_transfer_utils)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    }
    assert (calls["wait_for_layer_load"], calls["save_kv_layer"]) == ((1, 0), (3, 0))


@pytest.mark.parametrize(
    ("theirs", "ours", "fits"),
    [
        ("(self, a, b=1)", "(self, a, b=2)", True),
        ("(self, a, b=1)", "(self, a, b)", False),
        ("(self, a)", "(self, b)", False),
        ("(self, a)", "(self, a, b)", False),
        ("(self, a, **more)", "(self, a)", False),
        ("(self, a, *more)", "(self, a)", False),
        ("(self, a, *, b)", "(self, a, *, b=1, c=2)", True),
        ("(self, a, *, b)", "(self, a, b, c)", False),
        ("(self, a, *, b=1)", "(self, a)", False),
        ("(self, a, b=1, **more)", "(self, *args, **kwargs)", True),
    ],
)
def test_calls_are_compared(theirs: str, ours: str, fits: bool) -> None:
    """A parameter that is missing, renamed or no longer optional is noticed."""
    assert (not refused(signature_of(ours), signature_of(theirs))) is fits
