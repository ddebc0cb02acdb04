"""Every error that kvbelay raises or reports, under one root.

Each leaf says whether trying again can help (``retryable``) and who has to act (``fault``). The name of a leaf is
what stands in ``Failure.kind``, in metrics and in logs.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Fault(Enum):
    """Who has to act."""

    OPERATOR = "operator"
    CALLER = "caller"
    CONNECTOR = "connector"
    PEER = "peer"


class KvbelayError(Exception):
    """The root. ``str()`` names the connector, the operation, the request and the remedy, as far as they are known.

    Parameters
    ----------
    what
        What happened, as a sentence without a full stop.
    child, operation, request
        Where: the connector's name, the port's method and the request's id; empty where there is none.
    remedy
        What the reader can do about it; empty where nothing sensible can be said.
    """

    retryable: ClassVar[bool] = False
    fault: ClassVar[Fault] = Fault.CONNECTOR

    def __init__(self, what: str, *, child: str = "", operation: str = "", request: str = "", remedy: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.child = child
        self.operation = operation
        self.request = request
        self.remedy = remedy

    def __str__(self) -> str:
        where = [
            f"connector {self.child!r}" if self.child else "",
            f"{self.operation}()" if self.operation else "",
            f"request {self.request!r}" if self.request else "",
        ]
        place = ", ".join(part for part in where if part)
        text = f"{place}: {self.what}" if place else self.what
        return f"{text}; {self.remedy}" if self.remedy else text


class ConfigError(KvbelayError):
    """A configuration that cannot be used; ``source`` is the file (or what stands for it), ``field`` the path in it."""

    fault = Fault.OPERATOR

    def __init__(self, what: str, *, source: str = "", field: str = "", remedy: str = "") -> None:
        super().__init__(what, remedy=remedy)
        self.source = source
        self.field = field

    def __str__(self) -> str:
        place = ": ".join(part for part in (self.source, self.field) if part)
        text = f"{place}: {self.what}" if place else self.what
        return f"{text}; {self.remedy}" if self.remedy else text


class MissingExtra(ConfigError):
    """A part of kvbelay was asked for whose optional dependency is not installed."""


class InvalidBatch(KvbelayError):
    """The caller's spans, ranges or tickets contradict each other."""

    fault = Fault.CALLER


class RequestBusy(KvbelayError):
    """The same request already moves in this direction."""

    fault = Fault.CALLER


class CacheFull(KvbelayError):
    """The engine's KV cache has fewer blocks free than the sequence needs."""

    fault = Fault.CALLER


class Closed(KvbelayError):
    """The connector or the layer was closed before the call, or while it ran."""

    fault = Fault.CALLER


class Cancelled(KvbelayError):
    """The request was cancelled while the call ran."""

    fault = Fault.CALLER


class DeadlineExceeded(KvbelayError):
    """The time allowed for an attempt is over."""

    retryable = True
    fault = Fault.PEER


class PeerLost(KvbelayError):
    """The peer refused, reset or closed the connection: it is down or unreachable."""

    retryable = True
    fault = Fault.PEER


class PeerRestarted(KvbelayError):
    """The peer runs, but as another incarnation than the one that issued the ticket: what it held is gone."""

    fault = Fault.PEER


class PeerFailed(KvbelayError):
    """The peer answered that it could not serve the call; its own cause is in the text."""

    retryable = True
    fault = Fault.PEER


class TicketExpired(KvbelayError):
    """The source no longer holds what the ticket names: its lease ended, or it was released or evicted."""

    fault = Fault.PEER


class ProtocolViolation(KvbelayError):
    """A peer's bytes, or a stored file's, break the protocol or one of its limits."""

    fault = Fault.PEER


class FingerprintMismatch(KvbelayError):
    """Both sides hold KV of different models or layouts; ``field`` names the first difference."""

    fault = Fault.OPERATOR

    def __init__(
        self, what: str, *, field: str = "", child: str = "", operation: str = "", request: str = "", remedy: str = ""
    ) -> None:
        super().__init__(what, child=child, operation=operation, request=request, remedy=remedy)
        self.field = field


class AuthenticationFailed(KvbelayError):
    """One side could not prove who it is, or demands another proof than the other one gives."""

    fault = Fault.OPERATOR


class CorruptData(KvbelayError):
    """The bytes that landed are not the bytes that left: their digests differ."""

    retryable = True


class ShortTransfer(KvbelayError):
    """Less than the whole batch landed."""

    retryable = True


class StoreFull(KvbelayError):
    """The backend has no room for the batch, and nothing that it may evict."""

    fault = Fault.OPERATOR


class SaidNothing(KvbelayError):
    """A call came back with a result that says neither success, nor a miss, nor a failure."""


class UnknownShape(KvbelayError):
    """A foreign result, hook or peer has a shape that cannot be understood safely; the text names what differs."""


class UnverifiableLayout(KvbelayError):
    """KV that lies in memory in a way for which there is no digest; ``layer`` names the first such layer."""

    fault = Fault.OPERATOR

    def __init__(
        self, what: str, *, layer: str = "", child: str = "", operation: str = "", request: str = "", remedy: str = ""
    ) -> None:
        super().__init__(what, child=child, operation=operation, request=request, remedy=remedy)
        self.layer = layer


class TransferFailed(KvbelayError):
    """A foreign result reported failure in its own words."""

    retryable = True


class TransportError(KvbelayError):
    """The operating system refused or broke an operation (any OSError, time-outs included)."""

    retryable = True


class ForeignError(KvbelayError):
    """A connector raised something that is neither ours nor the operating system's."""


class ChildUnavailable(KvbelayError):
    """The connector never started, is being drained, or was removed."""

    fault = Fault.OPERATOR


class CircuitOpen(KvbelayError):
    """The connector failed too often of late and is left alone until a probe succeeds."""


class PoolExhausted(KvbelayError):
    """Every thread of the connector is stuck in a call that has not returned."""


class QuarantineFull(KvbelayError):
    """The connector holds back as many blocks as it may: no new transfer until one of them is confirmed quiet."""
