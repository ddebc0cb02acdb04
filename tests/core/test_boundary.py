"""The boundary: nothing foreign gets out of it, and the first cause survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial

import msgspec
import pytest

from kvbelay import errors
from kvbelay.core.boundary import (
    CLIP,
    Broken,
    Where,
    call,
    classify,
    describe,
    each1,
    each3,
    fail,
    gather,
    hand,
    is_a,
    peek,
    text_of,
    type_name,
)
from kvbelay.core.model import Failure

WHERE = Where("x", "get", "r", 7)


def raised(exc: BaseException) -> Failure:
    """What the boundary makes of an exception."""

    def function() -> None:
        raise exc

    result = call(function, WHERE)
    assert isinstance(result, Failure)
    assert (result.child, result.operation, result.request, result.epoch) == ("x", "get", "r", 7)
    json.dumps(msgspec.to_builtins(result))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(result), type=Failure) == result
    return result


class ReprRaises(Exception):
    def __repr__(self) -> str:
        raise RuntimeError("even this")


class ReprIsNoText(Exception):
    def __repr__(self) -> str:
        return 5  # type: ignore[return-value]


class ReprIsEndless(Exception):
    def __repr__(self) -> str:
        return "x" * 1_000_000


class ReprCannotBeEncoded(Exception):
    def __repr__(self) -> str:
        return "\ud800 is half a character"


class ReprRecurses(Exception):
    def __repr__(self) -> str:
        return repr(self)


class EvilText(str):
    __slots__ = ()

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __getitem__(self, key: object) -> str:
        raise RuntimeError("no part")

    def encode(self, *_: object, **__: object) -> bytes:
        raise RuntimeError("no bytes")


class ReprIsEvil(Exception):
    def __repr__(self) -> str:
        return EvilText("looks like a text")


class EveryAttributeRaises(Exception):
    def __getattribute__(self, name: str) -> object:
        raise RuntimeError("no attribute", name)


class LiesAboutItsClass(Exception):
    @property
    def __class__(self) -> type:  # type: ignore[override]
        raise RuntimeError("not telling")


class EvilMeta(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]
        raise RuntimeError("no name")

    def __getattribute__(cls, name: str) -> object:
        raise RuntimeError("no attribute", name)

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("no check")

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("no comparison")

    def __hash__(cls) -> int:
        raise RuntimeError("no hash")


class EvilClass(Exception, metaclass=EvilMeta):
    """Its class answers no question."""


class EvilLeaf(errors.TransportError, metaclass=EvilMeta):
    """One of ours, by its bases."""


class OursWithEvilText(errors.PeerLost):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class EvilLinks(Exception):
    """Its links to other exceptions raise or are nonsense."""

    __cause__ = property(lambda self: self.boom)  # type: ignore[assignment]
    __context__ = 17  # type: ignore[assignment]


NASTY: dict[str, Callable[[], BaseException]] = {
    "repr raises": ReprRaises,
    "repr is no text": ReprIsNoText,
    "repr is endless": ReprIsEndless,
    "repr cannot be encoded": ReprCannotBeEncoded,
    "repr calls itself": ReprRecurses,
    "repr is an evil text": ReprIsEvil,
    "every attribute raises": EveryAttributeRaises,
    "lies about its class": LiesAboutItsClass,
    "evil class": lambda: type.__call__(EvilClass),
    "evil leaf": lambda: type.__call__(EvilLeaf, "x"),
    "ours, with evil text": lambda: OursWithEvilText("x"),
    "evil links": EvilLinks,
    "no memory": MemoryError,
    "recursion": RecursionError,
    "generator exit": GeneratorExit,
    "stop iteration": lambda: StopIteration(3),
    "a base exception": lambda: BaseException("base"),
    "unicode": lambda: UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
    "an evil key": lambda: KeyError(EvilText("key")),
}
"""Made in the test: pytest itself would stumble over them."""


@pytest.mark.parametrize("name", NASTY)
def test_whatever_is_raised_becomes_a_failure(name: str) -> None:
    """Any exception, however hostile, becomes a bounded failure that can be sent, and names the type where it can."""
    failure = raised(NASTY[name]())
    assert failure.kind
    assert 0 < len(failure.detail) <= 2 * CLIP
    assert len(failure.handling) <= 2 * CLIP


@pytest.mark.parametrize("exc", [KeyboardInterrupt(), SystemExit(3)])
@pytest.mark.parametrize("place", ["call", "peek", "text_of", "our text"])
def test_what_the_process_is_told_passes(exc: BaseException, place: str) -> None:
    """KeyboardInterrupt and SystemExit go through, wherever they are raised."""

    class Told(errors.PeerLost):
        @property
        def state(self) -> str:
            raise exc

        def __repr__(self) -> str:
            raise exc

        def __str__(self) -> str:
            raise exc

    def function() -> None:
        raise exc if place == "call" else Told("x")

    actions: dict[str, Callable[[], object]] = {
        "call": lambda: call(function, WHERE),
        "peek": lambda: peek(Told("x"), "state"),
        "text_of": lambda: text_of(Told("x")),
        "our text": lambda: call(function, WHERE),
    }
    with pytest.raises(type(exc)):
        actions[place]()


def test_what_is_returned_passes_as_it_is() -> None:
    """The boundary looks at nothing that comes back."""
    thing = type.__call__(EvilClass)
    assert call(lambda: thing, WHERE) is thing
    assert call(lambda: None, WHERE) is None


@pytest.mark.parametrize(
    ("exc", "kind", "retryable"),
    [
        (errors.PeerLost("gone"), "PeerLost", True),
        (errors.FingerprintMismatch("differs"), "FingerprintMismatch", False),
        (OSError(5, "io"), "TransportError", True),
        (TimeoutError(), "TransportError", True),
        (ConnectionResetError(), "TransportError", True),
        (ValueError("x"), "ForeignError", False),
        (TypeError("x"), "ForeignError", False),
        (AttributeError("no attribute 'status'"), "ForeignError", False),
    ],
    ids=lambda value: type_name(value) if isinstance(value, BaseException) else "",
)
def test_the_leaf_says_whether_to_try_again(exc: BaseException, kind: str, retryable: bool) -> None:
    """Ours say it themselves; what the operating system raised is retried; anything else is not."""
    assert classify(exc) == (kind, retryable)
    failure = raised(exc)
    assert (failure.kind, failure.retryable) == (kind, retryable)


def test_a_leaf_whose_class_does_not_answer() -> None:
    """A leaf of somebody else's making that says nothing of retries is not retried."""
    assert classify(type.__call__(EvilLeaf, "x")) == ("EvilLeaf", False)


