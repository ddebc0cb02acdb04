"""What a peer answers: the message that was due, or a typed error."""

from __future__ import annotations

from typing import TypeVar

from kvbelay.connectors.stream.frames import ANSWER, Answer, Done, Found, Hello, Placed, Sending
from kvbelay.errors import ProtocolViolation
from kvbelay.net.frames import Refused, error_of
from kvbelay.net.link import Ask, Link

A = TypeVar("A", Done, Found, Hello, Placed, Sending)


def expect(link: Link, kind: type[A], ask: Ask) -> A:
    """The next message, of this kind. Raises what stands for a refusal, and `ProtocolViolation` for any other."""
    answer: Answer = link.receive(ANSWER, ask)
    if isinstance(answer, Refused):
        raise error_of(answer, link.peer)
    if not isinstance(answer, kind):
        msg = f"{link.peer} answered with {type(answer).__name__} where {kind.__name__} was due"
        raise ProtocolViolation(msg)
    return answer
