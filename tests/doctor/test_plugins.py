"""Checks that others bring: they are heard, and can neither break the doctor nor keep it waiting."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from kvbelay.doctor import plugins
from kvbelay.doctor.finding import Evidence, Finding, Level, exit_code
from kvbelay.doctor.plugins import GROUP, bounded, registered, run


def test_a_finding_of_somebody_elses() -> None:
    """All that it says is kept, under the check's name."""
    said = {
        "what": "the shelf is full",
        "level": "warning",
        "evidence": [{"source": "shelf.toml", "line": 3, "text": "size = 1"}],
        "cause": "too many books",
        "remedy": "read faster",
        "page": "https://shelf.example/full",
    }
    (found,) = run({"shelf": lambda: [said]})
    assert found == Finding(
        "shelf",
        Level.WARNING,
        "the shelf is full",
        (Evidence("shelf.toml", 3, "size = 1"),),
        "too many books",
        "read faster",
        "https://shelf.example/full",
    )


def test_a_finding_of_few_words() -> None:
    """Only what happened is needed."""
    (found,) = run({"shelf": lambda: [{"what": "no shelf"}]})
    assert (found.what, found.level) == ("no shelf", Level.PROBLEM)


def raises() -> Iterator[Any]:
    yield {"what": "told"}
    raise RuntimeError("on purpose")


class Odd:
    def __getattribute__(self, name: str) -> object:
        raise ValueError(name)


@pytest.mark.parametrize(
    ("check", "why"),
    [
        (raises, "on purpose"),
        (lambda: 3, "not iterable"),
        (lambda: ["text"], "Expected"),
        (lambda: [{"what": "x", "why": "y"}], "why"),
        (lambda: [{"what": "x", "level": "dreadful"}], "dreadful"),
        (lambda: [Odd()], ""),
        (lambda: [None], "Expected"),
    ],
)
def test_a_broken_check_is_a_finding(check: Any, why: str) -> None:
    """Whatever it does, the others are asked, and it is said what broke."""
    broken, fine = run({"theirs": check, "ours": lambda: [{"what": "seen", "level": "note"}]})
    assert broken.level is Level.UNCHECKED
    assert "theirs" in broken.what
    assert why in broken.cause
    assert fine.what == "seen"
    assert exit_code([broken, fine]) == 2


def test_a_check_that_hangs_is_a_finding() -> None:
    """The doctor goes on without it."""
    never = threading.Event()

    def hangs() -> Iterator[Any]:
        never.wait(5)
        yield from ()

    (found,) = bounded("theirs", hangs, 0.05)
    never.set()
    assert found.level is Level.UNCHECKED
    assert "longer than 0.05 s" in found.cause


def test_a_check_without_end_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many findings and no more."""
    monkeypatch.setattr(plugins, "MOST", 3)

    def endless() -> Iterator[Any]:
        while True:
            yield {"what": "again"}

    assert len(run({"theirs": endless})) == 3


def shelf() -> list[dict[str, str]]:
    """What an entry point of a test names."""
    return [{"what": "from an entry point"}]


def test_entry_points_are_loaded_when_they_are_run() -> None:
    """One that cannot be loaded is a finding, and the next one is asked."""
    points = [EntryPoint("gone", "no_such_module:check", GROUP), EntryPoint("shelf", "here:shelf", GROUP)]
    checks = registered(points[:1])
    (found,) = run(checks)
    assert found.level is Level.UNCHECKED
    assert "no_such_module" in found.cause
    assert list(registered(points)) == ["no_such_module:check.gone", "here:shelf.shelf"]


def test_an_entry_point_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its callable is called, and its findings bear the package's name."""
    monkeypatch.setattr(EntryPoint, "load", lambda _: shelf)
    (found,) = run(registered([EntryPoint("shelf", "here:shelf", GROUP)]))
    assert (found.check, found.what) == ("here:shelf.shelf", "from an entry point")
