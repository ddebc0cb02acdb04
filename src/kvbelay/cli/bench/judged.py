"""What the measured transfers mean: tables, and the bars that they are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import median

from kvbelay.cli.bench.bars import Bar, ratio
from kvbelay.cli.bench.show import Table
from kvbelay.cli.bench.transfer import KIB, Killed, Layer, Measured, Size, Timed, in_words

LEAST_SMALL, LEAST = 0.45, 0.60
"""Verified, on the same host, of memcpy: with pieces of 16 KiB, and with larger ones."""
MOST_KILLED_S = 0.050
LEAST_BARE = 0.85
"""Without digests, of memcpy, with pieces of 64 KiB and larger."""
LEAST_TCP, LEAST_TCP_BARE = 0.75, 0.95
"""Of ``iperf3 -l 1M``: with digests, and without."""
TEARDOWN = "word of its exit"
"""The kernel closes a dead process's sockets only when it has freed its memory, which takes about 0.1 ms a MiB."""


def bars(measured: Measured) -> list[Bar]:
    """What counts now, and what is printed until it does."""
    found: list[Bar] = []
    for size in measured.sizes:
        ways = {timed.name: timed for timed in size.ways}
        if "memory" in ways:
            found.append(_share_bar(size, "memory: get", ways["memory"].get_s))
        found.append(_share_bar(size, "stream, unix: put and get", ways["stream, unix"].both_s))
        if size.piece_nbytes >= 64 * KIB:
            bare = ratio(size.memcpy_s, ways["stream, unix, no digests"].get_s)
            found.append(Bar(_of(size, "stream, unix, no digests: get"), bare, LEAST_BARE, " of memcpy", at_most=False))
            found += _tcp_bars(size, ways, measured.iperf_bps)
            found += _rival_bars(size, ways)
    least = min(killed.source_nbytes for killed in measured.killed)
    for killed in measured.killed:
        what = f"{killed.name}: killed source of {in_words(killed.source_nbytes)}"
        waits_for = "" if killed.source_nbytes == least else TEARDOWN
        found.append(Bar(what, median(killed.known_s) * 1e3, MOST_KILLED_S * 1e3, " ms", waits_for=waits_for))
    return found


def _share_bar(size: Size, what: str, seconds: Iterable[float]) -> Bar:
    limit = LEAST_SMALL if size.piece_nbytes < 64 * KIB else LEAST
    return Bar(_of(size, what), ratio(size.memcpy_s, seconds), limit, " of memcpy", at_most=False)


def _tcp_bars(size: Size, ways: Mapping[str, Timed], iperf_bps: Sequence[float]) -> Iterator[Bar]:
    if iperf_bps:
        best = median(iperf_bps)
        for name, limit in (("stream, tcp", LEAST_TCP), ("stream, tcp, no digests", LEAST_TCP_BARE)):
            share = size.nbytes / median(ways[name].get_s) / best
            yield Bar(_of(size, f"{name}: get"), share, limit, " of iperf3", at_most=False)


def _rival_bars(size: Size, ways: Mapping[str, Timed]) -> Iterator[Bar]:
    for name, timed in ways.items():
        if name.startswith("raw "):
            share = ratio(timed.get_s, ways["stream, unix"].get_s)
            yield Bar(_of(size, f"stream, unix: get, against {name}"), share, 1.0, "x as fast", at_most=False)


def _of(size: Size, what: str) -> str:
    return f"{what}, {in_words(size.nbytes)} in pieces of {in_words(size.piece_nbytes)}"


def tables(measured: Measured) -> list[Table]:
    """Everything, for people."""
    return [
        _by_size(measured, "get, which makes the digest of what landed", lambda timed: timed.get_s),
        _by_size(measured, "put and get together, both digests", lambda timed: timed.both_s),
        *([_iperf(measured.iperf_bps)] if measured.iperf_bps else []),
        _layers(measured.layers),
        _killed(measured.killed),
    ]


def _by_size(measured: Measured, title: str, seconds: Callable[[Timed], list[float]]) -> Table:
    sizes = measured.sizes
    rows = [
        ("memcpy, one thread", *(f"{size.nbytes / median(size.memcpy_s) / 1e9:.1f} GB/s" for size in sizes)),
        ("xxh3, one pass", *(_share(size, size.digest_s) for size in sizes)),
    ]
    for name in dict.fromkeys(timed.name for size in sizes for timed in size.ways):
        ways = [next((timed for timed in size.ways if timed.name == name), None) for size in sizes]
        cells = ["" if way is None else _share(size, seconds(way)) for size, way in zip(sizes, ways, strict=True)]
        rows.append((name, *cells))
    columns = ("", *(f"{in_words(size.nbytes)} / {in_words(size.piece_nbytes)}" for size in sizes))
    return Table(f"Batch / scattered pieces, as a share of memcpy: {title}", columns, rows)


def _iperf(bps: Sequence[float]) -> Table:
    row = ("iperf3 -l 1M over loopback", *(f"{pick(bps) / 1e9:.2f} GB/s" for pick in (min, median, max)))
    return Table("What TCP gives here", ("", "slowest", "median", "fastest"), [row])


def _share(size: Size, seconds: Iterable[float]) -> str:
    return f"{ratio(size.memcpy_s, seconds):.2f}"


def _layers(layers: Iterable[Layer]) -> Table:
    rows = [
        (
            f"{layer.name}, {in_words(layer.nbytes)} in pieces of {in_words(layer.piece_nbytes)}",
            f"{median(layer.bare_s) * 1e3:.2f} ms",
            f"{median(layer.belay_s) * 1e3:.2f} ms",
            f"{ratio(layer.belay_s, layer.bare_s):.2f}x",
            f"{median(a - b for a, b in zip(layer.belay_s, layer.bare_s, strict=True)) * 1e6:.0f} us",
        )
        for layer in layers
    ]
    return Table("The same batch through Belay", ("", "bare get", "Belay.load", "ratio", "added"), rows)


def _killed(killed: Iterable[Killed]) -> Table:
    rows = [
        (
            f"{one.name}, {in_words(one.source_nbytes)}",
            *(f"{pick(one.known_s) * 1e3:.1f} ms" for pick in (min, median, max)),
        )
        for one in killed
    ]
    return Table("Source killed in mid-batch: get raises after", ("", "soonest", "median", "latest"), rows)
