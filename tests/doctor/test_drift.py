"""What a vLLM has that the guard does not know, in doctored copies of its base class."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvbelay.doctor import drift
from kvbelay.doctor.finding import Finding, Level

ROOT = Path(__file__).resolve().parents[2]
SIGNATURES = ROOT / "tests" / "vllm" / "signatures"
KNOWN = msgspec.json.decode(drift.KNOWN.read_bytes(), type=drift.Facts)


def written(facts: drift.Facts, folder: Path) -> Path:
    """A package with these hooks and results."""
    methods = "".join(f"    def {name}({given.replace('=', '=None')}): ...\n" for name, given in facts.hooks.items())
    classes = {cls: f"class {cls}:\n    '''x'''\n" + "".join(f"    {one}: set = None\n" for one in fields)
               for cls, fields in facts.results.items() if fields}  # fmt: skip
    texts = {
        drift.BASE: f"class KVConnectorBase_V1:\n{methods}\nclass SupportsHMA:\n    ...\n"
        + classes.get("KVConnectorTransferResults", ""),
        drift.OUTPUTS: classes.get("KVConnectorOutput", ""),
        "_version.py": f"__version__ = version = '{facts.version}+cpu'\n",
    }
    for name, text in texts.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def changed(**fields: object) -> drift.Facts:
    return msgspec.structs.replace(KNOWN, **fields)


def results(cls: str, change: Callable[[list[str]], list[str]]) -> drift.Facts:
    return changed(results={**KNOWN.results, cls: change(KNOWN.results[cls])})


def test_the_known_version_has_no_drift(tmp_path: Path) -> None:
    """What is written down is read back, and nothing is said of it."""
    assert drift.check_drift(written(KNOWN, tmp_path)) == []


CASES: dict[str, tuple[drift.Facts, str, Level, str]] = {
    "a new hook": (
        changed(hooks={**KNOWN.hooks, "prepare_step": "self"}),
        "drift.hooks",
        Level.WARNING,
        "prepare_step",
    ),
    "a hook is gone": (
        changed(hooks={name: given for name, given in KNOWN.hooks.items() if name != "on_new_request"}),
        "drift.hooks",
        Level.NOTE,
        "on_new_request",
    ),
    "a new parameter": (
        changed(hooks={**KNOWN.hooks, "request_finished": "self, request, block_ids, reason"}),
        "drift.parameters",
        Level.WARNING,
        "reason",
    ),
    "another constructor": (
        changed(hooks={**KNOWN.hooks, "__init__": "self, vllm_config, role"}),
        "drift.parameters",
        Level.WARNING,
        "__init__",
    ),
    "a renamed field": (
        results(
            "KVConnectorOutput", lambda own: [*(one for one in own if one != "failed_recving"), "failed_receiving"]
        ),
        "drift.results",
        Level.PROBLEM,
        "failed_recving",
    ),
    "a new field": (
        results("KVConnectorTransferResults", lambda own: [*own, "failed_sending"]),
        "drift.results",
        Level.WARNING,
        "failed_sending",
    ),
    "no word for a failed load": (
        results("KVConnectorTransferResults", lambda _: []),
        "drift.results",
        Level.PROBLEM,
        "no KVConnectorTransferResults",
    ),
    "another version": (changed(version="0.40.0"), "drift.version", Level.WARNING, "0.40.0"),
}


@pytest.mark.parametrize("name", CASES)
def test_drift_is_told(name: str, tmp_path: Path) -> None:
    """Each difference by itself, with its kind."""
    facts, check, level, words = CASES[name]
    found = drift.check_drift(written(facts, tmp_path))
    assert any((one.check, one.level) == (check, level) and words in one.what for one in found), found
    counting: list[Finding] = [one for one in found if one.level is not Level.NOTE]
    assert len(counting) == (0 if level is Level.NOTE else 2 if name == "a renamed field" else 1)


def test_a_renamed_field_is_told_with_its_new_name(tmp_path: Path) -> None:
    """The trap of the first of the two reports: who reads the old name raises."""
    facts, *_ = CASES["a renamed field"]
    (gone,) = [one for one in drift.check_drift(written(facts, tmp_path)) if one.level is Level.PROBLEM]
    assert "failed_recving, now failed_receiving" in gone.cause


@pytest.mark.parametrize("text", [None, "def (", "class Other: ...\n"])
def test_a_vllm_that_cannot_be_read(text: str | None, tmp_path: Path) -> None:
    """Could not check, with the reason."""
    folder = written(KNOWN, tmp_path)
    if text is None:
        (folder / drift.BASE).unlink()
    else:
        (folder / drift.BASE).write_text(text)
    (found,) = drift.check_drift(folder)
    assert found.level is Level.UNCHECKED
    assert found.cause


def test_no_vllm_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed there is nothing to compare."""
    monkeypatch.setattr(drift, "installed", lambda: None)
    (found,) = drift.check_drift()
    assert found.level is Level.NOTE


def test_what_is_known_is_what_was_tested() -> None:
    """The file, the version list and the signatures that the guard's tests use are of one vLLM."""
    assert KNOWN.version in drift.versions_tested()
    signatures = json.loads((SIGNATURES / f"{KNOWN.version}.json").read_text(encoding="utf-8"))
    told = {name: hook["signature"] for name, hook in signatures["hooks"].items()}
    told["__init__"] = signatures["constructor"]
    for name, signature in told.items():
        node = ast.parse(f"def hook{signature}: ...").body[0]
        assert isinstance(node, ast.FunctionDef)
        assert drift.parameters(node) == KNOWN.hooks[name], name
    assert told.keys() == KNOWN.hooks.keys()
    assert drift.in_table() >= KNOWN.hooks.keys() - {"__init__"}
