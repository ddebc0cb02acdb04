"""The pytest plugin, as authors of connectors and everybody else meet it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvbelay import testing

CASE = """
from kvbelay.connectors.memory import BACKEND, MemoryConfig
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.testing import ConnectorConformance, CopiesOut

class SaysNothing(Wrapper):
    def get(self, batch, ticket, within):
        super().get(batch, ticket, within)

class Memory(CopiesOut, ConnectorConformance):
    def open_source(self, scratch, fingerprint):
        return BACKEND.open(MemoryConfig(store=str(scratch)), child=self.child, fingerprint=fingerprint)

class TestGood(Memory):
    pass

class TestBad(Memory):
    def open_source(self, scratch, fingerprint):
        return SaysNothing(super().open_source(scratch, fingerprint))
"""
PLAIN = "def test_one(): ...\nclass TestTwo:\n    def test_it(self): ...\n"
LOADED = """
import sys
def pytest_unconfigure():
    print(sorted(name for name in sys.modules if name.partition(".")[0] == "kvbelay" or name == "hypothesis.core"))
"""


def run(folder: Path, *options: str) -> tuple[int, str]:
    """Run pytest with the plugin alone, whether or not this environment has its entry point."""
    plugins = ("-p", "no:kvbelay", "-p", "no:hypothesispytest", "-p", "kvbelay.testing.plugin")
    command = [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--strict-markers"]
    done = subprocess.run(
        [*command, *plugins, *options], cwd=folder, capture_output=True, text=True, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def case(tmp_path: Path) -> Path:
    (tmp_path / "test_mine.py").write_text(CASE, encoding="utf-8")
    return tmp_path


def test_verdict_in_the_summary(case: Path) -> None:
    """Each case gets its verdict: what is held, what is broken, and by which check."""
    code, said = run(case, "-k", "probe or read_again or miss_is")
    assert code == 1
    assert re.search(r"=== connector conformance: port version \d+, kit version \d+ ===", said)
    assert "test_mine.py::TestGood: what was checked holds" in said
    assert "     held: I1, I2, I9\n" in said
    bad = said.partition("TestBad does not conform: I9 broken\n")[2]
    assert re.search(r"I9 +BROKEN .*\n.*\n +test_read_again: get returned None", bad)
    assert re.search(r"I1 +not judged", bad)


def test_the_mark_selects(case: Path) -> None:
    """``-m kvbelay`` selects the kit's checks, and the mark is registered."""
    (case / "test_plain.py").write_text(PLAIN, encoding="utf-8")
    code, said = run(case, "-m", "not kvbelay")
    assert code == 0
    assert "2 passed" in said
    assert "connector conformance" not in said
    assert "@pytest.mark.kvbelay(*invariants)" in run(case, "--markers")[1]


def test_nothing_is_loaded_where_it_is_not_used(tmp_path: Path) -> None:
    """Tests that use nothing of kvbelay run without the kit, and hear nothing of it."""
    (tmp_path / "test_plain.py").write_text(PLAIN, encoding="utf-8")
    (tmp_path / "conftest.py").write_text(LOADED, encoding="utf-8")
    code, said = run(tmp_path)
    assert code == 0
    assert "connector conformance" not in said
    assert "['kvbelay', 'kvbelay.testing', 'kvbelay.testing.plugin']" in said


def test_what_the_package_offers_is_there() -> None:
    """Every public name of kvbelay.testing can be imported, although it is loaded only when asked for."""
    assert sorted(testing._WHERE) == sorted(testing.__all__)
    assert all(getattr(testing, name) is not None for name in testing.__all__)
    with pytest.raises(AttributeError, match=r"'kvbelay\.testing' has no attribute 'Nothing'"):
        testing.Nothing  # noqa: B018  # reading it is the test


def test_plugin_is_registered() -> None:
    """The project's metadata name the plugin, so that whoever installs it has it."""
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert '[project.entry-points.pytest11]\nkvbelay = "kvbelay.testing.plugin"\n' in text
