"""Pictures of what was measured, for people who would rather look than read. Needs the extra ``plot``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from kvbelay.cli.bench.bars import ratio
from kvbelay.cli.bench.judged import LEAST
from kvbelay.cli.bench.ledger import Row
from kvbelay.cli.bench.transfer import Measured, Size, Timed, in_words
from kvbelay.errors import ConfigError, MissingExtra

BARE = ", no digests"
SUFFIXES = (".svg", ".png", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999", "#7F3C8D", "#11A579")
"""The first eight are Okabe and Ito's, which people who see few colours can tell apart."""


def require(path: Path) -> None:
    """Raises, before anything is measured, if no picture could be written there at the end."""
    if path.suffix not in SUFFIXES:
        msg = f"no picture can be written to {path.name!r}"
        raise ConfigError(msg, field="--plot", remedy=f"let its name end with one of {', '.join(SUFFIXES)}")
    _pyplot()


def transfers(measured: Measured, path: Path) -> None:
    """Shares of memcpy by piece size: of get, and of put and get together."""
    figure, panels = _pyplot().subplots(1, 2, figsize=(13, 6), sharey=True, layout="constrained")
    batch = min(size.nbytes for size in measured.sizes)
    sizes = [size for size in measured.sizes if size.nbytes == batch]
    for panel, title, seconds in (
        (panels[0], "get", lambda timed: timed.get_s),
        (panels[1], "put and get", lambda timed: timed.both_s),
    ):
        _shares(panel, sizes, seconds)
        panel.set_title(f"{title}: {in_words(batch)} in scattered pieces")
    panels[0].set_ylabel("share of one thread's memcpy")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, bbox_inches="tight")


def ledgers(rows: Sequence[Row], path: Path) -> None:
    """Time an event and bytes a request by the number of live requests."""
    figure, panels = _pyplot().subplots(1, 2, figsize=(11, 4), layout="constrained")
    live = [row.live for row in rows]
    for panel, what, values in (
        (panels[0], "microseconds an event", [row.event_s * 1e6 for row in rows]),
        (panels[1], "bytes a live request", [row.nbytes_each for row in rows]),
    ):
        panel.plot(live, values, marker="o", color=COLOURS[0])
        panel.set_xscale("log")
        panel.set_ylim(bottom=0)
        panel.set_xlabel("live requests")
        panel.set_title(what)
    figure.savefig(path, bbox_inches="tight")


def _shares(panel: Any, sizes: Sequence[Size], seconds: Callable[[Timed], list[float]]) -> None:
    names = [timed.name for timed in sizes[0].ways]
    kinds = list(dict.fromkeys(name.removesuffix(BARE) for name in names))
    for index, name in enumerate(names):
        shares = [ratio(size.memcpy_s, seconds(size.ways[index])) for size in sizes]
        dashed = "--" if name.endswith(BARE) else "-"
        colour = COLOURS[kinds.index(name.removesuffix(BARE)) % len(COLOURS)]
        panel.plot(range(len(sizes)), shares, dashed, marker="o", ms=4, label=name, color=colour)
    panel.axhline(LEAST, color="#999999", lw=0.8, ls=":")
    panel.annotate(f"bar: {LEAST}", (0, LEAST), xytext=(0, 3), textcoords="offset points", color="#777777", fontsize=8)
    panel.set_yscale("log")
    panel.set_yticks([0.05, 0.1, 0.2, 0.5, 1.0, 2.0], ["0.05", "0.1", "0.2", "0.5", "1", "2"])
    labels = [f"{in_words(size.piece_nbytes)}\n{size.nbytes / median(size.memcpy_s) / 1e9:.1f} GB/s" for size in sizes]
    panel.set_xticks(range(len(sizes)), labels)
    panel.set_xlabel("piece, and memcpy at that size")


def _pyplot() -> Any:
    try:
        import matplotlib as mpl  # noqa: PLC0415  # an extra, and slow to import
        from matplotlib import pyplot as plt  # noqa: PLC0415  # the same
    except ImportError as exc:
        raise MissingExtra("pictures need matplotlib", remedy="pip install 'kvbelay[plot]'") from exc
    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "kvbelay"
    return plt
