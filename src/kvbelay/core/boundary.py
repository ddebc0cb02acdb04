"""The error boundary: the one place that catches everything.

Whatever is raised by a connector, a hook, a decoder or our own handling becomes a `Failure` made of our own fields.
Nothing here raises, whatever the object at hand does when it is looked at; only what the process itself is told
(KeyboardInterrupt, SystemExit) passes through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol, TypeGuard, TypeVar

import msgspec

from kvbelay import errors
from kvbelay.core.model import Failure

T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
Owner = TypeVar("Owner")
Whose_contra = TypeVar("Whose_contra", contravariant=True)

CLIP = 400
"""Most characters of a foreign text that are kept."""
CHAIN = 8
"""Most links of an exception chain that are followed."""


class Where(msgspec.Struct, frozen=True):
    """Whose call it was."""

    child: str
    operation: str
    request: str = ""
    epoch: int = 0


class Broken(msgspec.Struct, frozen=True):
    """An attribute that raised when it was read; ``text`` says what."""

    text: str


class Absent:
    """The type of `ABSENT`: the object has no such attribute."""


ABSENT: Final = Absent()


def call(function: Callable[[], T], where: Where) -> T | Failure:
    """What the function returns, or a `Failure` that says what it raised."""
    try:
        return function()
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:
        return describe(exc, where)


def each1(
    calls: Iterable[tuple[str, Callable[[A], object]]], failed: Callable[[str, BaseException], None]
) -> Callable[[A], None]:
    """A function that makes the same call, with one argument, of several children, by name. What one raises goes to
    ``failed``, and the others are asked. ``calls`` is read at each call.

    For hooks that an engine calls for every layer: no object is made unless something is raised.
    """

    def ask(first: A) -> None:
        for name, function in calls:
            try:
                function(first)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:
                failed(name, exc)

    return ask


def each3(
    calls: Iterable[tuple[str, Callable[[A, B, C], object]]], failed: Callable[[str, BaseException], None]
) -> Callable[[A, B, C], None]:
    """The same with three arguments: to pass on any number of them takes a fifth longer."""

    def ask(first: A, second: B, third: C) -> None:
        for name, function in calls:
            try:
                function(first, second, third)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:
                failed(name, exc)

    return ask


def insured(function: Callable[..., T], instead: Callable[..., T]) -> Callable[..., T]:
    """The function; where it raises, ``instead`` is called with the exception and the same arguments.

    The last line of defence around code of our own that a host calls and nobody catches.
    """

    def ask(*args: Any, **kwargs: Any) -> T:
        try:
            return function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            return instead(exc, *args, **kwargs)

    return ask


class Asker(Protocol[Whose_contra]):
    """Who makes the same call of several; see `gather`."""

    clock: Callable[[], float]
    slow_s: float
    """From which time on a call is worth a word."""
    nothing: object
    """The answer that is left out."""

    def failed(self, owner: Whose_contra, exc: BaseException) -> Failure:
        """What an owner raised, as its answer."""

    def slow(self, owner: Whose_contra, seconds: float) -> None:
        """An owner took long."""


def gather(
    calls: Iterable[tuple[Owner, Callable[..., object]]], asker: Asker[Owner]
) -> Callable[..., list[tuple[Owner, object]]]:
    """A function that makes the same call of several, and gives what was answered, by whom.

    For hooks that an engine calls in every step.
    """
    clock, slow_s, nothing = asker.clock, asker.slow_s, asker.nothing

    def ask(*args: object) -> list[tuple[Owner, object]]:
        answers: list[tuple[Owner, object]] = []
        began = clock()
        for owner, function in calls:
            try:
                answer = function(*args)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as exc:
                answer = asker.failed(owner, exc)
            ended = clock()
            if ended - began > slow_s:
                asker.slow(owner, ended - began)
            began = ended
            if answer is not nothing:
                answers.append((owner, answer))
        return answers

    return ask


def hand(calls: Iterable[tuple[Owner, Callable[[A], object], A]], asker: Asker[Owner]) -> list[tuple[Owner, object]]:
    """Call each with a thing of its own, and give what was answered, by whom."""
    answers: list[tuple[Owner, object]] = []
    clock, slow_s, nothing = asker.clock, asker.slow_s, asker.nothing
    began = clock()
    for owner, function, thing in calls:
        try:
            answer = function(thing)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:
            answer = asker.failed(owner, exc)
        ended = clock()
        if ended - began > slow_s:
            asker.slow(owner, ended - began)
        began = ended
        if answer is not nothing:
            answers.append((owner, answer))
    return answers


def peek(thing: object, name: str) -> object:
    """An attribute of a foreign object, read once: its value, `ABSENT`, or `Broken`."""
    try:
        return getattr(thing, name, ABSENT)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as exc:
        return Broken(text_of(exc))


def text_of(thing: object) -> str:
    """``repr``, clipped, of anything: also of an object whose repr raises or returns nonsense."""
    try:
        return _clip(repr(thing))
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # its own text could raise again: only the type's name is left
        return f"<{type_name(thing)} whose repr raises>"


def type_name(thing: object) -> str:
    """The name of an object's type, without asking the object or its metaclass."""
    return type.__dict__["__name__"].__get__(type(thing))  # type: ignore[no-any-return]


