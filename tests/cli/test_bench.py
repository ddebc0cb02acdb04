"""``kvbelay bench``: what it says and writes, when it fails, what it leaves. No measured figure is asserted."""

from __future__ import annotations

import json
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvbelay.cli import main as entry
from kvbelay.cli.bench import guard, judged, ledger, show, transfer
from kvbelay.cli.bench.bars import Bar, held, ratio, sentence
from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.command import bench
from kvbelay.cli.bench.figures import Measured as Guarded
from kvbelay.cli.bench.figures import Pair, Worn
from kvbelay.cli.bench.figures import Row as GuardRow
from kvbelay.cli.bench.ledger import Row
from kvbelay.cli.bench.ledger_worker import Setup
from kvbelay.cli.bench.paths import Reading
from kvbelay.cli.bench.report import Machine
from kvbelay.cli.bench.scatter import Memory
from kvbelay.cli.bench.traffic import Burst, Traffic
from kvbelay.cli.bench.transfer import KIB, MIB, Killed, Layer, Measured, Size, Timed
from kvbelay.core.model import BatchResult, Ticket, TransferBatch
from kvbelay.errors import CorruptData, KvbelayError, PeerLost

from .conftest import Started

EVENTS = 1000


def run(*arguments: str) -> Result:
    return CliRunner().invoke(bench, arguments)


def row(live: int, event_us: float, nbytes_each: float = 700.0) -> Row:
    burst = Burst(event_us * EVENTS / 1e6, 0.001, begins=400, reports=500, expired=100, told=400)
    return Row(live, nbytes_each, [burst] * 3)


def measured(
    *,
    memory: float = 0.7,
    stream: float = 0.7,
    bare: float = 0.9,
    tcp: float = 0.8,
    rival_s: float = 0.03,
    killed_s: float = 0.01,
) -> Measured:
    """Every piece size alike: ``memory``, ``stream`` and ``bare`` are shares of memcpy, ``tcp`` one of iperf3."""
    sizes = [
        Size(
            piece,
            64 * MIB,
            [0.01] * 3,
            [0.005] * 3,
            [
                Timed("memory", [0.01] * 3, [0.01 / memory] * 3),
                Timed("stream, unix", [0.002] * 3, [0.01 / stream - 0.002] * 3),
                Timed("stream, unix, no digests", [0.0] * 3, [0.01 / bare] * 3),
                Timed("stream, tcp", [0.002] * 3, [0.064 / tcp] * 3),
                Timed("stream, tcp, no digests", [0.0] * 3, [0.06] * 3),
                Timed("raw nixl, no digests", [0.0] * 3, [rival_s] * 3),
            ],
        )
        for piece in transfer.PIECES
    ]
    layers = [Layer("memory", 64 * KIB, MIB, [0.001] * 3, [0.0012] * 3)]
    return Measured(
        sizes,
        [64 * MIB / 0.064] * 3,
        layers,
        [Killed("stream, unix", 128 * MIB, [killed_s] * 3), Killed("stream, unix", 1152 * MIB, [9.0] * 3)],
    )


