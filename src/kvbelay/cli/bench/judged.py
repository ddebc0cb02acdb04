"""What the measured transfers mean: tables, and the bars that they are held to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import median

from kvbelay.cli.bench.bars import Bar, ratio
from kvbelay.cli.bench.show import Table
from kvbelay.cli.bench.transfer import KIB, Killed, Layer, Measured, Size, Timed, in_words

LEAST_SMALL, LEAST = 0.45, 0.60
"""Verified, on the same host, of memcpy: with pieces of 16 KiB, and with larger ones."""
MOST_KILLED_S = 0.050
FAST_PATH = "process_vm_readv"
TEARDOWN = "word of its exit"
"""The kernel closes a dead process's sockets only when it has freed its memory, which takes about 0.1 ms a MiB."""


def bars(measured: Measured) -> list[Bar]:
    """What counts now, and what is printed until it does."""
    found: list[Bar] = []
    for size in measured.sizes:
        ways = {timed.name: timed for timed in size.ways}
        found += [
            _share_bar(size, "memory: get", ways["memory"].get_s),
            _share_bar(size, "stream, unix: put and get", ways["stream, unix"].both_s, waits_for=FAST_PATH),
        ]
    least = min(killed.source_nbytes for killed in measured.killed)
    for killed in measured.killed:
        what = f"{killed.name}: killed source of {in_words(killed.source_nbytes)}"
        waits_for = "" if killed.source_nbytes == least else TEARDOWN
        found.append(Bar(what, median(killed.known_s) * 1e3, MOST_KILLED_S * 1e3, " ms", waits_for=waits_for))
    return found


def _share_bar(size: Size, what: str, seconds: Iterable[float], *, waits_for: str = "") -> Bar:
    limit = LEAST_SMALL if size.piece_nbytes < 64 * KIB else LEAST
    what = f"{what}, pieces of {in_words(size.piece_nbytes)}"
    return Bar(what, ratio(size.memcpy_s, seconds), limit, " of memcpy", at_most=False, waits_for=waits_for)


def tables(measured: Measured) -> list[Table]:
    """Everything, for people."""
    return [
        _by_size(measured, "get, which makes the digest of what landed", lambda timed: timed.get_s),
        _by_size(measured, "put and get together, both digests", lambda timed: timed.both_s),
        _layers(measured.layers),
        _killed(measured.killed),
    ]


def _by_size(measured: Measured, title: str, seconds: Callable[[Timed], list[float]]) -> Table:
    sizes = measured.sizes
    rows = [
        ("memcpy, one thread", *(f"{measured.nbytes / median(size.memcpy_s) / 1e9:.1f} GB/s" for size in sizes)),
        ("xxh3, one pass", *(_share(size, size.digest_s) for size in sizes)),
    ]
    for index, timed in enumerate(sizes[0].ways):
        rows.append((timed.name, *(_share(size, seconds(size.ways[index])) for size in sizes)))
    title = f"{in_words(measured.nbytes)} in scattered pieces, as a share of memcpy: {title}"
    return Table(title, ("", *(in_words(size.piece_nbytes) for size in sizes)), rows)


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