def test_our_errors_speak_in_sentences() -> None:
    """An error of ours is told with child, operation, request and remedy, not as a repr."""
    failure = raised(errors.StoreFull("no room", child="x", operation="put", request="r", remedy="make some"))
    assert failure.detail == "StoreFull: connector 'x', put(), request 'r': no room; make some"


def test_an_explicit_cause_is_told_behind_its_effect() -> None:
    """``raise ... from`` names the cause: both stand in the detail, and nothing in ``handling``."""

    def function() -> None:
        try:
            raise ConnectionResetError("by peer")  # noqa: TRY301  # it is the point
        except ConnectionResetError as exc:
            raise errors.PeerLost("the peer is gone") from exc

    failure = call(function, WHERE)
    assert isinstance(failure, Failure)
    assert failure.kind == "PeerLost"
    assert failure.detail == "PeerLost: the peer is gone from ConnectionResetError('by peer')"
    assert failure.handling == ""


def test_a_handler_that_breaks_does_not_hide_the_first_cause() -> None:
    """The first exception is the cause and decides; what the handler raised stands beside it in its own field."""

    def function() -> None:
        result = object()
        try:
            raise ConnectionResetError("block 17 failed")  # noqa: TRY301  # it is the point
        except ConnectionResetError:
            result.status  # type: ignore[attr-defined]  # noqa: B018  # the renamed field

    failure = call(function, WHERE)
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.retryable) == ("TransportError", True)
    assert failure.detail == "ConnectionResetError('block 17 failed')"
    assert "AttributeError" in failure.handling
    assert "status" in failure.handling


