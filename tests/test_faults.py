"""The faults that `make mutants` plants: each can be planted, and together they break every invariant."""

from __future__ import annotations

import ast
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from kvbelay.testing.invariants import INVARIANTS

ROOT = Path(__file__).resolve().parents[1]


def tool() -> ModuleType:
    """tools/mutants.py as a module."""
    spec = importlib.util.spec_from_file_location("mutants", ROOT / "tools" / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutants"] = module
    spec.loader.exec_module(module)
    return module


MUTANTS = tool()
FAULTS = MUTANTS.faults()


def functions(path: Path) -> set[str]:
    """The test functions of a file, with their class where they have one, and the classes."""
    names = {""}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return names


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_can_be_planted(fault: object) -> None:
    """Its text stands in the source once, it changes something, and the tests that it names exist."""
    assert MUTANTS.problem(fault) == ""
    assert fault.old != fault.new  # type: ignore[attr-defined]
    for test in fault.test.split():  # type: ignore[attr-defined]
        path, _, name = test.partition("::")
        assert name.partition("[")[0] in functions(ROOT / path)


def test_the_faults_break_every_invariant() -> None:
    """Every invariant has faults that break it, and no fault breaks something else; names are unique."""
    assert {invariant for fault in FAULTS for invariant in fault.breaks} == set(INVARIANTS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS)


def test_a_fault_that_is_not_caught_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that no test minds, and one whose place is gone, end the run with exit code 1 and are named."""
    (tmp_path / "faults.toml").write_text(
        """
        [[fault]]
        name = "harmless"
        breaks = ["I8"]
        file = "errors.py"
        old = '# Every error'
        new = '# Each error'
        test = "tests/core/test_budget.py"
        """.replace("# Every", '"""Every').replace("# Each", '"""Each'),
        encoding="utf-8",
    )
    monkeypatch.setattr(MUTANTS, "FAULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["mutants", "--json", str(tmp_path / "out.json")])
    assert MUTANTS.main() == 1
    assert "NOT CAUGHT" in (tmp_path / "out.json").read_text(encoding="utf-8")
    assert MUTANTS.problem(MUTANTS.Fault("gone", (), "errors.py", "no such text", "", "")) != ""
    assert MUTANTS.problem(MUTANTS.Fault("gone", (), "no_such.py", "x", "", "")) != ""


def test_without_vllm_the_guards_faults_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no interpreter with vLLM is found, one sentence says how many faults were left out, and why."""
    monkeypatch.setattr(sys, "argv", ["mutants", "--room", "vllm", "--vllm", str(tmp_path / "python")])
    assert MUTANTS.main() == 0
    said = capsys.readouterr().out
    count = sum(fault.needs_vllm for fault in FAULTS if fault.file.startswith("vllm/"))
    assert f"{count} faults of the guard are left out" in said
    assert "make test-vllm" in said
