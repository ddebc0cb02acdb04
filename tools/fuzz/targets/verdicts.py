"""What foreign code returned or raised: objects made of the bytes, some of whose attributes raise."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum

import msgspec

from fuzz.target import MSGPACK, Finding, Target
from kvbelay.core import boundary, verdict
from kvbelay.core.boundary import Where
from kvbelay.core.model import BatchResult, Failure, Miss

WHERE = Where("near", "get", "fuzz", 1)
RAISES = "!"
"""An attribute with this value raises when it is read."""
CLIPPED = 16 * 1024
"""Most bytes of a failure, encoded."""


class Word(Enum):
    """A foreign enum."""

    DONE = "done"
    ODD = "odd"


class Foreign:
    """An object with the attributes that it is told."""

    def __init__(self, attributes: dict[object, object]) -> None:
        self._attributes = attributes

    def __getattr__(self, name: str) -> object:
        value = self.__dict__["_attributes"].get(name, self)
        if value is self:
            raise AttributeError(name)
        if value == RAISES:
            msg = f"{name}\udcff"
            raise RuntimeError(msg)
        return Word.ODD if value == "odd" else value

    def __repr__(self) -> str:
        said = self._attributes.get("repr", "foreign")
        if said == RAISES:
            raise KeyError(self)
        return said  # type: ignore[return-value]  # hostile: perhaps no text


class ForeignFault(Exception):
    """An exception with the attributes that it is told."""

    def __init__(self, told: Foreign) -> None:
        super().__init__(told)
        self.told = told

    def __repr__(self) -> str:
        return repr(self.told)


def _take(data: bytes) -> None:
    try:
        values = msgspec.msgpack.decode(data)
    except msgspec.DecodeError:
        return
    for value in values if isinstance(values, list) else [values]:
        if not isinstance(value, dict):
            _judge(value)
            continue
        foreign = Foreign(value)
        _judge(foreign)
        _judge(BatchResult(*(value.get(name) for name in BatchResult.__struct_fields__)))
        fault: BaseException = ForeignFault(foreign)
        for _ in range(value["chain"] % 20 if isinstance(value.get("chain"), int) else 0):
            outer = ForeignFault(foreign)
            outer.__cause__, outer.__context__ = (fault, None) if "cause" in value else (None, fault)
            fault = outer
        _told(boundary.describe(fault, WHERE))


def _judge(value: object) -> None:
    read = verdict.read(value, WHERE)
    if not isinstance(read, BatchResult | Failure) and read is not Miss.MISS:
        msg = f"a verdict is {read!r:.200}"
        raise Finding(msg)
    if isinstance(read, Failure):
        _told(read)
    elif isinstance(read, BatchResult):
        failure = verdict.check(read, WHERE, nbytes=64, promised=None, landed=read.landed_digest)
        if failure is not None:
            _told(failure)


def _told(failure: Failure) -> None:
    if len(msgspec.json.encode(failure)) > CLIPPED:
        raise Finding("a failure is larger than what is kept of a foreign text")


def _seeds() -> Iterable[bytes]:
    for value in (
        None,
        True,
        "done",
        {"nbytes": 64, "source_digest": b"d" * 16, "landed_digest": b"d" * 16, "failed_blocks": []},
        {"status": "done", "nbytes": 64},
        {"state": "failed", "error": "x" * 600, "failed_block_ids": [1, 2]},
        {"ok": RAISES, "repr": RAISES, "chain": 3, "cause": 1},
        {"success": True, "nbytes": "64", "repr": 5, "chain": 12},
        {"status": "odd", "error": RAISES},
        [{"ok": False}, {"all_ok": True, "state": "done", "nbytes": 1}],
    ):
        yield msgspec.msgpack.encode(value)


TARGETS = (Target("verdicts", _take, _seeds, MSGPACK),)