def test_handlers_that_break_in_a_row_are_all_told() -> None:
    """Of three exceptions, each raised while the one before was handled, the first is the cause."""

    def function() -> None:
        try:
            try:
                raise OSError("first")  # noqa: TRY301  # it is the point
            except OSError:
                raise ValueError("second")  # noqa: B904  # it is the point
        except ValueError:
            raise KeyError("third")  # noqa: B904  # it is the point

    failure = call(function, WHERE)
    assert isinstance(failure, Failure)
    assert failure.detail == "OSError('first')"
    assert failure.handling == "KeyError('third') after ValueError('second')"


def test_a_hidden_context_is_not_told() -> None:
    """``raise ... from None`` says that what came before does not matter."""

    def function() -> None:
        try:
            raise OSError("first")  # noqa: TRY301  # it is the point
        except OSError:
            raise ValueError("second") from None

    failure = call(function, WHERE)
    assert isinstance(failure, Failure)
    assert (failure.detail, failure.handling) == ("ValueError('second')", "")


def test_chains_without_end_are_cut() -> None:
    """A chain that goes round in circles ends after a few links."""
    a, b = ValueError("a"), ValueError("b")
    a.__cause__, b.__cause__ = b, a
    assert raised(a).detail.count(" from ") == 8
    a.__cause__ = b.__cause__ = None
    a.__suppress_context__ = b.__suppress_context__ = False
    a.__context__, b.__context__ = b, a
    assert raised(a).handling.count(" after ") <= 8


def test_peek_reads_once() -> None:
    """An attribute is read exactly once, and one that raises is told as broken, with its text."""
    reads: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            reads.append(name)
            if name == "missing":
                raise AttributeError(name)
            raise RuntimeError("no value")

    assert peek(Counting(), "state") == Broken("RuntimeError('no value')")
    assert type_name(peek(Counting(), "missing")) == "Absent"
    assert reads == ["state", "missing"]


def test_types_are_asked_and_not_their_owners() -> None:
    """Name and kinship of a type are found without calling into the object or its metaclass."""
    assert type_name(LiesAboutItsClass()) == "LiesAboutItsClass"
    assert type_name(type.__call__(EvilClass)) == "EvilClass"
    assert is_a(type.__call__(EvilLeaf, "x"), errors.KvbelayError)
    assert not is_a(type.__call__(EvilClass), errors.KvbelayError)
    assert not is_a(LiesAboutItsClass(), OSError)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (ReprRaises, "<ReprRaises whose repr raises>"),
        (ReprIsNoText, "<ReprIsNoText whose repr raises>"),
        (ReprCannotBeEncoded, "\\ud800 is half a character"),
        (ReprIsEvil, "looks like a text"),
        (lambda: 17, "17"),
        (lambda: "x" * (CLIP - 2), "'" + "x" * (CLIP - 2) + "'"),
    ],
    ids=["raises", "no text", "half a character", "evil text", "a number", "just short enough"],
)
def test_texts(make: Callable[[], object], text: str) -> None:
    """A text is found for anything, and a short one is told whole."""
    assert text_of(make()) == text


def test_long_texts_are_cut() -> None:
    """A text of any length is cut, and shows that it was."""
    assert text_of("x" * 10_000) == "'" + "x" * (CLIP - 1) + "..."


def test_an_error_nobody_raised() -> None:
    """A failure made of an error of ours carries its leaf, text and place."""
    failure = fail(errors.SaidNothing("nothing came back"), WHERE, handling="looking raised")
    assert failure == Failure("x", "get", "r", 7, "SaidNothing", False, "nothing came back", "looking raised")


