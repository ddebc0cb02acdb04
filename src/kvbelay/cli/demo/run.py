"""The demo, from its options to its report."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kvbelay.errors import CacheFull, ConfigError, KvbelayError, MissingExtra

try:
    from rich.console import Console
    from rich.text import Text
except ModuleNotFoundError as missing:
    raise MissingExtra("the demo needs rich", remedy="install the extra: pip install 'kvbelay[demo]'") from missing

from kvbelay.cli.demo.messages import Prompt
from kvbelay.cli.demo.prompts import PROMPTS, read_prompts
from kvbelay.cli.demo.report import INTRODUCTION, Summary, one_line, show
from kvbelay.cli.demo.script import Level, script, strikes
from kvbelay.cli.demo.show import Row, Show, Verdict
from kvbelay.cli.demo.stage import Stage
from kvbelay.reference import Model, PagedCache, load_model

BLOCKS = 256
"""Blocks of each process's KV cache."""
MAX_NEW = 16
"""Most tokens of an answer."""
WIDTH = 110
"""Columns of the report where the output is no terminal."""

COLOURS = {"strikes": "red", "mended": "yellow", "wrong": "bold red", "lost": "bold red"}


def run(
    *,
    model: str,
    faults: str,
    requests: int,
    prompts: Path | None,
    seed: int,
    near: str | None,
    store: Path | None,
    json_path: Path | None,
) -> bool:
    """Whether all went well. Raises `KvbelayError` for what the user can mend."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    began = time.monotonic()
    texts = read_prompts(prompts) if prompts is not None else PROMPTS
    if json_path is not None:
        _require_writable(json_path)
    with Stage(model=model, near=near, store=store, blocks=BLOCKS, seed=seed) as stage:
        console.print(INTRODUCTION, style="dim")
        if model == "tiny":
            console.print("The weights of tiny are random: its answers mean nothing.\n", style="dim")
        with console.status("Loading the model ..."):
            loaded = load_model(model, stage.weights)
        asked = [tuple(loaded.tokenizer.chat(texts[index % len(texts)])) for index in range(requests)]
        jobs = [Prompt(f"r{index:02}", tokens, MAX_NEW) for index, tokens in enumerate(asked)]
        cache = PagedCache(loaded.config, 1)
        _require_room(jobs, min(BLOCKS * cache.block_tokens, loaded.config.context))
        rows = [
            Row(job.id, texts[index % len(texts)], [], movable=cache.transferable(len(job.tokens)))
            for index, job in enumerate(jobs)
        ]
        summary = Summary(model, faults, seed, rows)
        _perform(stage, loaded, jobs, summary, console)
        summary.peak_nbytes = stage.peak_nbytes
    summary.took_s = time.monotonic() - began
    show(summary, console)
    if json_path is not None:
        with _writing(json_path):
            json_path.write_bytes(msgspec.json.format(msgspec.json.encode(summary.to_builtins())))
    return summary.good


def _perform(stage: Stage, model: Model, jobs: list[Prompt], summary: Summary, console: Console) -> None:
    """Every act of the script. What cannot be answered any more stays lost."""

    def note(request: str, what: str, text: str) -> None:
        line = Text.assemble(f"{request}  ", (f"{what:<8} ", COLOURS.get(what, "green")), text)
        console.print(line, no_wrap=True, overflow="ellipsis")

    level = Level(summary.faults)
    acts = script(level, len(jobs), stage.setup.seed)
    setup = msgspec.structs.replace(stage.setup, strikes=strikes(level, acts, [job.id for job in jobs]))
    with console.status("Starting the processes ...") as status:
        performance = Show(stage, setup, note)
        job = jobs[0]
        try:
            for number, (job, act, row) in enumerate(zip(jobs, acts, summary.rows, strict=True), start=1):
                status.update(f"Request {number} of {len(jobs)} ...")
                row.answer = model.tokenizer.decode(performance.perform(row, act, job))
                what = "answers" if row.verdict is Verdict.IDENTICAL else row.verdict.value
                note(job.id, what, f"{row.decided}: {one_line(row.answer)}")
            status.update("Waiting until nothing moves any more ...")
            summary.end = performance.close()
        except KvbelayError as exc:
            note(job.id, "lost", str(exc))


def _require_room(jobs: list[Prompt], room: int) -> None:
    for job in jobs:
        if len(job.tokens) + job.max_new > room:
            length = f"{len(job.tokens)} tokens, and up to {job.max_new} of the answer"
            msg = f"prompt {job.id} does not fit: {length}; the cache holds {room}"
            raise CacheFull(msg, remedy="shorten the prompt")


def _require_writable(path: Path) -> None:
    """Now, rather than when all is done. Nothing is left of it."""
    with _writing(path):
        new = not path.exists()
        path.open("ab").close()
        if new:
            path.unlink()


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        msg = f"cannot be written: {exc.strerror or exc}"
        raise ConfigError(msg, source=str(path), remedy="name a file in a directory that exists and is yours") from exc
