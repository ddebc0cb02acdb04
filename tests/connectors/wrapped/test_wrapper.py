"""A wrapper passes everything on, and has the capabilities of what it wraps."""

from __future__ import annotations

from typing import Any

import pytest

from kvbelay.connectors.port import Publishes, Unfenced
from kvbelay.connectors.wrapper import Wrapper
from kvbelay.runtime.deadline import Until


class Recorder:
    """Answers every call of the port with its own name and arguments."""

    def __init__(self) -> None:
        self.closed = 0

    def lookup(self, *given: Any) -> Any:
        return ("lookup", *given)

    def put(self, *given: Any) -> Any:
        return ("put", *given)

    def get(self, *given: Any) -> Any:
        return ("get", *given)

    def release(self, *given: Any) -> None:
        self.last: Any = ("release", *given)

    def probe(self, *given: Any) -> None:
        self.last = ("probe", *given)

    def close(self) -> None:
        self.closed += 1


class Publisher(Recorder):
    def released(self, *given: Any) -> Any:
        return ("released", *given)


class Engine(Recorder):
    def drain(self, *given: Any) -> Any:
        return ("drain", *given)


class Both(Publisher, Engine):
    pass


def test_everything_is_passed_on() -> None:
    """Arguments, results and errors go through unchanged."""
    inner = Both()
    wrapper: Any = Wrapper(inner)
    within = Until(5)
    assert wrapper.lookup([1], within) == ("lookup", [1], within)
    assert wrapper.put(1, within) == ("put", 1, within)
    assert wrapper.get(1, 2, within) == ("get", 1, 2, within)
    assert wrapper.released(within) == ("released", within)
    assert wrapper.drain(1, within) == ("drain", 1, within)
    wrapper.release(3, within)
    assert inner.last == ("release", 3, within)
    wrapper.probe(within)
    assert inner.last == ("probe", within)
    wrapper.close()
    assert inner.closed == 1


@pytest.mark.parametrize("inner", [Recorder, Publisher, Engine, Both], ids=lambda cls: cls.__name__)
def test_capabilities_are_those_of_the_inner_one(inner: Any) -> None:
    """The protocols say of the wrapper what they say of the connector inside, through several wrappers too."""
    for wrapper in (Wrapper(inner()), Wrapper(Wrapper(inner()))):
        assert isinstance(wrapper, Publishes) == issubclass(inner, Publisher)
        assert isinstance(wrapper, Unfenced) == issubclass(inner, Engine)
