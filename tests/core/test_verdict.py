"""What foreign results mean: two branches, each attribute read once, and whatever says nothing has failed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

from kvbelay.core.boundary import Where, type_name
from kvbelay.core.model import BatchResult, Failure, Miss
from kvbelay.core.verdict import check, read

WHERE = Where("x", "get", "r", 7)
SOURCE, OTHER = b"s" * 16, b"o" * 16


def failure_of(result: object) -> Failure:
    """The failure that a result means; in any case it is one of ours, whatever the result does when it is read."""
    failure = read(result, WHERE)
    assert isinstance(failure, Failure)
    assert (failure.child, failure.request, failure.epoch) == ("x", "r", 7)
    return failure


class State(Enum):
    """As some backends have it."""

    DONE = "done"
    FAILED = "failed"
    PENDING = "pending"
    NUMBER = 3


@dataclass
class OldResult:
    """A block's result as it was."""

    status: object = "failed"
    nbytes: int = 64
    ok: object = False
    block: int = 17


@dataclass
class NewResult:
    """The same after an upgrade that renamed the field."""

    state: object = "failed"
    nbytes: int = 64
    ok: object = False
    block: int = 17
    error: object = "connection reset"


@pytest.mark.parametrize("word", ["failed", "error", "FAILED", "Timeout", State.FAILED, False])
@pytest.mark.parametrize("make", [OldResult, NewResult])
def test_a_failure_is_understood_under_either_name(make: Any, word: object) -> None:
    """Before and after the field was renamed from ``status`` to ``state`` a failed block is a failure, retryable."""
    failure = failure_of(make(word, ok=True))
    assert (failure.kind, failure.retryable, failure.handling) == ("TransferFailed", True, "")
    assert type_name(make()) in failure.detail


@pytest.mark.parametrize("word", ["ok", "done", "Success", "COMPLETED", State.DONE, True])
@pytest.mark.parametrize("make", [OldResult, NewResult])
def test_a_success_is_understood_under_either_name(make: Any, word: object) -> None:
    """A success under either name is one, with the bytes that it names and no digest: the layer has to verify."""
    assert read(make(word, ok=True), WHERE) == BatchResult(nbytes=64, source_digest=None, landed_digest=None)


def test_the_cause_is_told() -> None:
    """What the result says of its cause stands in the failure."""
    assert "connection reset" in failure_of(NewResult()).detail
    assert "'failed'" in failure_of(NewResult()).detail


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ({"state": "ok", "ok": False}, "TransferFailed"),
        ({"state": "failed", "ok": True}, "TransferFailed"),
        ({"state": "ok", "status": "error"}, "TransferFailed"),
        ({"all_ok": True, "failed_blocks": [3]}, "TransferFailed"),
        ({"state": "ok", "failed_ids": {3}}, "TransferFailed"),
        ({"state": "ok", "failed_blocks": deque([3])}, "UnknownShape"),
        ({"state": "ok", "failed_blocks": 3}, "UnknownShape"),
    ],
)
def test_one_bad_sign_is_enough(flags: dict[str, object], kind: str) -> None:
    """A result that contradicts itself, or names failed blocks in whatever container, has not landed."""
    assert failure_of(SimpleNamespace(nbytes=64, **flags)).kind == kind


@pytest.mark.parametrize(
    "word", ["pending", "", "okay", "partially", None, 1, 0, 1.0, b"ok", ["ok"], State.PENDING, State.NUMBER, object()]
)
def test_a_state_that_is_not_known_has_failed(word: object) -> None:
    """A word, a number or a thing that we do not know never counts as success, and is refused by name."""
    failure = failure_of(NewResult(word, ok=True))
    assert (failure.kind, failure.retryable) == ("UnknownShape", False)
    assert "NewResult" in failure.detail


@pytest.mark.parametrize("result", [None, object(), 17, "ok", True, False, (), {}, [], {"state": "ok"}, b""])
def test_a_result_that_says_nothing_has_failed(result: object) -> None:
    """None, an empty thing, a bare word or a dict says nothing: a failure, and no miss."""
    failure = failure_of(result)
    assert failure.kind in {"SaidNothing", "UnknownShape"}
    assert not failure.retryable


def test_none_is_no_miss() -> None:
    """Only the miss is a miss."""
    assert read(Miss.MISS, WHERE) is Miss.MISS
    assert failure_of(None).kind == "SaidNothing"


@pytest.mark.parametrize("nbytes", [None, "64", 64.0, True])
def test_a_success_without_a_size_has_failed(nbytes: object) -> None:
    """A result that does not say how many bytes landed cannot be believed."""
    assert failure_of(SimpleNamespace(state="ok", nbytes=nbytes)).kind == "SaidNothing"


class Raises:
    """Every attribute raises."""

    def __getattr__(self, name: str) -> object:
        raise RuntimeError("not today", name)


class RaisesEvenOnItsText(Raises):
    def __repr__(self) -> str:
        raise RuntimeError("no text either")


class RaisesOnOne:
    """One attribute raises, the others are fine."""

    ok = True
    nbytes = 64

    @property
    def state(self) -> str:
        raise ConnectionResetError("while reading the state")


class Slotted:
    __slots__ = ()


class EvilMeta(type):
    def __getattribute__(cls, name: str) -> object:
        raise RuntimeError("not of the class", name)

    def __eq__(cls, other: object) -> bool:
        return True

    def __hash__(cls) -> int:
        raise RuntimeError("no hash")

    def __instancecheck__(cls, instance: object) -> bool:
        return True


