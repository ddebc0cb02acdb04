"""The command ``kvbelay demo``."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import msgspec

from kvbelay.errors import CacheFull, ConfigError, DeadlineExceeded, MissingExtra, PeerLost

try:
    from rich.console import Console
except ModuleNotFoundError as missing:
    raise MissingExtra("the demo needs rich", remedy="install the extra: pip install 'kvbelay[demo]'") from missing

from kvbelay.cli.demo.messages import Prompt
from kvbelay.cli.demo.prompts import PROMPTS, read_prompts
from kvbelay.cli.demo.report import Summary, show
from kvbelay.cli.demo.script import Level, script, strikes
from kvbelay.cli.demo.show import Row, Show, Verdict
from kvbelay.cli.demo.stage import Stage
from kvbelay.reference import Engine, Model, PagedCache, load_model

BLOCKS = 256
"""Blocks of each process's KV cache."""
MAX_NEW = 16
"""Most tokens of an answer."""

WIDTH = 110
"""Columns of the report where the output is no terminal."""

EPILOG = """\b
Examples:
  kvbelay demo                              the real model, one fault of each kind
  kvbelay demo --faults none                nothing strikes: nothing is recomputed
  kvbelay demo --model tiny --faults storm --requests 200 --seed 7
"""


@click.command(epilog=EPILOG)
@click.option("--model", default="smollm2", show_default=True, help="smollm2, tiny, or a GGUF file.")
@click.option("--faults", type=click.Choice([level.value for level in Level]), default="default", show_default=True)
@click.option("--requests", type=click.IntRange(1, 10_000), default=12, show_default=True, help="How many prompts.")
@click.option("--prompts", type=click.Path(path_type=Path), help="A text file, one prompt a line, instead of ours.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of everything random.")
@click.option(
    "--near", help="Address of the direct child: unix:///path or tcp://127.0.0.1:port. [default: a new socket]"
)
@click.option("--store", type=click.Path(path_type=Path), help="Directory of the store; without it a temporary one.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write the whole record there.")
def demo(  # noqa: PLR0917  # click passes options by name
    model: str,
    faults: str,
    requests: int,
    prompts: Path | None,
    seed: int,
    near: str | None,
    store: Path | None,
    json_path: Path | None,
) -> None:
    """Move a model's KV cache from a prefill to a decode process while faults strike.

    Every answer is compared with the one that the same model gives without any transfer. The exit code is 0 only if
    all answers are there and identical.
    """
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    began = time.monotonic()
    texts = read_prompts(prompts) if prompts is not None else PROMPTS
    if json_path is not None:
        _require_writable(json_path)
    with Stage(model=model, near=near, store=store, blocks=BLOCKS, seed=seed) as stage:
        with console.status("Loading the model ..."):
            oracle = load_model(model, stage.weights)
        jobs = [
            Prompt(f"r{index:02}", tuple(oracle.tokenizer.chat(texts[index % len(texts)])), MAX_NEW)
            for index in range(requests)
        ]
        _require_room(jobs, oracle)
        summary = Summary(model, faults, seed, [], {}, 0, 0, 0.0)
        _run(stage, oracle, jobs, summary, console)
        summary.peak_nbytes = stage.peak_nbytes
    summary.took_s = time.monotonic() - began
    show(summary, console)
    if json_path is not None:
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(summary.to_builtins())))
    if not summary.good:
        raise click.exceptions.Exit(1)


def _run(stage: Stage, oracle: Model, jobs: list[Prompt], summary: Summary, console: Console) -> None:
    """Perform every act, and compare each answer with the oracle's."""
    level = Level(summary.faults)
    cache = PagedCache(oracle.config, BLOCKS)
    engine = Engine(oracle, cache)
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    acts = script(level, len(jobs), stage.setup.seed)
    setup = msgspec.structs.replace(stage.setup, strikes=strikes(level, acts, [job.id for job in jobs]))
    with ThreadPoolExecutor(1) as alone, console.status("Starting a prefill and a decode process ...") as status:
        performance = Show(stage, setup, console.print)
        for number, (job, act) in enumerate(zip(jobs, acts, strict=True), start=1):
            status.update(f"Request {number} of {len(jobs)} ...")
            row = Row(job.id, oracle.tokenizer.decode(job.tokens), [], movable=cache.transferable(len(job.tokens)))
            summary.rows.append(row)
            expected = alone.submit(_alone, engine, cache, job, known)
            try:
                tokens = performance.perform(row, act, job)
            except (PeerLost, DeadlineExceeded) as exc:
                console.print(f"[bold red]{exc}[/]")
                summary.rows.extend(Row(lost.id, "", []) for lost in jobs[number:])
                return
            row.answer = oracle.tokenizer.decode(tokens)
            row.verdict = Verdict.IDENTICAL if tokens == expected.result() else Verdict.WRONG
            console.print(f"{job.id}  {row.decided}: [dim]{row.answer.strip()[:80]!r}[/dim]")
        performance.close()
    summary.swallowed, summary.pending = performance.swallowed, performance.pending


def _alone(
    engine: Engine, cache: PagedCache, job: Prompt, known: dict[tuple[int, ...], tuple[int, ...]]
) -> tuple[int, ...]:
    """The answer without disaggregation; a prompt that was asked before is not computed again."""
    if job.tokens not in known:
        table = cache.allocate(len(job.tokens) + job.max_new)
        known[job.tokens] = tuple(engine.generate(job.tokens, job.max_new, table).tokens)
        cache.free(table)
    return known[job.tokens]


def _require_room(jobs: list[Prompt], model: Model) -> None:
    cache = PagedCache(model.config, BLOCKS)
    room = min(BLOCKS * cache.block_tokens, model.config.context)
    for job in jobs:
        if len(job.tokens) + job.max_new > room:
            length = f"{len(job.tokens)} tokens, and up to {job.max_new} of the answer"
            msg = f"prompt {job.id} does not fit: {length}; the cache holds {room}"
            raise CacheFull(msg, remedy="shorten the prompt")


def _require_writable(path: Path) -> None:
    try:
        path.open("ab").close()
    except OSError as exc:
        msg = f"cannot be written: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(path), remedy="name a file in a directory that exists and is yours") from exc
