"""``kvbelay conform``: a verdict, an exit code that says it, and one sentence where the kit cannot be run."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbelay.cli.conform import command
from kvbelay.cli.main import main
from kvbelay.testing.conformance import capabilities

MEMORY = ("conform", "memory", "--capability", "CopiesOut", "--config", '{"store": "{scratch}"}')
FEW = ("-k", "probe", "-k", "read_again")
MINE = """
import time
import pytest
from kvbelay.connectors.memory import BACKEND, MemoryBackend, MemoryConfig
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.testing import ConnectorConformance, CopiesOut

class Lossy(Wrapper):
    def get(self, batch, ticket, within):
        super().get(batch, ticket, within)

class LossyBackend(MemoryBackend):
    def open(self, config, *, child, fingerprint):
        return Lossy(super().open(config, child=child, fingerprint=fingerprint))

LOSSY = LossyBackend()

class TestMine(CopiesOut, ConnectorConformance):
    def open_source(self, scratch, fingerprint):
        return BACKEND.open(MemoryConfig(store=str(scratch)), child=self.child, fingerprint=fingerprint)

class Away(TestMine):
    def open_source(self, scratch, fingerprint):
        pytest.skip("no such service")

class Down(TestMine):
    def open_source(self, scratch, fingerprint):
        raise ConnectionRefusedError("nobody there")

class Leaves(TestMine):
    def open_source(self, scratch, fingerprint):
        raise SystemExit(0)

class Slow(TestMine):
    def open_source(self, scratch, fingerprint):
        (scratch / "held").touch()
        return super().open_source(scratch, fingerprint)
    def bench(self):
        print("ready", flush=True)
        return super().bench()
    def open_reader(self, scratch, fingerprint):
        connector = super().open_reader(scratch, fingerprint)
        inner = connector.get
        def get(*arguments):
            time.sleep(5)
            return inner(*arguments)
        connector.get = get
        return connector

def function():
    return TestMine()

def wrong():
    return 3