@pytest.mark.parametrize(
    ("rows", "good"),
    [
        ([row(1000, 10.0), row(1_000_000, 12.9)], True),
        ([row(1000, 10.0), row(1_000_000, 13.1)], False),
        ([row(1000, 10.0), row(1_000_000, 10.0, nbytes_each=1025)], False),
        ([row(1000, 10.0, nbytes_each=1025), row(1_000_000, 10.0)], False),
        ([row(1000, 99.0)], True),
    ],
    ids=["within", "too slow", "too heavy", "too heavy when few", "one number has no ratio"],
)
@pytest.mark.parametrize("check", [True, False])
def test_ledger_exit_code(
    rows: list[Row], good: bool, check: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With --check a missed bar is exit code 1; without, it is only said."""
    monkeypatch.setattr(ledger, "measure", lambda *_: rows)
    record = tmp_path / "ledger.json"
    result = run("ledger", "--json", str(record), *(["--check"] if check else []))
    assert result.exit_code == int(check and not good)
    assert ("are missed" in result.output) is not good
    assert json.loads(record.read_bytes())["good"] is good


@pytest.mark.parametrize(
    ("figures", "good"),
    [
        ({}, True),
        ({"stream": 0.59}, False),
        ({"bare": 0.84}, False),
        ({"memory": 0.59}, False),
        ({"tcp": 0.74}, False),
        ({"rival_s": 0.0001}, False),
        ({"killed_s": 0.051}, False),
    ],
    ids=["within", "slow stream", "slow without digests", "slow memory", "slow tcp", "a faster rival", "slow to know"],
)
def test_transfer_exit_code(figures: dict[str, float], good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missed bar is exit code 1. One that waits for something is printed as short, and does not count."""
    monkeypatch.setattr(transfer, "measure", lambda *_: measured(**figures))
    result = run("transfer", "--check")
    assert result.exit_code == int(not good)
    assert "waits for word of its exit" in result.output


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_pictures(suffix: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--plot draws every way by name, and what the ledger costs."""
    monkeypatch.setattr(transfer, "measure", lambda *_: measured())
    monkeypatch.setattr(ledger, "measure", lambda *_: [row(1000, 10.0), row(1_000_000, 12.9)])
    for command in ("transfer", "ledger"):
        drawn = tmp_path / f"{command}.{suffix}"
        assert run(command, "--plot", str(drawn)).exit_code == 0
        assert drawn.stat().st_size > 5_000
    if suffix == "svg":
        text = (tmp_path / "transfer.svg").read_text()
        assert all(f"<!-- {way.name} -->" in text for way in measured().sizes[0].ways)


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize(
    ("name", "what"), [("drawn.gif", "let its name end with"), ("drawn.svg", r"pip install 'kvbelay\[plot\]'")]
)
def test_no_picture(
    name: str, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """What cannot be drawn is said before anything is measured, with what to do."""
    monkeypatch.setattr(transfer, "measure", lambda *_: pytest.fail("it began all the same"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(sys, "argv", ["kvbelay", "bench", "transfer", "--plot", str(tmp_path / name)])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert re.search(what, capsys.readouterr().err)


def guarded(*, layers: float = 0.9, whole: float = 1.2, worn: float = 1.0, kept: int = 0) -> Guarded:
    """The stock class takes 10 us for everything; the others are ratios to that."""
    pairs = {name: Pair([1e-5] * 3, [share * 1e-5] * 3) for name, share in (("layers", layers), ("whole", whole))}
    rest = {name: Pair([1e-5] * 3, [9e-5] * 3) for name in ("step", "load", "save")}
    rows = [GuardRow(children, 256, **pairs, **rest) for children in (1, 3)]
    return Guarded("0.32.0", 32, rows, Worn(20_000, [1e-5] * 3, [worn * 1e-5] * 3, kept))


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, ""),
        ({"layers": 1.01}, "hooks of 32 layers, 3 children"),
        ({"whole": 1.31}, "whole step, 3 children"),
        ({"worn": 1.11}, "step after 20,000"),
        ({"kept": 201}, "objects kept"),
    ],
    ids=["within", "slow layers", "slow step", "slower with time", "something is kept"],
)
def test_guard_exit_code(figures: dict[str, Any], missed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bar that is missed is named, and with --check it is exit code 1; the figures stand in the tables."""
    monkeypatch.setattr(guard, "measure", lambda *_: guarded(**figures))
    result = run("guard", "--check")
    assert result.exit_code == int(bool(missed))
    assert missed in result.output.splitlines()[-1]
    assert ("are missed" in result.output) is bool(missed)
    row = next(line.split() for line in result.output.splitlines() if "1 child, 256 running, no layers" in line)
    assert row[-4:] == ["10.0", "90.0", "9.00", "80.0"]


@pytest.mark.usefixtures("signals")
def test_guard_without_vllm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where vLLM is not installed that is said in one sentence, with what to do, and the exit code is 2."""
    monkeypatch.setattr(guard, "find_spec", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["kvbelay", "bench", "guard", "--check"])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "vLLM is not installed; install vllm" in said


@pytest.mark.parametrize("arguments", [("--rounds", "3"), ("--seed", "-1"), ("--seed", "x"), ("now",)])
def test_guard_arguments(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the command does not understand is exit code 2, before vLLM is imported."""
    monkeypatch.setattr(guard, "measure", lambda *_: pytest.fail("it began all the same"))
    result = run("guard", *arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_bars_are_limits() -> None:
    """A bar is met at its limit, from the side that it names."""
    assert Bar("", 1.0, 1.0).met
    assert Bar("", 1.0, 1.0, at_most=False).met
    assert not Bar("", 1.01, 1.0).met
    assert not Bar("", 0.99, 1.0, at_most=False).met
    assert held([Bar("", 2.0, 1.0, waits_for="something")])
    assert not held([Bar("", 0.0, 1.0), Bar("", 2.0, 1.0)])
    assert sentence([Bar("speed", 2.0, 1.0)], took_s=1.0).startswith("1 of 1 bars that count are missed: speed.")


def test_a_busy_machine_is_said() -> None:
    """Figures that others have spoilt come with a warning, and no others do."""
    assert "load 1.5 on 2 cores" in Machine("3.11", "x86_64", 2, 1.5).warning
    assert not Machine("3.11", "x86_64", 4, 1.5).warning


def test_ratio_is_of_the_same_round() -> None:
    """A round in which the whole machine was slow does not change a ratio."""
    assert ratio([1.0, 10.0, 1.0], [2.0, 20.0, 2.0]) == 0.5
    with pytest.raises(ValueError, match="argument"):
        ratio([1.0], [1.0, 2.0])


def test_ledger_for_real(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A tiny run with processes of its own: every number of live requests has its figures, in table and record."""
    for name, value in (("ROUNDS", 2), ("STEPS", 200), ("WEIGHED", 20_000)):
        monkeypatch.setattr(ledger, name, value)
    record = tmp_path / "ledger.json"
    result = run("ledger", "--live", "300,100,300", "--seed", "3", "--json", str(record))
    assert result.exit_code == 0, result.output
    assert "us an event" in result.stdout
    assert "full collection" in result.stdout
    assert "filling a ledger with 300" in result.stderr
    written = json.loads(record.read_bytes())
    assert {"bench", "seed", "machine", "took_s", "measured", "bars", "good"} <= written.keys()
    assert {"python", "machine", "cores", "load"} == written["machine"].keys()
    assert (written["bench"], written["seed"]) == ("ledger", 3)
    assert [one["live"] for one in written["measured"]] == [100, 300]
    for one in written["measured"]:
        assert one["nbytes_each"] > 0
        assert len(one["bursts"]) == 2
        assert one["collect_s"] > 0
        for burst in one["bursts"]:
            assert burst["reports"] >= 200
            assert burst["spent_s"] >= burst["slowest_s"] > 0
    assert {"what", "measured", "limit", "met"} <= written["bars"][0].keys()


@pytest.fixture
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """32 MiB: more than the sockets' buffers hold, so that a source killed midway still owes most of it."""
    for name, value in (
        ("PIECES", (64 * KIB,)),
        ("BATCH", 32 * MIB),
        ("LARGE", 64 * MIB),
        ("ROUNDS", 1),
        ("LARGE_ROUNDS", 1),
        ("KILLS", 1),
        ("BALLAST", (0,)),
    ):
        monkeypatch.setattr(transfer, name, value)


@pytest.mark.usefixtures("_tiny")
def test_transfer_for_real(tmp_path: Path) -> None:
    """A small run: every way moves its bytes, verified; killed sources are noticed; all of it is in the record."""
    record = tmp_path / "transfer.json"
    result = run("transfer", "--json", str(record))
    assert result.exit_code == 0, result.output
    found = json.loads(record.read_bytes())["measured"]
    size, large = found["sizes"]
    names = [way["name"] for way in size["ways"]]
    streams = ["stream, unix", "stream, tcp", "stream, unix, no digests", "stream, tcp, no digests"]
    assert names[0] == "memory"
    assert [name for name in names if name.startswith("stream")] == streams
    assert [way["name"] for way in large["ways"]][:4] == streams
    assert any(name.startswith("file, ") for name in names)
    assert all(len(way[key]) == 1 and way[key][0] > 0 for way in size["ways"] for key in ("put_s", "get_s"))
    assert size["memcpy_s"][0] > 0
    assert size["digest_s"][0] > 0
    assert {layer["name"] for layer in found["layers"]} == {"memory", "stream, unix"}
    assert [(killed["name"], len(killed["known_s"])) for killed in found["killed"]] == [
        ("stream, unix", 1),
        ("stream, tcp", 1),
    ]
    for name in (*names, "Belay.load", "killed in mid-batch"):
        assert name in result.stdout


class Liar(Reading):
    """A way whose gets say that they went well, and bring nothing."""

    name = "liar"

    def __init__(self, memory: Memory, digest: bytes | None) -> None:
        self.connector: Any = _Connector(digest)
        self._memory = memory
        self._digest = digest

    def put(self, piece_nbytes: int, nbytes: int) -> tuple[Ticket, float]:
        batch = self._memory.batch(piece_nbytes, nbytes)
        return Ticket("liar", batch.id, "", 0, nbytes, self._digest), 0.001


class _Connector:
    def __init__(self, digest: bytes | None) -> None:
        self._digest = digest

    def get(self, _batch: TransferBatch, ticket: Ticket, _within: object) -> BatchResult:
        return BatchResult(ticket.nbytes, b"good", self._digest)

    def release(self, _ticket: Ticket, _within: object) -> None:
        pass


@pytest.mark.parametrize(("digest", "what"), [(b"good", "not what was sent"), (b"bad", "came back with")])
def test_a_way_that_brings_nothing_is_found_out(digest: bytes, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bench looks at the bytes themselves once, and at both digests each time."""
    monkeypatch.setattr(transfer, "BATCH", MIB)
    memory, landing = Memory(MIB, 0), Memory(MIB, 1)
    memory.fill()
    size = Size(64 * KIB, MIB, ways=[Timed("liar")])
    with pytest.raises(CorruptData, match=what):
        transfer._size([Liar(memory, digest)], memory, landing, size, rounds=1, note=print)


@pytest.mark.usefixtures("_tiny")
def test_a_source_killed_too_late_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the whole batch has arrived before the strike, the bench says so instead of printing a figure."""
    monkeypatch.setattr(transfer, "BATCH", 64 * KIB)
    monkeypatch.setattr(transfer, "MIDWAY", 10_000)
    with pytest.raises(KvbelayError, match="killed too late"):
        transfer._killed("stream, tcp", "tcp://127.0.0.1:0", 0, 0, print)


def test_memory_is_scattered() -> None:
    """Pieces lie inside their region, none twice, not in order; two memories of one seed hold the same batch."""
    first, second, other = Memory(MIB, 5), Memory(MIB, 5), Memory(MIB, 6)
    for memory in (first, second, other):
        memory.fill()
    contents = []
    for memory in (first, second, other):
        (span,) = memory.batch(16 * KIB, MIB).spans
        assert len(set(span.offsets)) == 64
        assert all(offset % (16 * KIB) == 0 and offset + span.nbytes <= len(span.region) for offset in span.offsets)
        assert list(span.offsets) != sorted(span.offsets)
        contents.append([bytes(span.region[offset : offset + span.nbytes]) for offset in span.offsets])
    assert contents[0] == contents[1] != contents[2]


def test_traffic_keeps_as_many_alive() -> None:
    """Requests come as they go, attempts fail, time out and are tried again, and a seed gives the same again."""
    bursts = []
    for _ in range(2):
        traffic = Traffic(500, seed=1)
        traffic.fill()
        traffic.settle()
        assert len(traffic) == 500
        bursts.append(traffic.burst(5_000))
        assert 400 <= len(traffic) <= 500
    counts = [(burst.begins, burst.reports, burst.expired, burst.told) for burst in bursts]
    assert counts[0] == counts[1]
    burst = bursts[0]
    assert burst.begins == pytest.approx(burst.told, abs=100)
    assert burst.reports >= 5_000
    assert burst.expired > 250
    assert burst.events == sum(counts[0][:3])


def test_traffic_is_the_same_work_at_any_size() -> None:
    """With few and with many live requests the same shares of events begin, report and expire."""
    shares = []
    for live in (300, 5_000):
        traffic = Traffic(live, seed=2)
        traffic.fill()
        traffic.settle()
        traffic.burst(1_000)
        burst = traffic.burst(5_000)
        shares.append([count / burst.events for count in (burst.begins, burst.reports, burst.expired)])
    assert shares[0] == pytest.approx(shares[1], abs=0.03)


@pytest.mark.parametrize("live", ["", "x", "0", "1000,-1", "1e3", "99999999999"])
def test_bad_numbers(live: str) -> None:
    """What is no list of numbers of requests is refused before anything starts."""
    result = run("ledger", "--live", live)
    assert result.exit_code == 2
    assert "--live" in result.output


@pytest.mark.usefixtures("signals")
@pytest.mark.parametrize("which", ["guard", "ledger", "transfer"])
def test_unwritable_record(
    which: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that cannot be written is exit code 2 and a sentence, before a minute is spent."""
    monkeypatch.setattr(sys, "argv", ["kvbelay", "bench", which, "--json", str(tmp_path / "no" / "where.json")])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert "where.json" in capsys.readouterr().err


def test_help() -> None:
    """All have examples; guard says what it does not measure."""
    for which in ("guard", "ledger", "transfer"):
        assert which in run("--help").output
        text = run(which, "--help").output
        assert "Examples:" in text
        assert ("Not measured" in text) is (which == "guard")


def test_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without rich the tables are aligned lines."""
    monkeypatch.setattr(show, "RICH", False)
    for table in judged.tables(measured()):
        show.show(table)
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("memory, 1 MiB"))
    assert len(lines[at]) == len(lines[at - 1]) == len(lines[at - 2])


def test_a_child_that_died_is_named() -> None:
    """A process that ends before it has answered is an error with its name and exit code."""
    with Child("ledger_worker", Setup(10, 10, 0)) as child:
        child.kill()
        with pytest.raises(PeerLost, match="'ledger_worker' ended, with exit code -9"):
            child.ask({}, object)


@pytest.mark.parametrize("arguments", [("ledger", "--live", "50000"), ("transfer",)], ids=["ledger", "transfer"])
def test_ctrl_c_leaves_nothing(start: Callable[..., Started], arguments: tuple[str, ...]) -> None:
    """Interrupted, it ends its processes, removes its directories, and says so."""
    bench = start("bench", *arguments)
    bench.wait_for(lambda: len(bench.alive()) > 1)
    bench.process.send_signal(signal.SIGINT)
    _, said = bench.end()
    assert bench.process.returncode == 130
    assert "Interrupted" in said
    assert "Traceback" not in said
    assert bench.alive() == {}
    assert list(bench.place.iterdir()) == []