def describe(exc: BaseException, where: Where) -> Failure:
    """A `Failure` for an exception.

    An explicit ``raise ... from cause`` says what the cause was: both stand in ``detail``. An exception that was
    raised *while another was being handled* hides that other one: the first stands in ``detail``, and what came
    later in ``handling``.
    """
    later: list[str] = []
    seen = 0
    first = exc
    while seen < CHAIN:
        hidden = _hidden(first)
        if hidden is None:
            break
        later.append(_text(first))
        first = hidden
        seen += 1
    # Who raises one of our leaves chose it; anything else that hides another exception is a handler that broke.
    kind, retryable = classify(exc if is_a(exc, errors.KvbelayError) else first)
    detail = _text(first)
    link: BaseException = first
    for _ in range(CHAIN):
        cause = peek(link, "__cause__")
        if not is_a(cause, BaseException):
            break
        detail += " from " + _text(cause)
        link = cause
    return Failure(
        child=where.child,
        operation=where.operation,
        request=where.request,
        epoch=where.epoch,
        kind=kind,
        retryable=retryable,
        detail=detail[: 2 * CLIP],
        handling=" after ".join(later)[: 2 * CLIP],
    )


def fail(error: errors.KvbelayError, where: Where, *, handling: str = "") -> Failure:
    """A `Failure` for an error of ours that nobody raised."""
    return Failure(
        child=where.child,
        operation=where.operation,
        request=where.request,
        epoch=where.epoch,
        kind=type(error).__name__,
        retryable=error.retryable,
        detail=str(error)[: 2 * CLIP],
        handling=handling[: 2 * CLIP],
    )


def classify(exc: BaseException) -> tuple[str, bool]:
    """Name of the leaf that stands for an exception, and whether trying again can help."""
    if is_a(exc, errors.KvbelayError):
        return type_name(exc), peek(type(exc), "retryable") is True
    if is_a(exc, OSError):
        return errors.TransportError.__name__, errors.TransportError.retryable
    return errors.ForeignError.__name__, errors.ForeignError.retryable


def is_a(thing: object, cls: type[C]) -> TypeGuard[C]:
    """``isinstance`` by the real type: a foreign ``__class__`` is not asked."""
    return issubclass(type(thing), cls)


def _text(exc: BaseException) -> str:
    """Our own errors speak in sentences; of any other, the repr."""
    if is_a(exc, errors.KvbelayError):
        try:
            return _clip(f"{type_name(exc)}: {exc}")
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as broken:  # a subclass of somebody else's
            return f"{type_name(exc)} whose text raises {type_name(broken)}"
    return text_of(exc)


def _clip(text: str) -> str:
    """The start of a text, fit to be encoded: a lone surrogate would break whoever sends or logs it."""
    start = str.__getitem__(text, slice(0, CLIP)).encode("utf-8", "backslashreplace").decode()
    return start if str.__len__(text) <= CLIP else start + "..."


def _hidden(exc: BaseException) -> BaseException | None:
    """The exception that was being handled when this one was raised, unless this one names it as its cause."""
    if peek(exc, "__suppress_context__") is True or is_a(peek(exc, "__cause__"), BaseException):
        return None
    context = peek(exc, "__context__")
    return context if is_a(context, BaseException) else None