def test_each_child_is_asked_whatever_another_raises() -> None:
    """The same call goes to all children in turn; what one raises, of whatever kind, is told with its name."""
    heard: list[tuple[object, ...]] = []
    failed: list[tuple[str, str]] = []

    def breaks(*_: object) -> None:
        raise type.__call__(EvilClass)

    def ends(*_: object) -> None:
        raise GeneratorExit

    calls = [("a", lambda *args: heard.append(("a", *args))), ("b", breaks), ("c", ends)]
    calls.append(("d", lambda *args: heard.append(("d", *args))))

    def tell(name: str, exc: BaseException) -> None:
        failed.append((name, type_name(exc)))

    each1(calls, tell)(1)
    each3(calls, tell)(1, 2, 3)
    assert heard == [("a", 1), ("d", 1), ("a", 1, 2, 3), ("d", 1, 2, 3)]
    assert failed == [("b", "EvilClass"), ("c", "GeneratorExit")] * 2


@pytest.mark.parametrize("exc", [KeyboardInterrupt(), SystemExit(3)])
def test_each_lets_pass_what_the_process_is_told(exc: BaseException) -> None:
    """Who is told to end does not ask the other children first."""
    asked: list[str] = []

    def told(*_: object) -> None:
        raise exc

    calls = [("a", told), ("b", lambda *_: asked.append("b"))]
    with pytest.raises(type(exc)):
        each1(calls, lambda *_: None)(1)
    with pytest.raises(type(exc)):
        each3(calls, lambda *_: None)(1, 2, 3)
    assert asked == []


class Listener:
    """Takes what `gather` tells, on a clock that a call moves on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slow_s = 1.0
        self.nothing: object = None
        self.told: list[tuple[str, object]] = []

    def clock(self) -> float:
        return self.now

    def failed(self, owner: str, exc: BaseException) -> Failure:
        self.told.append((owner, exc))
        return describe(exc, Where(owner, "hook"))

    def slow(self, owner: str, seconds: float) -> None:
        self.told.append((owner, seconds))

    def call(self, seconds: float, raises: BaseException | None = None) -> object:
        self.now += seconds
        if raises is not None:
            raise raises
        return seconds or None


WAYS = ("gather", "hand")


def ask(way: str, listener: Listener, *calls: tuple[str, float, BaseException | None]) -> list[tuple[str, object]]:
    """Each owner's call takes so many seconds, and raises if there is something to raise."""
    if way == "gather":
        return gather([(owner, partial(listener.call, *plan)) for owner, *plan in calls], listener)()
    return hand([(owner, lambda plan: listener.call(*plan), plan) for owner, *plan in calls], listener)


@pytest.mark.parametrize("way", WAYS)
def test_gather_takes_every_answer(way: str) -> None:
    """Each is asked whatever another raises, and who is slow is named with the time that it took itself."""
    listener, broken = Listener(), RuntimeError("no")
    answers = dict(ask(way, listener, ("a", 0.5, None), ("b", 3.0, broken), ("c", 1, None)))
    assert (answers["a"], answers["c"]) == (0.5, 1)
    assert isinstance(answers["b"], Failure)
    assert listener.told == [("b", broken), ("b", 3.0)]


@pytest.mark.parametrize("way", WAYS)
def test_gather_leaves_out_what_is_no_answer(way: str) -> None:
    """Who answers nothing is not in the list, and it is the asker who says what nothing is."""
    listener = Listener()
    assert ask(way, listener, ("a", 0, None), ("b", 0.5, None)) == [("b", 0.5)]
    listener.nothing = 0.5
    assert ask(way, listener, ("a", 0, None), ("b", 0.5, None)) == [("a", None)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("exc", [KeyboardInterrupt(), SystemExit(3)])
def test_gather_lets_pass_what_the_process_is_told(exc: BaseException, way: str) -> None:
    """An operator's Ctrl-C in a child's hook is not that child's failure."""
    with pytest.raises(type(exc)):
        ask(way, Listener(), ("a", 0.0, exc))
