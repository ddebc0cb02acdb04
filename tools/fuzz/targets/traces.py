"""Trace files: whoever writes one for the tests of their own connector gets `BadTrace` for what cannot be read."""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.target import Target
from kvbelay.testing.traces import BadTrace, load, names, parse


def _take(data: bytes) -> None:
    try:
        str(parse(data.decode(errors="replace"), "fuzz").policy)
    except BadTrace:
        return


def _seeds() -> Iterable[bytes]:
    for name in names():
        trace = load(name)
        header = "".join(f"{key}: {text}\n" for key, text in trace.header.items() if key != "source")
        for section in trace.sections[:1]:
            lines = [f"== {section.title}", f"ranks {' '.join(map(str, section.ranks))}"]
            for step in section.steps:
                lines += [step.text, *step.expected]
            yield (header + "\n".join(lines) + "\n").encode()


TARGETS = (Target("traces", _take, _seeds),)
