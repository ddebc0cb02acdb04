"""When a log line was written, as far as the line says so.

The formats: vLLM's and SGLang's loggers, LMCache, NIXL and most of Python (``[2026-]11-30 12:00:00[,123]``), glog
(``E1130 12:00:00.123456`` of NIXL's and Mooncake's C++), TensorRT-LLM (``[11/30/2026-12:00:00]``). What has no stamp of
its own (uvicorn, tracebacks, UCX with its seconds since 1970, whose time zone nobody knows) was written when the line
above it was.
"""

from __future__ import annotations

import functools
import itertools
import re

HEAD = 220
"""Bytes of a line in which its stamp is looked for."""
DAYS = tuple(itertools.accumulate((0, 31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30)))
"""Days before each month, in a leap year: vLLM's stamps have no year, so that of the others is left out, too."""
YEAR_S = 366 * 86400.0

DATE_NBYTES = 16
"""Longest date before a time."""

_CLOCK = re.compile(rb"\d\d:\d\d:\d\d")
"""What every stamp has, and few other things; much faster to look for."""
_STAMP = re.compile(
    rb"(?:(?<![\d.])(?:\d{4}[-/])?(?P<month>[01]\d)[-/](?P<day>[0-3]\d)(?:[-/]\d{4}-)?[ T:]?"
    rb"|(?:^|[\[ ])[IWEF](?:\d{4})?(?P<gmonth>[01]\d)(?P<gday>[0-3]\d) )"
    rb"(?P<hour>[0-2]\d):(?P<minute>[0-5]\d):(?P<second>[0-6]\d)(?:[.,](?P<part>\d{1,9}))?"
)


def stamp_of(line: bytes) -> float | None:
    """Seconds since the first of January, local time of whoever wrote it; None without a stamp."""
    clock = _CLOCK.search(line, 0, HEAD)
    if clock is None:
        return None
    found = _STAMP.search(line, max(0, clock.start() - DATE_NBYTES), HEAD)
    return _seconds(found[0]) if found is not None else None


@functools.lru_cache(4096)  # many lines have the same
def _seconds(stamp: bytes) -> float | None:
    found = _STAMP.match(stamp)
    if found is None:
        return None
    month = int(found["month"] or found["gmonth"])
    day = int(found["day"] or found["gday"])
    if not (1 <= month <= len(DAYS) and day):
        return None
    seconds = ((DAYS[month - 1] + day - 1) * 24 + int(found["hour"])) * 3600 + int(found["minute"]) * 60
    return seconds + float(b"%s.%s" % (found["second"], found["part"] or b"0"))


def later(stamp: float, last: float) -> float:
    """The stamp of a line that stands below one of ``last``: after New Year's Eve it goes on counting."""
    while stamp < last - YEAR_S / 2:
        stamp += YEAR_S
    return stamp


def told(at: float) -> str:
    """A stamp for people: ``11-30 12:00:00``."""
    at %= YEAR_S
    day, rest = divmod(int(at), 86400)
    month = max(index for index, before in enumerate(DAYS) if before <= day)
    return f"{month + 1:02}-{day - DAYS[month] + 1:02} {rest // 3600:02}:{rest // 60 % 60:02}:{rest % 60:02}"
