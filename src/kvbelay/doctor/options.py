"""The guard's options, read from its source as data: importing the guard would import vLLM, which takes seconds."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from kvbelay.doctor.known import OURS

SOURCE = Path(__file__).parents[1] / "vllm" / "options.py"
CIRCUIT = Path(__file__).parents[1] / "core" / "circuit.py"


class Option(NamedTuple):
    """One field of an options class."""

    kinds: tuple[type, ...]
    """Types that JSON may give; empty: not checked here."""
    default: object
    choices: tuple[str, ...] = ()


class Wrong(NamedTuple):
    """A mistake in an option."""

    field: str
    what: str
    remedy: str


@functools.cache
def declared(cls: str, path: Path = SOURCE) -> Mapping[str, Option]:
    """The fields of a class of that file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    enums = {name: _values(node) for name, node in classes.items() if any(_name(base) == "Enum" for base in node.bases)}
    found = {}
    for node in classes[cls].body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation).partition(" | ")[0]
            choices = enums.get(kind, ())
            found[node.target.id] = Option(_kinds(kind, choices), _literal(node.value, choices), choices)
    return found


def _kinds(kind: str, choices: tuple[str, ...]) -> tuple[type, ...]:
    plain: dict[str, tuple[type, ...]] = {"str": (str,), "bool": (bool,), "int": (int,), "float": (int, float)}
    return (str,) if choices else plain.get(kind, ())


def _values(node: ast.ClassDef) -> tuple[str, ...]:
    return tuple(
        str(part.value.value)
        for part in node.body
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)
    )


def _name(node: ast.expr) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _literal(node: ast.expr | None, choices: tuple[str, ...]) -> object:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Attribute) and choices:
        return node.attr.lower()
    if isinstance(node, ast.Call) and _name(node.func) == "float":
        return float("inf")
    return None


def mistakes(raw: object, cls: str, field: str, path: Path = SOURCE) -> Iterator[Wrong]:
    """Unknown options, wrong types and impossible durations."""
    known = declared(cls, path)
    if not isinstance(raw, Mapping):
        yield Wrong(field, f"{OURS} has to be an object", f"give the options of {OURS} as {{...}}")
        return
    for key, value in raw.items():
        option = known.get(key)
        if option is None:
            close = difflib.get_close_matches(str(key), known, 1)
            meant = f"did you mean {close[0]!r}?" if close else f"the options here are {', '.join(known)}"
            yield Wrong(f"{field}.{key}", f"the guard has no option {key!r} here", meant)
        elif key == "circuit":
            yield from mistakes(value, "CircuitPolicy", f"{field}.{key}", CIRCUIT)
        elif value is None and option.default is None:
            continue
        elif option.choices and value not in option.choices:
            what = f"{value!r} is none of {', '.join(option.choices)}"
            yield Wrong(f"{field}.{key}", what, "choose one of them")
        elif option.kinds and type(value) not in option.kinds:
            what = f"{value!r} is no {option.kinds[-1].__name__}"
            yield Wrong(f"{field}.{key}", what, "correct the value")
        elif key.endswith("_s") and isinstance(value, int | float) and not value > 0:
            yield Wrong(f"{field}.{key}", f"{value!r} is no duration", "give a positive number of seconds")


def value_of(raw: Mapping[str, object], key: str, cls: str) -> object:
    """What an option is set to, or its default."""
    return raw.get(key, declared(cls)[key].default)


def number_of(raw: Mapping[str, object], key: str, cls: str) -> float | None:
    """The same where it is a number."""
    value = value_of(raw, key, cls)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
