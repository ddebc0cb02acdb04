"""Everything that is measured on pairs of engines."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from random import Random

from kvbelay.cli.bench.paired.death import deaths
from kvbelay.cli.bench.paired.figures import Paired
from kvbelay.cli.bench.paired.healthy import healthy
from kvbelay.cli.bench.paired.latency import first_tokens, steps
from kvbelay.cli.bench.paired.pair import standing
from kvbelay.errors import ConfigError, MissingExtra

DEATHS = 3
"""Of each kind with a link. Without one each takes NIXL's own time, and one of each is shown."""


def paired(model: str, loads: int, seed: int, note: Callable[[str], None]) -> Paired:
    """Times on two pairs of servers of this model; or, if a number of loads is named, those.

    Raises `MissingExtra` where NIXL is not installed, and `ConfigError` for a folder that is not there.
    """
    if find_spec("nixl") is None:
        raise MissingExtra("the servers move KV with NIXL, and it is not installed", remedy="pip install nixl")
    if model.startswith(("/", ".", "~")):
        model = str(Path(model).expanduser().resolve())
        if not Path(model).is_dir():
            msg = f"{model} is not a folder"
            raise ConfigError(msg, field="--model", remedy="name a folder with a model, or a model of the hub")
    dice = Random(seed)  # noqa: S311  # of prompts
    if loads:
        return Paired(model, healthy=healthy(model, loads, dice, note))
    return _times(model, dice, note)


def _times(model: str, dice: Random, note: Callable[[str], None]) -> Paired:
    measured = Paired(model)
    note("two servers start, without verification")
    with standing(model, linked=False) as off:
        off.freeze()
        note("two servers start, with verification")
        with standing(model, linked=True) as on:
            on.freeze()
            measured.first = first_tokens(off, on, dice, measured.judged, note)
            measured.steps = steps(off, on, dice, measured.judged, note)
            on.thaw()
            measured.deaths = deaths(on, DEATHS, dice, note)
        off.thaw()
        measured.deaths += deaths(off, 1, dice, note)
    return measured
