"""Raw NIXL and raw Mooncake on the same batches, where their packages are installed.

Nothing of kvbelay is in between, and nothing is verified. Reader and source are processes of their own: an idle NIXL
agent takes a core, so both stand still while others are measured; and what they do when they end ends nobody else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec

from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.rivals.messages import Setup
from kvbelay.cli.bench.rivals.way import Raw

PACKAGES = {"nixl": "nixl", "mooncake": "mooncake"}
"""Import names, by engine."""


@contextmanager
def rivals(nbytes: int, seed: int, note: Callable[[str], None]) -> Iterator[list[Raw]]:
    """Those that are installed, open, for batches of at most so many bytes. ``note`` hears which are left out."""
    with ExitStack() as open_:
        ways = []
        for engine, package in PACKAGES.items():
            if find_spec(package) is None:
                note(f"raw {engine} is left out: it is not installed")
                continue
            note(f"starting raw {engine}")
            source = open_.enter_context(Child("rivals.source", Setup(engine, nbytes, seed)))
            reader = open_.enter_context(Child("rivals.reader", Setup(engine, nbytes, seed + 1)))
            ways.append(open_.enter_context(closing(Raw(engine, source, reader))))
        yield ways