NUMBER = 3
"""


class Ended(NamedTuple):
    code: int
    said: str
    errors: str


Run = Callable[..., Ended]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    signals: None,  # noqa: ARG001  # puts the handlers back
    tmp_path: Path,
) -> Iterator[Run]:
    """Calls ``kvbelay`` in a directory that has mine.py; nothing may be left in the one for temporary files."""
    temporary = tmp_path / "t"
    temporary.mkdir()
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def call(*arguments: str | Path) -> Ended:
        monkeypatch.setattr(sys, "argv", ["kvbelay", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        return Ended(int(caught.value.code or 0), *capsys.readouterr())

    yield call
    assert not list(temporary.iterdir())


@pytest.fixture
def refused(run: Run) -> Callable[..., str]:
    """The one sentence with which the command refuses: exit code 2, no traceback."""

    def call(*arguments: str | Path) -> str:
        ended = run("conform", *arguments)
        assert ended.code == 2
        assert "Traceback" not in ended.errors
        (sentence,) = re.findall(r"(?m)^Error: (.*)$", ended.errors)
        return str(sentence)

    return call


def test_conforms(run: Run) -> None:
    """A built-in connector, by its name: every invariant is held, what is not claimed is named, exit code 0."""
    ended = run(*MEMORY)
    assert ended.code == 0, ended.said + ended.errors
    assert re.match(r"memory: 26 checks in \d+\.\d s; kvbelay \S+, port version \d+, kit version \d+\n", ended.said)
    assert re.findall(r"(?m)^(I\d+) +held ", ended.said) == [f"I{number}" for number in range(1, 11)]
    assert re.findall(r"(?m)^     (\w+), \d checks, skipped: not claimed", ended.said) == [
        "Evicts",
        "GivesLeases",
        "CanFreeze",
        "HasPeer",
    ]
    assert ended.said.endswith("\nmemory conforms.\n")


def test_does_not_conform(run: Run) -> None:
    """A broken backend: exit code 1, the invariant, the check and the rule."""
    ended = run("conform", "mine:LOSSY", "--config", '{"store": "{scratch}"}', *FEW)
    assert ended.code == 1
    assert re.search(r"(?m)^I9 +BROKEN ", ended.said)
    assert "test_read_again: get returned None, neither a BatchResult nor Miss" in " ".join(ended.said.split())
    assert ended.said.endswith("\nmine:LOSSY does not conform: I9 broken.\n")


def test_one_place_for_all_checks_is_mentioned(run: Run) -> None:
    """Where a check fails, and the configuration gives all of them the same place, that is said."""
    ended = run("conform", "mine:LOSSY", *FEW)
    assert ended.code == 1
    assert ended.said.endswith("\nNothing in --config is {scratch}: checks may have found what others stored. "
                               "Give each a place of its own.\n")  # fmt: skip


@pytest.mark.parametrize("target", ["mine:TestMine", "mine:function"])
def test_case_of_the_kit(run: Run, target: str) -> None:
    """A class, or a function that gives a case, from the current directory; what was left out is no praise."""
    ended = run("conform", target, *FEW)
    assert ended.code == 0
    assert "Claimed: CopiesOut." in ended.said
    assert f"{target}: what was checked holds (24 checks were left out; not tested: I3, I4," in ended.said


def test_placeholders(run: Run, tmp_path: Path) -> None:
    """The kit chooses place, capacity and lease through the configuration; a file holds it as well as the command."""
    config = tmp_path / "config.json"
    config.write_text('{"path": "{scratch}/store", "capacity_nbytes": "{capacity_nbytes}"}', encoding="utf-8")
    keeps = ("--keeps", "store/*.kv1", "--keeps", "bounded/store/*.kv1")
    assert run("conform", "file", "--config", config, "--capability", "Evicts", *keeps, "-k", "evicted").code == 0
    source = '{"listen": "unix://{scratch}/s", "lease_s": "{lease_s}"}'
    sides = ("--config", source, "--reader", '{"peers": ["unix://{scratch}/s"]}')
    assert run("conform", "stream", *sides, "--capability", "GivesLeases", "-k", "lease_ends").code == 0


def test_record(run: Run, tmp_path: Path) -> None:
    """``--json`` writes the verdict with its versions, every check and every invariant."""
    path = tmp_path / "verdict.json"
    assert run("conform", "mine:LOSSY", *FEW, "--seed", "7", "--json", path).code == 1
    record = json.loads(path.read_text(encoding="utf-8"))
    assert (record["target"], record["conforms"], record["seed"]) == ("mine:LOSSY", False, 7)
    assert {record["port_version"], record["kit_version"]} <= {*range(1, 99)}
    by_id = {one["id"]: one for one in record["verdict"]["invariants"]}
    assert list(by_id) == [f"I{number}" for number in range(1, 11)]
    assert (by_id["I9"]["standing"], by_id["I8"]["standing"]) == ("BROKEN", "not tested")
    assert [one["check"] for one in record["verdict"]["checks"]] == ["test_probe", "test_read_again"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("memroy",), "there is no connector 'memroy'; did you mean 'memory'?"),
        (("not_there:X",), "there is no module 'not_there'; name one as module:attribute"),
        ((":X",), "there is no module ''"),
        (("mine:Nothing",), "connector 'mine:Nothing' of mine does not load: AttributeError"),
        (("mine:NUMBER",), "mine:NUMBER does not give a case of the kit: TypeError"),
        (("mine:wrong",), "mine:wrong gives 3, which is no case of the kit; name a Backend, or a class"),
        (("mine:Down",), "cannot be opened here: ConnectionRefusedError('nobody there')"),
        (("mine:Away",), "cannot be opened here: no such service"),
        (("mine:Leaves",), "cannot be opened here: it called sys.exit(0)"),
        (("mine:TestMine", "-k", "nowhere"), "no check of mine:TestMine has 'nowhere' in its name"),
        (("mine:TestMine", "--config", "{}"), "--config: is for a backend, and mine:TestMine is none"),
        (("mine:TestMine", "--capability", "Evicts"), "--capability: is for a backend"),
        (("memory", "--config", "{"), "--config: is no JSON object"),
        (("memory", "--config", "no.json"), "no.json: cannot be read: No such file or directory"),
        (("memory", "--config", "mine.py"), "mine.py: is no JSON object"),
        (("memory", "--config", '{"stor": "x"}'), "has no field 'stor'"),
        (("memory", "--capability", "CanFreeze"), "CanFreeze cannot be checked on a backend alone"),
        (("memory", "--capability", "Evicts"), 'Evicts cannot be checked: nothing in the configuration is "{capacity'),
        (("memory", "--capability", "Flies"), "'Flies' is not one of 'CopiesOut', 'Evicts'"),
        (("memory", "--seed", "-1"), "-1 is not in the range"),
        ((), "Missing argument 'TARGET'"),
    ],
)
def test_cannot_be_run(refused: Callable[..., str], arguments: tuple[str, ...], words: str) -> None:
    """Whatever is wrong with the command, the module or the backend: one sentence, exit code 2."""
    assert words in refused(*arguments)


def test_record_that_cannot_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    """The file is named."""
    sentence = refused("mine:TestMine", "-k", "probe", "--json", tmp_path / "none" / "record")
    assert "No such file or directory" in sentence
    assert "none/record" in sentence


def test_capabilities_are_the_kits() -> None:
    """The command knows the capabilities that the kit has; it names them itself, so that help needs no extra."""
    assert tuple(capabilities.CAPABILITIES) == command.CAPABILITIES


def test_wrapped_and_staged(run: Run) -> None:
    """A backend around another one is configured as a whole, and what cannot fence its writes is staged."""
    plan = {"strikes": [{"fault": "late write", "nth": 10**9}]}
    config = json.dumps({"connector": "memory", "config": {"store": "{scratch}"}, "plan": plan})
    ended = run(
        "conform", "faulty", "--config", config, "-k", "capabilities", "-k", "round_trip", "-k", "memory_is_ours"
    )
    assert ended.code == 0, ended.said + ended.errors
    assert re.search(r"(?m)^I6 +held ", ended.said)


def test_help_has_examples(run: Run) -> None:
    """Each option is explained, and there are commands to copy, each of which can be parsed."""
    ended = run("conform", "--help")
    assert ended.code == 0
    assert all(len(line) <= 88 for line in ended.said.splitlines())
    joined = re.sub(r"\\\n +", "", ended.said)
    examples = re.findall(r"(?m)^    kvbelay conform (.*)$", joined)
    assert len(examples) >= 4
    for options in examples:
        words = [word.strip("'") for word in re.findall(r"'[^']*'|\S+", options)]
        assert run("conform", *words, "--help").code == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted(start: Callable[..., Any], tmp_path: Path, number: signal.Signals) -> None:
    """A signal in the middle of a check that Hypothesis runs closes what is open, and leaves nothing."""
    (tmp_path / "mine.py").write_text(MINE, encoding="utf-8")
    started = start("conform", "mine:Slow", "-k", "round_trip", cwd=tmp_path)
    started.read_until("ready")
    started.wait_for(lambda: any(started.place.glob("kb*/held")))
    started.process.send_signal(number)
    said, errors = started.end()
    assert started.process.returncode == 128 + number
    assert "conforms" not in said
    assert errors.endswith("everything that was started has been ended.\n")
    assert "Traceback" not in errors
    assert not list(started.place.iterdir())


@pytest.mark.parametrize("module", ["hypothesis", "pytest"])
def test_extra_that_is_not_installed(module: str) -> None:
    """The command names what is missing and the extra; help needs none."""
    code = f"import sys; sys.modules[{module!r}] = None; from kvbelay.cli.main import main; main()"
    command = [sys.executable, "-c", code, "conform", "memory"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert re.fullmatch(
        rf"Error: the kit needs {module}; install the extra: pip install 'kvbelay\[testing\]'\n", ended.stderr
    )
    assert subprocess.run([*command, "--help"], capture_output=True, check=False).returncode == 0
