"""What the tests' own configuration promises."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SKIPS = {
    "by a mark": "import pytest\n@pytest.mark.skip(reason='no luck')\ndef test_it(): ...\n",
    "in the test": "import pytest\ndef test_it(): pytest.skip('no luck')\n",
    "in a fixture": "import pytest\n@pytest.fixture\ndef f(): pytest.skip('no luck')\ndef test_it(f): ...\n",
    "as a module": "import pytest\npytest.importorskip('a_module_that_is_not_there', reason='no luck')\n",
}
XFAIL = "import pytest\n@pytest.mark.xfail\ndef test_it(): raise ValueError\n"


def run(folder: Path, tests: dict[str, str], ci: str) -> tuple[int, str]:
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    for index, text in enumerate(tests.values()):
        (folder / f"test_{index}.py").write_text(text, encoding="utf-8")
    options = ["-q", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *options, str(folder)]
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, "CI": ci}, capture_output=True, text=True, check=False
    )
    return ended.returncode, ended.stdout


@pytest.mark.parametrize(("ci", "expected"), [("true", "1 failed, 1 xfailed, 3 errors"), ("", "4 skipped, 1 xfailed")])
def test_skips_fail_in_ci(tmp_path: Path, ci: str, expected: str) -> None:
    """With CI=true every kind of skip is a failure that tells the reason; elsewhere it stays a skip."""
    code, said = run(tmp_path, {**SKIPS, "expected": XFAIL}, ci)
    assert expected in said
    assert (code != 0) == (ci == "true")
    if ci:
        assert said.count("no luck") >= len(SKIPS)
