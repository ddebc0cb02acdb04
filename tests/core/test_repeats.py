"""Repeated lines: the first ones of each kind pass, and the next one after a window says how many did not."""

from __future__ import annotations

from kvbelay.core.repeats import KINDS, Repeats


def test_the_first_ones_pass() -> None:
    """Of each kind so many in a window; other kinds do not count."""
    repeats = Repeats(most=3, window_s=60.0)
    assert [repeats.passes("a", now) for now in range(5)] == ["", "", "", None, None]
    assert repeats.passes("b", 5.0) == ""


def test_what_was_kept_back_is_told() -> None:
    """The first line of the next window says how many were kept back, and in what time; then counting begins anew."""
    repeats = Repeats(most=1, window_s=60.0)
    for now in range(42):
        repeats.passes("a", now)
    assert repeats.passes("a", 60.0) == " (and 41 more in the last 60 s)"
    assert repeats.passes("a", 61.0) is None
    assert repeats.passes("a", 300.0) == " (and 1 more in the last 240 s)"
    assert repeats.passes("a", 400.0) == "", "nothing was kept back"


def test_no_line_is_uncounted() -> None:
    """Lines that passed and lines that were told of are all lines, whenever they came."""
    repeats = Repeats(most=2, window_s=1.0)
    passed = told = 0
    for step in range(1000):
        more = repeats.passes("a", step * 0.07)
        if more is not None:
            passed += 1
            told += int(more.split()[1]) if more else 0
    more = repeats.passes("a", 1e6)
    assert passed + told + (int(more.split()[1]) if more else 0) == 1000


def test_kinds_are_bounded() -> None:
    """However many kinds there are, memory is not; what is told apart no more begins anew."""
    repeats = Repeats(most=1)
    for kind in range(10 * KINDS):
        assert repeats.passes(kind, 0.0) == ""
    assert len(repeats._windows) == KINDS
    assert repeats.passes(10 * KINDS - 1, 0.0) is None
    assert repeats.passes(0, 0.0) == ""
