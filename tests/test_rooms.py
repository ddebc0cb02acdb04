"""The rooms of the package: who may import whom, where a broad ``except`` may stand, and how long things may get."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "kvbelay"

ANY = "kvbelay"
PORT = ("kvbelay.connectors.port", "kvbelay.connectors.spans")


class Room(NamedTuple):
    """What the modules under one prefix may import besides the standard library and their own room."""

    ours: tuple[str, ...]
    libraries: tuple[str, ...] = ("msgspec",)


ROOMS = {
    "kvbelay.errors": Room((), ()),
    "kvbelay.core": Room(("kvbelay.errors",)),
    "kvbelay.net": Room(("kvbelay.errors",)),
    "kvbelay.link": Room(("kvbelay.core.repeats", "kvbelay.errors", "kvbelay.net")),
    "kvbelay.connectors": Room(("kvbelay.core", "kvbelay.errors", *PORT)),
    "kvbelay.connectors.stream": Room(("kvbelay.core", "kvbelay.errors", "kvbelay.net", *PORT), ("msgspec", "xxhash")),
    "kvbelay.connectors.spans": Room(("kvbelay.core", "kvbelay.errors"), ("xxhash",)),
    "kvbelay.connectors.faulty": Room(("kvbelay.core", "kvbelay.errors", *PORT, "kvbelay.connectors.wrapper")),
    "kvbelay.connectors.staged": Room(
        ("kvbelay.core", "kvbelay.errors", *PORT, "kvbelay.connectors.wrapper", "kvbelay.connectors.arena")
    ),
    "kvbelay.connectors.registry": Room(("kvbelay.core", "kvbelay.errors", "kvbelay.connectors")),
    "kvbelay.runtime": Room(("kvbelay.core", "kvbelay.errors", *PORT, "kvbelay.connectors.registry")),
    "kvbelay.testing": Room(
        ("kvbelay.core", "kvbelay.errors", "kvbelay.connectors", "kvbelay.runtime"), ("msgspec", "pytest", "hypothesis")
    ),
    "kvbelay.reference": Room(
        ("kvbelay.core", "kvbelay.errors", "kvbelay.runtime"), ("msgspec", "numpy", "gguf", "tokenizers")
    ),
    "kvbelay.router": Room(
        ("kvbelay.core.budget", "kvbelay.core.circuit", "kvbelay.core.repeats", "kvbelay.errors"),
        ("msgspec", "aiohttp", "multidict", "yarl", "prometheus_client"),
    ),
    "kvbelay.serve": Room(
        ("kvbelay.core", "kvbelay.errors", "kvbelay.observability", "kvbelay.reference", "kvbelay.runtime"),
        ("msgspec", "aiohttp", "prometheus_client"),
    ),
    "kvbelay.vllm": Room(
        ("kvbelay.core", "kvbelay.errors", "kvbelay.link", "kvbelay.net.endpoint"),
        ("msgspec", "vllm", "torch", "prometheus_client"),
    ),
    "kvbelay.observability": Room(
        (*(f"kvbelay.core.{name}" for name in ("boundary", "circuit", "model", "repeats", "series")), "kvbelay.errors"),
        ("msgspec", "prometheus_client"),
    ),
    "kvbelay.doctor": Room(("kvbelay.core.boundary", "kvbelay.core.model", "kvbelay.errors")),
    "kvbelay.__main__": Room(("kvbelay.cli",), ()),
    "kvbelay.cli": Room((ANY,), ("msgspec", "click", "rich", "matplotlib", "numpy", "tomli", "uvloop")),
    "kvbelay.cli.bench.hosted": Room((ANY,), ("msgspec", "vllm", "torch")),
}
"""The longest prefix counts. Each module or folder of ``connectors`` is a room of its own; the package's own
``__init__`` imports nothing."""

# fmt: off
IO_AND_CLOCKS = frozenset(
    {
        "asyncio", "concurrent", "ctypes", "datetime", "fcntl", "glob", "http", "io", "logging", "mmap",
        "multiprocessing", "os", "pathlib", "queue", "random", "sched", "secrets", "select", "selectors",
        "shutil", "signal", "socket", "socketserver", "sqlite3", "ssl", "subprocess", "tempfile", "threading",
        "time", "urllib", "uuid", "_thread",
    }
)
# fmt: on
"""What the core does without; a type that it only names in annotations is fine."""

NEVER = frozenset({"pickle", "marshal", "shelve", "dill", "cloudpickle"})
NEVER_CALLED = frozenset({"eval", "exec"})
BROAD = frozenset({"Exception", "BaseException"})
BOUNDARY = "kvbelay.core.boundary"
DUMPING_GROUNDS = frozenset({"utils", "util", "common", "manager", "helpers", "misc"})
HOST_SHAPED = "kvbelay.vllm.multi"
"""Its class has the methods that vLLM calls."""
FILE_LINES, CLASS_LINES, PUBLIC_METHODS, FUNCTION_LINES = 500, 350, 15, 80


class Import(NamedTuple):
    target: str
    line: int
    typing_only: bool


class Module(NamedTuple):
    name: str
    path: Path
    tree: ast.Module
    lines: int


def read_package(package: Path) -> dict[str, Module]:
    """Every module under the folder ``package``, by its dotted name."""
    modules = {}
    for path in sorted(package.rglob("*.py")):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        if parts[-1] == "__init__":
            parts.pop()
        text = path.read_text(encoding="utf-8")
        name = ".".join(parts)
        modules[name] = Module(name, path, ast.parse(text, str(path)), text.count("\n"))
    return modules


def is_type_checking(node: ast.AST) -> bool:
    test = node.test if isinstance(node, ast.If) else None
    return getattr(test, "id", getattr(test, "attr", "")) == "TYPE_CHECKING"


def import_nodes(node: ast.AST, *, typing_only: bool = False) -> Iterator[tuple[ast.Import | ast.ImportFrom, bool]]:
    """All import statements below ``node``, at any depth, and whether they serve annotations only."""
    for field, value in ast.iter_fields(node):
        guarded = typing_only or (is_type_checking(node) and field == "body")
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.Import | ast.ImportFrom):
                yield child, guarded
            elif isinstance(child, ast.AST):
                yield from import_nodes(child, typing_only=guarded)


def imports_of(module: Module, modules: dict[str, Module]) -> Iterator[Import]:
    """What the module imports; ``from package import module`` names the module."""
    for node, typing_only in import_nodes(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, node.lineno, typing_only)
            continue
        base = node.module or ""
        if node.level:
            package = module.name.split(".") if module.path.name == "__init__.py" else module.name.split(".")[:-1]
            package = package[: len(package) - node.level + 1]
            base = ".".join([*package, base] if base else package)
        for alias in node.names:
            full = f"{base}.{alias.name}"
            yield Import(full if full in modules else base, node.lineno, typing_only)


def within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def room_of(name: str) -> str:
    """The room: a folder or module one level below the package, two levels in ``connectors``."""
    depth = 3 if within(name, "kvbelay.connectors") else 2
    return ".".join(name.split(".")[:depth])


def import_problems(modules: dict[str, Module]) -> Iterator[str]:
    for module in modules.values():
        keys = [key for key in ROOMS if within(module.name, key)]
        if not keys and module.name != ANY:
            yield f"{module.name}: in no room of the table"
            continue
        room = ROOMS[max(keys, key=len)] if keys else Room((), ())
        for found in imports_of(module, modules):
            if why := import_problem(module.name, room, found):
                yield f"{module.name}:{found.line}: imports {found.target}, {why}"


def import_problem(name: str, room: Room, found: Import) -> str:
    top = found.target.split(".")[0]
    if top == "kvbelay":
        allowed = room_of(found.target) == room_of(name) or any(within(found.target, ours) for ours in room.ours)
        return "" if allowed else "which its room may not enter"
    if top in NEVER:
        return "which the whole package does without"
    if top not in sys.stdlib_module_names:
        return "" if top in room.libraries else "a library that its room does without"
    if within(name, "kvbelay.core") and top in IO_AND_CLOCKS and not found.typing_only:
        return "but the core has no I/O, no clock, no threads and no dice"
    return ""


def cycle_problems(modules: dict[str, Module]) -> Iterator[str]:
    """One line for each group of modules that import one another (depth first, an edge back to the open path)."""
    edges = {
        name: sorted({found.target for found in imports_of(module, modules)} & modules.keys() - {name})
        for name, module in modules.items()
    }
    done: set[str] = set()
    path: list[str] = []

    def visit(name: str) -> Iterator[str]:
        if name in path:
            yield f"import cycle: {' -> '.join([*path[path.index(name) :], name])}"
        elif name not in done:
            path.append(name)
            for target in edges[name]:
                yield from visit(target)
            path.pop()
            done.add(name)

    for name in edges:
        yield from visit(name)


def names_in(node: ast.AST | None) -> set[str]:
    """The last names of the exceptions in an ``except`` clause; a bare one counts as BaseException."""
    if node is None:
        return {"BaseException"}
    parts = node.elts if isinstance(node, ast.Tuple) else [node]
    return {getattr(part, "id", getattr(part, "attr", "")) for part in parts}


def code_problems(module: Module) -> Iterator[str]:
    """Broad handlers, disguised ones, and calls that run text as code."""
    for node in ast.walk(module.tree):
        caught: set[str] = set()
        if isinstance(node, ast.ExceptHandler):
            caught = names_in(node.type)
        elif isinstance(node, ast.Call):
            (called,) = names_in(node.func)
            if called in NEVER_CALLED and isinstance(node.func, ast.Name):
                yield f"{module.name}:{node.lineno}: calls {called}()"
            if called == "suppress":
                caught = set().union(*(names_in(argument) for argument in node.args))
        if caught & BROAD and module.name != BOUNDARY:
            yield f"{module.name}:{getattr(node, 'lineno', 0)}: catches everything; only {BOUNDARY} may"


def size_problems(module: Module) -> Iterator[str]:
    stem = module.name.split(".")[-1]
    if stem in DUMPING_GROUNDS or stem.endswith("_v2"):
        yield f"{module.name}: a name that says nothing"
    if module.lines >= FILE_LINES:
        yield f"{module.name}: {module.lines} lines in a file"
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        if not isinstance(node, ast.ClassDef):
            if lines >= FUNCTION_LINES:
                yield f"{module.name}:{node.lineno}: {lines} lines in function {node.name}"
            continue
        methods = [part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)]
        public = len({name for name in methods if not name.startswith("_")})
        if lines >= CLASS_LINES:
            yield f"{module.name}:{node.lineno}: {lines} lines in class {node.name}"
        if public > PUBLIC_METHODS and module.name != HOST_SHAPED:
            yield f"{module.name}:{node.lineno}: {public} public methods in class {node.name}"


def problems_of(package: Path) -> list[str]:
    """Everything that is wrong with the package, one line each."""
    modules = read_package(package)
    found = [*import_problems(modules), *cycle_problems(modules)]
    for module in modules.values():
        found += [*code_problems(module), *size_problems(module)]
    return found


def test_package_keeps_its_rooms() -> None:
    """The package breaks no rule of the room table, of sizes, of names and of broad handlers."""
    found = problems_of(PACKAGE)
    assert not found, "\n".join(found)


def test_every_room_of_the_table_is_read() -> None:
    """The checker sees the modules that exist: an empty tree would pass any rule."""
    modules = read_package(PACKAGE)
    assert {"kvbelay", "kvbelay.errors", "kvbelay.core.model", "kvbelay.connectors.spans"} <= modules.keys()
    targets = {found.target for found in imports_of(modules["kvbelay.connectors.spans"], modules)}
    assert {"xxhash", "kvbelay.core.model", "kvbelay.errors"} <= targets


@pytest.mark.parametrize("folder", ["tests", "tools", "examples"])
def test_files_around_the_package_stay_short(folder: str) -> None:
    """Tests, tools and examples keep to the length of files and functions too."""
    found = [
        problem
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in [path.read_text(encoding="utf-8")]
        for problem in size_problems(Module(str(path), path, ast.parse(text), text.count("\n")))
        if "public methods" not in problem
    ]
    assert not found, "\n".join(found)


METHODS = "\n".join(f"    def m{index}(self): ..." for index in range(PUBLIC_METHODS + 1))
GUARDED = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvbelay import runtime\n"
VIOLATIONS = {
    "core enters another room": ("core/a.py", "from kvbelay.connectors import port\n", "may not enter"),
    "inside a function": ("core/a.py", "def f():\n    import kvbelay.runtime\n", "may not enter"),
    "for annotations only": ("core/a.py", GUARDED, "may not enter"),
    "by a relative import": ("core/deep/a.py", "from ...runtime import x\n", "may not enter"),
    "relative from a package": ("core/__init__.py", "from ..cli import main\n", "may not enter"),
    "errors import the core": ("errors.py", "import kvbelay.core\n", "may not enter"),
    "the package imports a room": ("__init__.py", "from kvbelay.errors import x\n", "may not enter"),
    "one connector another": ("connectors/file/a.py", "import kvbelay.connectors.memory\n", "may not enter"),
    "a connector the registry": ("connectors/stream/a.py", "from ..registry import x\n", "may not enter"),
    "runtime a connector": ("runtime/a.py", "import kvbelay.connectors.memory\n", "may not enter"),
    "reference a connector": ("reference/a.py", "import kvbelay.connectors.port\n", "may not enter"),
    "core a library": ("core/a.py", "import xxhash\n", "does without"),
    "router a connector": ("router/a.py", "import kvbelay.connectors.port\n", "may not enter"),
    "router the ledger": ("router/a.py", "from kvbelay.core import ledger\n", "may not enter"),
    "router the engine": ("router/a.py", "import vllm\n", "does without"),
    "runtime a library": ("runtime/a.py", "import numpy\n", "does without"),
    "core a clock": ("core/a.py", "from time import monotonic\n", "no clock"),
    "core dice": ("core/a.py", "import random\n", "no dice"),
    "core a submodule": ("core/a.py", "import concurrent.futures\n", "no threads"),
    "pickle": ("runtime/a.py", "import pickle\n", "does without"),
    "eval": ("cli/a.py", "eval('1')\n", "calls eval()"),
    "an unknown room": ("attic/a.py", "", "no room"),
    "a broad except": ("runtime/a.py", "try: ...\nexcept Exception: ...\n", "catches everything"),
    "a broad one in a tuple": ("core/a.py", "try: ...\nexcept (OSError, BaseException): ...\n", "catches everything"),
    "a bare except": ("cli/a.py", "try: ...\nexcept: ...\n", "catches everything"),
    "a disguised one": ("cli/a.py", "import contextlib\nwith contextlib.suppress(Exception): ...\n", "everything"),
    "a long file": ("core/a.py", "x = 1\n" * FILE_LINES, "lines in a file"),
    "a long class": ("core/a.py", "class A:\n" + "    x = 1\n" * CLASS_LINES, "lines in class"),
    "a class of many methods": ("core/a.py", f"class A:\n{METHODS}\n", "public methods"),
    "a long function": ("core/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES, "lines in function"),
    "a dumping ground": ("core/utils.py", "", "says nothing"),
    "a folder of the kind": ("core/helpers/__init__.py", "", "says nothing"),
}


def plant(package: Path, files: dict[str, str]) -> Path:
    for name, text in {"__init__.py": "", "cli/__init__.py": "", "runtime/__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


@pytest.mark.parametrize("case", VIOLATIONS)
def test_checker_reports(case: str, tmp_path: Path) -> None:
    """Each violation, planted alone into a clean tree, is reported, and nothing else is."""
    name, text, expected = VIOLATIONS[case]
    (problem,) = problems_of(plant(tmp_path / "kvbelay", {name: text}))
    assert expected in problem


def test_checker_reports_cycles(tmp_path: Path) -> None:
    """A cycle of three modules is reported once, through function-level and relative imports too."""
    files = {
        "core/a.py": "from kvbelay.core import b\n",
        "core/b.py": "def f():\n    from .c import x\n",
        "core/c.py": "import kvbelay.core.a\n",
    }
    (problem,) = problems_of(plant(tmp_path / "kvbelay", files))
    assert problem == "import cycle: kvbelay.core.a -> kvbelay.core.b -> kvbelay.core.c -> kvbelay.core.a"


def test_checker_lets_the_table_pass(tmp_path: Path) -> None:
    """What the table allows is not reported: dice in annotations, the boundary's broad handler, own libraries."""
    files = {
        "errors.py": "from enum import Enum\n",
        "core/policy.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from random import Random\n",
        "core/boundary.py": "import msgspec\nfrom kvbelay.errors import x\ntry: ...\nexcept Exception: ...\n",
        "connectors/port.py": "from kvbelay.core import policy\n",
        "connectors/file/__init__.py": "import os\nfrom kvbelay.connectors.port import x\nfrom .entries import y\n",
        "connectors/file/entries.py": "import kvbelay.core.policy\n",
        "connectors/registry.py": "def f():\n    import kvbelay.connectors.file\n",
        "cli/main.py": "import click\nfrom kvbelay.connectors.file import x\n",
    }
    assert problems_of(plant(tmp_path / "kvbelay", files)) == []
