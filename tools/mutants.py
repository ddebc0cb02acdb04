"""Plant named faults into a copy of the source, one at a time, and see that the test that must catch each one does.

The faults are data: ``tools/faults/*.toml``, one file a room. Each names the invariants that it breaks, the text that
it replaces, which must stand in its file exactly once, and the test that has to fail. Exit code 1 if a fault is not
caught, or cannot be planted any more. The faults of the guard need vLLM, and the interpreter of an environment that has
it; `make test-vllm` makes one.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tools" / "faults"
PACKAGE = ROOT / "src" / "kvbelay"
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
ENGINES = 2
"""Tests that run at once where each builds engines of vLLM."""
LIMIT_S = 120.0
"""Longest run of one test; a fault that makes it hang is caught."""
FAILED = 1
"""pytest's exit code where tests ran and failed; any other says that the fault proves nothing."""


@dataclass(frozen=True)
class Fault:
    """One fault that could be in the code."""

    name: str
    breaks: tuple[str, ...]
    """Invariants, by id."""
    file: str
    """Below ``src/kvbelay``."""
    old: str
    new: str
    test: str
    """The node id, or several with a space between, of which one has to fail."""

    @property
    def needs_vllm(self) -> bool:
        """Whether its test runs on the real engine."""
        return self.test.startswith("tests/vllm/")


@dataclass(frozen=True)
class Verdict:
    """What came of planting one."""

    name: str
    breaks: tuple[str, ...]
    test: str
    result: str
    seconds: float

    @property
    def caught(self) -> bool:
        """Whether the test did its duty."""
        return self.result == "caught"


def faults() -> list[Fault]:
    """All faults, by file and in their order."""
    return [
        Fault(**{**entry, "breaks": tuple(entry["breaks"])})
        for path in sorted(FAULTS.glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]
    ]


def problem(fault: Fault) -> str:
    """Why the fault cannot be planted; empty if it can."""
    path = PACKAGE / fault.file
    if not path.is_file():
        return f"there is no {fault.file}"
    count = path.read_text(encoding="utf-8").count(fault.old)
    if count != 1:
        return f"its old text stands {count} times in {fault.file}"
    return ""


@contextmanager
def planted(fault: Fault, source: Path) -> Iterator[None]:
    """The fault in a copy of the source."""
    path = source / "kvbelay" / fault.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    try:
        yield
    finally:
        path.write_text(text, encoding="utf-8")


def run(python: str, tests: Sequence[str], source: Path, limit_s: float = LIMIT_S) -> tuple[int, str]:
    """Run these tests against that copy: pytest's exit code and the end of what it says; `FAILED` if they hang."""
    environment = {**os.environ, "PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1", "CI": "false"}
    command = [python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end after {limit_s:.0f} s"
    return done.returncode, done.stdout[-2000:]


def judge(python: str, fault: Fault, sources: SimpleQueue[Path]) -> Verdict:
    """Plant it, run its test."""
    began = time.monotonic()
    result = problem(fault)
    if not result:
        source = sources.get()
        try:
            with planted(fault, source):
                code, _ = run(python, fault.test.split(), source)
        finally:
            sources.put(source)
        result = {0: "NOT CAUGHT", FAILED: "caught"}.get(code, f"its test cannot be run (pytest says {code})")
    return Verdict(fault.name, fault.breaks, fault.test, result, round(time.monotonic() - began, 2))


def copy(folder: Path) -> Path:
    """A copy of the package below that folder."""
    shutil.copytree(PACKAGE, folder / "kvbelay", ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def plant(python: str, chosen: Sequence[Fault], jobs: int) -> list[Verdict] | None:
    """Plant these, ``jobs`` at once; None if their tests do not pass without any fault."""
    with tempfile.TemporaryDirectory(prefix="kvbelay-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        sources: SimpleQueue[Path] = SimpleQueue()
        for job in range(jobs):
            sources.put(copy(Path(folder) / str(job)))
        tests = sorted({test for fault in chosen for test in fault.test.split()})
        clean, said = run(python, tests, Path(folder) / "0", 10 * LIMIT_S)
        if clean != 0:
            print(f"{said}\nthe tests do not pass without any fault (pytest says {clean})")
            return None
        verdicts = []
        for verdict in pool.map(lambda fault: judge(python, fault, sources), chosen):
            verdicts.append(verdict)
            print(
                f"{verdict.result:<11} {verdict.seconds:6.1f} s  {','.join(verdict.breaks):<6} {verdict.name}",
                flush=True,
            )
        return verdicts


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", metavar="NAME", help="plant this one only")
    parser.add_argument("--room", metavar="ROOM", help="plant those of this room only, such as core")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the results there, too")
    parser.add_argument("--vllm", metavar="PYTHON", type=Path, default=VLLM, help="an interpreter that has vLLM")
    arguments = parser.parse_args()
    chosen = [
        fault
        for fault in faults()
        if arguments.only in {None, fault.name} and arguments.room in {None, fault.file.partition("/")[0]}
    ]
    if not chosen:
        print("there is no fault of that name and room")
        return 1
    guard = [fault for fault in chosen if fault.needs_vllm]
    if guard and not arguments.vllm.is_file():
        print(
            f"{len(guard)} faults of the guard are left out: there is no {arguments.vllm}, which `make test-vllm` makes"
        )
        guard = []
    cores = os.cpu_count() or 1
    verdicts: list[Verdict] = []
    for python, group, jobs in (
        (sys.executable, [fault for fault in chosen if not fault.needs_vllm], cores),
        (str(arguments.vllm.absolute()), guard, min(cores, ENGINES)),
    ):
        planted_here = plant(python, group, jobs) if group else []
        if planted_here is None:
            return 1
        verdicts += planted_here
    caught = sum(verdict.caught for verdict in verdicts)
    print(f"{caught} of {len(verdicts)} faults caught, each by the test that it names")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1), encoding="utf-8")
    return int(caught < len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
