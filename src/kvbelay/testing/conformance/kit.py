"""How the kit opens a connector, and what it may ask of it."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvbelay.connectors.port import Connector
from kvbelay.core.model import Fingerprint, Layout
from kvbelay.errors import KvbelayError
from kvbelay.testing.conformance.bench import Bench, Nonconforming, bench
from kvbelay.testing.conformance.scattered import Shape

FINGERPRINT = Fingerprint(
    model="kit/tiny",
    revision="1",
    layouts=(Layout(group=0, layers=(0, 1), block_tokens=16, kv_heads=2, head_dim=8, dtype="float32", order="NHD"),),
)
SMALL: Shape = [(3, 256)]
LARGE: Shape = [(40, 64 * 1024), (8, 256 * 1024)]
"""4.5 MiB: several chunks of `kvbelay.connectors.spans.CHUNK`, some of them cut inside a piece."""

SHAPES = st.lists(
    st.tuples(st.integers(1, 40), st.sampled_from([1, 7, 64, 1000, 4096, 65_536])), min_size=1, max_size=3
)
PROFILE = settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow],
)


class Kit(ABC):
    """What the author of a connector supplies.

    `open_source`, and where reader and source differ, `open_reader`; `restart_source` where closing and opening again
    is not how the source restarts. Each gets a fresh directory, whose path is short enough for a unix socket.
    """

    child = "kit"
    """The connectors' name; pass it on when opening."""
    fingerprint = FINGERPRINT
    within_s: float = 10.0
    """Seconds that any call of the kit may take which has no reason to fail."""
    grace_s: float = 2.0
    """Seconds that a call may take beyond its deadline or its cancellation, on a busy machine."""
    close_s: float = 5.0
    """Seconds that close() may take."""
    watch_s: float = 0.1
    """Seconds that the kit watches a destination for late writers."""
    keeps: Sequence[str] = ()
    """Patterns, relative to the scratch directory, of files that may outlive the connectors."""
    publishes: ClassVar[bool] = False
    """Whether put() gives leases; `kvbelay.testing.GivesLeases` sets it."""

    @abstractmethod
    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        """Open the side that puts."""

    def open_reader(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        """Open the side that gets, beside an open source."""
        return self.open_source(scratch, fingerprint)

    def restart_source(self, scratch: Path, source: Connector) -> Connector:
        """End the source and start it again at the same address."""
        source.close()
        return self.open_source(scratch, self.fingerprint)

    def bench(self) -> contextlib.AbstractContextManager[Bench]:
        """A source and a reader for one check."""
        return bench(self)

    def watch(self, ready: Bench) -> None:
        """Nobody writes into a destination whose call is over."""
        threading.Event().wait(self.watch_s)
        ready.require_untouched()


def must_raise(
    expected: type[Exception] | tuple[type[Exception], ...], call: Callable[[], object], otherwise: str
) -> None:
    """Raise `Nonconforming` unless the call raises what is expected."""
    try:
        value = call()
    except Nonconforming:
        raise
    except expected:
        return
    except (KvbelayError, OSError) as exc:
        msg = f"{otherwise}, but {exc!r}"
        raise Nonconforming(msg) from exc
    msg = f"{otherwise}: it returned {value!r}"
    raise Nonconforming(msg)
