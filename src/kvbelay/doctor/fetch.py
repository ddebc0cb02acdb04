"""One GET, with a time-out and limits, and what Prometheus' text format says."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from email.message import Message
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import NamedTuple

WAIT_S = 5.0
LIMIT_NBYTES = 32 << 20

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})? +([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|Inf|NaN))", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Answer(NamedTuple):
    """What a server said."""

    status: int
    """0: nothing."""
    body: bytes
    why: str = ""
    """Why it said nothing."""
    frozen: bool = False
    """It took the connection, and did not answer in time."""
    skew_s: float | None = None
    """By how much its clock is ahead of ours, to a second."""


Get = Callable[[str], Answer]


class _Stay(urllib.request.HTTPRedirectHandler):
    """An address that leads elsewhere is told, and not followed."""

    def redirect_request(self, *_: object) -> None:
        return None


_OPENER = urllib.request.build_opener(_Stay)


def get(url: str) -> Answer:
    """Fetch an address. Raises nothing for what a server does."""
    began = time.time()
    try:
        with _OPENER.open(url, timeout=WAIT_S) as response:
            body = response.read(LIMIT_NBYTES)
            return Answer(response.status, body, skew_s=_skew(response.headers, began))
    except urllib.error.HTTPError as exc:
        with exc:
            return Answer(exc.code, b"", str(exc.reason), skew_s=_skew(exc.headers, began))
    except TimeoutError:
        return Answer(0, b"", f"no answer within {WAIT_S:g} s", frozen=True)
    except urllib.error.URLError as exc:
        connecting = isinstance(exc.reason, TimeoutError)
        return Answer(0, b"", f"no connection within {WAIT_S:g} s" if connecting else str(exc.reason))
    except (OSError, HTTPException, ValueError) as exc:
        return Answer(0, b"", f"{type(exc).__name__}: {exc}")


def _skew(headers: Message, began: float) -> float | None:
    try:
        return parsedate_to_datetime(headers["Date"]).timestamp() - (began + time.time()) / 2
    except (KeyError, TypeError, ValueError):
        return None


class Series:
    """The samples of a ``/metrics`` page."""

    def __init__(self, page: bytes) -> None:
        self._samples: dict[str, list[tuple[dict[str, str], float]]] = {}
        for name, labels, value in _SAMPLE.findall(page.decode(errors="replace")):
            self._samples.setdefault(name, []).append((dict(_LABEL.findall(labels)), float(value)))

    def __contains__(self, prefix: str) -> bool:
        """Whether a series begins like this."""
        return any(name.startswith(prefix) for name in self._samples)

    def sum(self, name: str, **labels: str) -> float:
        """Over all samples that have these labels."""
        return sum(value for own, value in self.each(name) if labels.items() <= own.items())

    def each(self, name: str) -> list[tuple[dict[str, str], float]]:
        """All samples of a series."""
        return self._samples.get(name, [])

    def counted(self, prefix: str) -> float:
        """All counters that begin like this, together: it grows if one of them does."""
        names = [name for name in self._samples if name.startswith(prefix) and name.endswith(("_total", "_count"))]
        return sum(self.sum(name) for name in names)
