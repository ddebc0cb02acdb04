"""What tests of the connector template and of the page about connectors share: an environment that has it installed."""

from __future__ import annotations

import os
import shlex
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import pytest

import kvbelay

TEMPLATE = Path(__file__).resolve().parents[2] / "examples" / "connector-template"
MODULES = {"kvbelay": ("kvbelay",), "pytest": ("pytest", "-p", "no:cacheprovider")}
"""The commands that a page may show, and how they are run here."""


class Installed(NamedTuple):
    """The template, installed."""

    python: Path
    """The interpreter of a virtual environment that has it."""
    folder: Path
    """A copy of its source."""

    def run(self, command: str) -> str:
        """What a command says that a page shows; it ends well."""
        name, *arguments = shlex.split(command)
        return told(self.python, "-m", *MODULES[name], *arguments, cwd=self.folder)


def told(*command: str | Path, cwd: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Built without network; kvbelay and its libraries are those of this interpreter."""
    place = tmp_path_factory.mktemp("shelf")
    source = place / "source"
    shutil.copytree(TEMPLATE, source, ignore=shutil.ignore_patterns("__pycache__", "dist"))
    told(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", place, source, cwd=place)
    (wheel,) = place.glob("*.whl")
    venv.create(place / "venv", with_pip=False)
    python = place / "venv" / "bin" / "python"
    packages = Path(told(python, "-c", "import site; print(site.getsitepackages()[0])", cwd=place).strip())
    theirs = [f"import site; site.addsitedir({folder!r})\n" for folder in site.getsitepackages()]
    ours = f"{Path(kvbelay.__file__).parents[1]}\n"
    (packages / "theirs.pth").write_text(ours + "".join(theirs), encoding="utf-8")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    told(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=place)
    (source / "kvbelay_shelf.py").rename(place / "kvbelay_shelf.py")  # what is used from now on is what was installed
    return Installed(python, source)