class Chameleon(metaclass=EvilMeta):
    """Claims to be a batch result, and its class equals every class."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return BatchResult


class EvilEquality:
    """A state that equals every word, and a flag that is true and raises."""

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return hash("ok")

    def __bool__(self) -> bool:
        raise RuntimeError("neither")


class EvilWord(str):
    __slots__ = ()

    def lower(self) -> str:
        return "ok"


RAISING: dict[str, Callable[[], object]] = {
    "on everything": Raises,
    "even on its text": RaisesEvenOnItsText,
    "on one": RaisesOnOne,
}


@pytest.mark.parametrize("name", RAISING)
def test_attributes_that_raise(name: str) -> None:
    """The handler survives; the type is named, and what broke while it was read stands in its own field."""
    result = RAISING[name]()
    failure = failure_of(result)
    assert failure.kind == "UnknownShape"
    assert type_name(result) in failure.detail
    assert "raised" in failure.handling


LYING: dict[str, Callable[[], object]] = {
    "empty": Slotted,
    "claims to be ours": lambda: type.__call__(Chameleon),
    "a class that claims to be all": lambda: Chameleon,
    "equals everything": lambda: SimpleNamespace(state=EvilEquality(), ok=EvilEquality(), nbytes=64),
    "a word that lies": lambda: SimpleNamespace(state=EvilWord("failed"), nbytes=64),
    "blocks that raise": lambda: SimpleNamespace(state="ok", nbytes=64, failed_blocks=EvilEquality()),
}


@pytest.mark.parametrize("name", LYING)
def test_objects_that_lie(name: str) -> None:
    """An object that claims another class, or equals everything, is judged by what it really is: not a success."""
    assert failure_of(LYING[name]()).kind == "UnknownShape"


@dataclass
class Counting:
    """Counts how often each attribute is read."""

    values: dict[str, object]
    reads: dict[str, int] = field(default_factory=dict)

    def __getattribute__(self, name: str) -> object:
        values = object.__getattribute__(self, "values")
        if name == "reads":
            return object.__getattribute__(self, "reads")
        reads = object.__getattribute__(self, "reads")
        reads[name] = reads.get(name, 0) + 1
        if name in values:
            return values[name]
        raise AttributeError(name)


@pytest.mark.parametrize(
    "values",
    [
        {"state": "ok", "nbytes": 64},
        {"state": "failed", "error": "why"},
        {"status": "pending", "ok": True, "nbytes": 64},
        {"all_ok": True, "failed_ids": [1], "nbytes": 64},
        {},
    ],
    ids=["ok", "failed", "unknown", "blocks", "nothing"],
)
def test_each_attribute_is_read_once(values: dict[str, object]) -> None:
    """A foreign result is read once and never again: what it answers the second time cannot matter."""
    result = Counting(values)
    read(result, WHERE)
    reads = result.reads
    assert set(values) <= reads.keys()
    assert set(reads.values()) == {1}


class TestOurOwnResult:
    """A connector of ours returned a `BatchResult`: whole, or failed."""

    def check(self, result: BatchResult, **given: Any) -> Failure | None:
        given = {"nbytes": 64, "promised": SOURCE, "landed": SOURCE, **given}
        assert read(result, WHERE) is result
        return check(result, WHERE, **given)

    def test_all_ok(self) -> None:
        """Size and digests agree: proceed."""
        assert self.check(BatchResult(64, SOURCE, SOURCE)) is None
        assert self.check(BatchResult(64, None, None)) is None
        assert self.check(BatchResult(64, SOURCE, SOURCE), promised=None) is None

    @pytest.mark.parametrize("failed", [(3,), (0, 1, 2, 3), *permutations((2, 0, 3))])
    def test_some_or_all_failed_in_any_order(self, failed: tuple[int, ...]) -> None:
        """Failed blocks, few or all, in whatever order, lead to one and the same branch: the whole batch again."""
        failure = self.check(BatchResult(64, SOURCE, SOURCE, failed_blocks=failed))
        assert failure is not None
        assert (failure.kind, failure.retryable) == ("TransferFailed", True)
        assert failure.detail == f"{len(failed)} of the batch's blocks failed"

    @pytest.mark.parametrize(
        ("result", "given", "kind"),
        [
            (BatchResult(63, SOURCE, SOURCE), {}, "ShortTransfer"),
            (BatchResult(65, SOURCE, SOURCE), {}, "ShortTransfer"),
            (BatchResult(0, SOURCE, SOURCE), {}, "ShortTransfer"),
            (BatchResult(64, SOURCE, SOURCE), {"landed": OTHER}, "CorruptData"),
            (BatchResult(64, OTHER, SOURCE), {}, "CorruptData"),
            (BatchResult(64, OTHER, OTHER), {"landed": OTHER}, "CorruptData"),
            (BatchResult(64, SOURCE, SOURCE), {"landed": None}, "SaidNothing"),
            (BatchResult(64, None, SOURCE), {"promised": None}, "SaidNothing"),
        ],
    )
    def test_anything_less_than_whole_and_verified(self, result: BatchResult, given: dict[str, Any], kind: str) -> None:
        """Other sizes, other digests or none at all: failed, with the reason by name."""
        failure = self.check(result, **given)
        assert failure is not None
        assert failure.kind == kind

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("nbytes", "64"),
            ("nbytes", None),
            ("nbytes", 64.0),
            ("source_digest", "text"),
            ("landed_digest", 17),
            ("failed_blocks", None),
            ("failed_blocks", 3),
            ("failed_blocks", EvilEquality()),
        ],
    )
    def test_fields_of_the_wrong_type_are_named(self, name: str, value: object) -> None:
        """A field with something else in it is refused by name, not found out later."""
        fields: dict[str, Any] = {"nbytes": 64, "source_digest": SOURCE, "landed_digest": SOURCE, name: value}
        failure = failure_of(BatchResult(**fields))
        assert failure.kind == "UnknownShape"
        assert f"BatchResult.{name}" in failure.detail
