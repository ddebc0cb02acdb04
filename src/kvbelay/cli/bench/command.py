"""The commands ``kvbelay bench ledger``, ``transfer``, ``guard``, ``verify``, ``router`` and ``doctor``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click

from kvbelay.cli.bench import doctor, guard, judged, ledger, plot, transfer, verify
from kvbelay.cli.bench.report import Record, report, this_machine
from kvbelay.cli.route.run import require_extra
from kvbelay.errors import ConfigError

MOST_LIVE = 10_000_000
A_FILE = click.Path(path_type=Path)

LEDGER_EPILOG = """\b
Examples:
  kvbelay bench ledger --check
  kvbelay bench ledger --live 1000,50000 --json ledger.json --plot ledger.svg
"""
TRANSFER_EPILOG = """\b
Examples:
  kvbelay bench transfer
  kvbelay bench transfer --check --json transfer.json --plot transfer.svg --seed 7

iperf3 (Debian's package), NIXL and Mooncake are measured where they are installed; their bars count then. No
connector can be told to skip its digests: the rows "no digests" are stream's with the digest taken out by this bench,
and say what verification costs.
"""

GUARD_EPILOG = """\b
Examples:
  kvbelay bench guard --check
  kvbelay bench guard --json guard.json --seed 7

Not measured: what the step's metadata weighs on its way between the scheduler's process and the workers'.
"""
VERIFY_EPILOG = """\b
Examples:
  kvbelay bench verify
  kvbelay bench verify --model HuggingFaceTB/SmolLM2-135M-Instruct --check
  kvbelay bench verify --model ./model --json verify.json --seed 7
  kvbelay bench verify --model ./tiny --loads 10000 --check
"""

ROUTER_EPILOG = """\b
Examples:
  kvbelay bench router
  kvbelay bench router --check --json router.json

nginx (Debian's package nginx-light is enough) is measured where it is installed. The engines behind both are the same
and compute nothing. Nothing here is random.
"""

DOCTOR_EPILOG = """\b
Examples:
  kvbelay bench doctor --check
  kvbelay bench doctor --megabytes 2000 --json doctor.json --seed 7
"""


def common(command: Any) -> Any:
    """The options that all benches have."""
    check = click.option("--check", is_flag=True, help="Exit with code 1 if a bar that counts is missed.")
    json = click.option("--json", "json_path", type=A_FILE, help="Write everything that was measured there.")
    seed = click.option(
        "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Of everything that is random."
    )
    return check(json(seed(command)))


def picture(command: Any) -> Any:
    """The option of those that can draw."""
    return click.option("--plot", "plot_path", type=A_FILE, help="Draw it there: .svg, .png or .pdf.")(command)


def numbers(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[int, ...]:
    """Decode ``--live``."""
    try:
        found = tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        msg = f"{text!r} is not a list of numbers such as 1000,100000"
        raise click.BadParameter(msg) from exc
    if not all(0 < number <= MOST_LIVE for number in found):
        msg = f"each must be from 1 to {MOST_LIVE}"
        raise click.BadParameter(msg)
    return found


@click.group()
def bench() -> None:
    """Measure what it costs, as ratios within one run.

    Absolute figures are those of this machine, at this moment; the bars are ratios wherever they can be.
    """


@bench.command("ledger", epilog=LEDGER_EPILOG)
@common
@picture
@click.option(
    "--live",
    callback=numbers,
    default=",".join(map(str, ledger.LIVE)),
    show_default=True,
    help="Numbers of live requests, with commas.",
)
def bench_ledger(
    *, check: bool, json_path: Path | None, plot_path: Path | None, seed: int, live: tuple[int, ...]
) -> None:
    """What the ledger, which decides for all requests of an engine, costs.

    For each number of live requests a process of its own holds a ledger with that many transfers under way, in
    simulated time: requests begin, any of those that wait hear of their attempt next (one in ten has failed, and is
    tried again), some time out, and each outcome is told. Printed are the bytes of a live request (the growth of the
    process's resident set); the processor time of an event, the median of interleaved rounds; the slowest 50 reports
    in a row, in which a pause of any kind shows; and a full run of the garbage collector, which comes rarely. Takes
    about a minute and 1 GiB.
    """
    began, machine = time.monotonic(), this_machine()
    _require_writable(json_path, plot_path)
    rows = ledger.measure(live, seed, _note)
    if plot_path is not None:
        plot.ledgers(rows, plot_path)
    record = Record("ledger", seed, machine, time.monotonic() - began, rows, ledger.bars(rows))
    report(record, [ledger.table(rows)], json_path, check=check)


@bench.command("transfer", epilog=TRANSFER_EPILOG)
@common
@picture
def bench_transfer(*, check: bool, json_path: Path | None, plot_path: Path | None, seed: int) -> None:
    """What moving a batch costs, against one thread's memcpy of the same scattered pieces.

    Batches of 64 MiB in pieces of several sizes, scattered on both sides, go through memory, stream (unix and TCP, the
    source being another process) and file (in /dev/shm and in the directory for temporary files). Every transfer is
    verified: put makes the source's digest, get the one of what landed. What a transfer through Belay adds to the bare
    connector's get is measured with the same batch; and how long after its source was killed in mid-batch a get
    raises. Medians of interleaved rounds. Takes one to two minutes and some
    5 GiB, 9 with NIXL and Mooncake.
    """
    began, machine = time.monotonic(), this_machine()
    _require_writable(json_path, plot_path)
    measured = transfer.measure(seed, _note)
    if plot_path is not None:
        plot.transfers(measured, plot_path)
    record = Record("transfer", seed, machine, time.monotonic() - began, measured, judged.bars(measured))
    report(record, judged.tables(measured), json_path, check=check)


@bench.command("guard", epilog=GUARD_EPILOG)
@common
def bench_guard(*, check: bool, json_path: Path | None, seed: int) -> None:
    """What the guard for vLLM costs, against vLLM's own multi connector.

    Both hold the same children, which override every hook and do nothing in it. A real scheduler makes the step's
    output; then all hooks of the scheduler and of a worker are called as the engine calls them, by both in turn, in
    one process: with 1 and 3 children, 1, 32 and 256 running requests, without and with the hooks of 32 layers.
    Printed are the processor time of a step, the ratio, and what the guard adds; what an asynchronous load and save
    cost beyond their steps; and whether anything has grown when 20,000 requests with transfers have ended. Needs
    vLLM, whose own work is not in the figures. Takes half a minute.
    """
    began, machine = time.monotonic(), this_machine()
    _require_writable(json_path)
    measured = guard.measure(seed, _note)
    record = Record("guard", seed, machine, time.monotonic() - began, measured, guard.bars(measured))
    report(record, guard.tables(measured), json_path, check=check)


@bench.command("verify", epilog=VERIFY_EPILOG)
@common
@click.option("--model", help="What the servers take: a folder, or a name of the hub. Small, or it takes long.")
@click.option(
    "--loads",
    type=click.IntRange(0),
    default=0,
    help="Instead of the pair's times: so many healthy loads, none of which may be found wrong.",
)
def bench_verify(*, check: bool, json_path: Path | None, seed: int, model: str | None, loads: int) -> None:
    """What verification costs: the digests of KV blocks, and what they add to a pair of engines.

    Blocks that lie as vLLM's attention backends lay them, scattered in caches larger than what a processor keeps, are
    hashed and copied in turn, on one thread: printed are both throughputs, by processor time, their ratio, and the
    longest piece of work between two points where hashing can pause. Needs vLLM, and 1.5 GiB. Takes some seconds.

    With --model, two pairs of vLLM servers whose KV moves by NIXL run in turn, one of them with verification and the
    link: printed are the latency of a first token, from the prefill request on; the time between two tokens of a stream
    while others' KV is loaded; and how soon the decode side decides when the prefill server is killed. Takes some ten
    minutes, and 12 GiB for a model of 135 million parameters; written for machines where the servers share processors.

    With --loads, one pair that verifies loads prompts of every length, sixteen at once, half of them with prefix
    caching and half without. It takes any model, also one with random weights.
    """
    began, machine = time.monotonic(), this_machine()
    _require_writable(json_path)
    if loads and model is None:
        raise ConfigError("loads need servers, and no model was named", field="--loads", remedy="name one with --model")
    measured = verify.measure(seed, model, loads, _note)
    if model is None:
        _note("only digests: a pair of engines is measured with --model, of a folder or a name of the hub")
    record = Record("verify", seed, machine, time.monotonic() - began, measured, verify.bars(measured))
    report(record, verify.tables(measured), json_path, check=check)


@bench.command("router", epilog=ROUTER_EPILOG)
@common
def bench_router(*, check: bool, json_path: Path | None, seed: int) -> None:
    """What the router adds to a request, against no router and against nginx as a plain reverse proxy.

    Small answers, first one after another on one connection, then 32 at once: straight to an engine, through nginx,
    through the router to a decode engine alone, and through the router to a prefill and a decode engine. Requests a
    second of a core are those of the processor time that the router's (nginx') process has used, in the least disturbed
    round. Then the router's memory: over 10,000 requests and with 200 streams open, or, with
    --check, over 100,000 and with 1,000. Takes a quarter of a minute, with --check some two minutes.
    """
    from kvbelay.cli.bench.routed import measure  # noqa: PLC0415  # its processes need the extra

    began, machine = time.monotonic(), this_machine()
    _require_writable(json_path)
    require_extra("kvbelay bench router")
    measured = measure.measure(measure.WHOLE if check else measure.QUICK, _note)
    record = Record("router", seed, machine, time.monotonic() - began, measured, measure.bars(measured))
    report(record, measure.tables(measured), json_path, check=check)


@bench.command("doctor", epilog=DOCTOR_EPILOG)
@common
@click.option("--megabytes", type=click.IntRange(1, 100_000), default=300, show_default=True, help="Of a pair of logs.")
def bench_doctor(*, check: bool, json_path: Path | None, seed: int, megabytes: int) -> None:
    """How fast the doctor reads logs, and in how much memory.

    Logs of a prefill and a decode engine are made from the seed: healthy ones, and ones in which some lines tell of
    failures. They are read as `kvbelay doctor --log P --log D` reads them, by a fresh process a round; speed is counted
    in processor time, of which reading takes one thread's. Takes a minute, and that much space for temporary files.
    """
    began, machine = time.monotonic(), this_machine()
    _require_writable(json_path)
    rows = doctor.measure(megabytes, seed, _note)
    record = Record("doctor", seed, machine, time.monotonic() - began, rows, doctor.bars(rows))
    report(record, [doctor.table(rows)], json_path, check=check)


def _note(text: str) -> None:
    click.echo(f"... {text}", err=True)


def _require_writable(json_path: Path | None, plot_path: Path | None = None) -> None:
    if plot_path is not None:
        plot.require(plot_path)
    for path in (json_path, plot_path):
        if path is None:
            continue
        try:
            path.open("ab").close()
        except OSError as exc:
            msg = f"cannot be written: {exc.strerror or exc}"
            remedy = "name a file in a directory that exists and is yours"
            raise ConfigError(msg, source=str(path), remedy=remedy) from exc
