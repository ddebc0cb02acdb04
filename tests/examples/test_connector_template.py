"""The template of a connector is built, installed into an environment of its own, and passes the kit there."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import kvbelay

TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "connector-template"
CONFIG = '{"shelf": "{scratch}"}'


def told(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """What a command says; it ends with this code."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shelf")


@pytest.fixture(scope="module")
def python(place: Path) -> Path:
    """An interpreter with the template's wheel in its own site-packages, and kvbelay from where this test has it."""
    source = place / "source"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    told(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, source, cwd=place)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / "bin" / "python"
    packages = Path(told(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=place).strip())
    (packages / "theirs.pth").write_text(
        f"{Path(kvbelay.__file__).parents[1]}\n"
        + "".join(f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()),
        encoding="utf-8",
    )
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    told(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=place)
    return python


def test_it_conforms_by_its_name(python: Path, place: Path) -> None:
    """``kvbelay conform`` finds it by the name of its entry point, and nothing of it is broken."""
    options = ("--capability", "CopiesOut", "--config", CONFIG)
    said = told(python, "-m", "kvbelay.cli.main", "conform", "shelf", *options, cwd=place)
    assert said.endswith("shelf conforms.\n")
    assert "BROKEN" not in said


def test_its_own_test_passes(python: Path, place: Path) -> None:
    """Its test file passes under pytest, which finds the plugin, and shows the verdict."""
    options = ("-q", "-p", "no:cacheprovider", "-k", "probe or other_pieces")
    said = told(python, "-m", "pytest", *options, "source/tests", cwd=place)
    assert "2 passed" in said
    assert "TestShelf: what was checked holds" in said
    assert "     held: I1, I2\n" in said


def test_it_is_used_from_the_wheel(python: Path, place: Path) -> None:
    """The module that was checked is the installed one."""
    said = told(python, "-c", "import kvbelay_shelf; print(kvbelay_shelf.__file__)", cwd=place)
    assert Path(said.strip()).is_relative_to(place / "venv")


def test_it_is_short() -> None:
    """It is read in minutes: imports, docstrings and blank lines apart, about forty lines."""
    lines = (TEMPLATE / "kvbelay_shelf.py").read_text(encoding="utf-8").splitlines()
    code = [line for line in map(str.strip, lines) if line and not line.startswith(("from ", "import ", '"""'))]
    assert len(code) <= 50
