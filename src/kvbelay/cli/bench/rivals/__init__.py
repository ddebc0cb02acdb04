"""Raw NIXL and raw Mooncake on the same batches, where their packages are installed.

Each reads from a process of its own over what it takes on this host by itself: nothing of kvbelay is in between, and
nothing is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec

from kvbelay.cli.bench.child import Child
from kvbelay.cli.bench.rivals.way import Raw, Setup
from kvbelay.cli.bench.scatter import Memory

PACKAGES = {"nixl": "nixl", "mooncake": "mooncake"}
"""Import names, by engine."""


@contextmanager
def rivals(landing: Memory, nbytes: int, seed: int, note: Callable[[str], None]) -> Iterator[list[Raw]]:
    """Those that are installed, open; they land in ``landing``. ``note`` hears which are left out."""
    with ExitStack() as open_:
        ways = []
        for engine, package in PACKAGES.items():
            if find_spec(package) is None:
                note(f"raw {engine} is left out: it is not installed")
                continue
            note(f"starting raw {engine}")
            child = open_.enter_context(Child("rivals.source", Setup(engine, nbytes, seed)))
            ways.append(open_.enter_context(closing(Raw(engine, child, landing))))
        yield ways
