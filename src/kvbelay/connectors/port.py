"""The port: what a connector is.

Every call blocks until it is over. It returns a result or raises; the layer turns what it raises into a failure, and
decides about retries. **Returned or raised means that nobody touches the batch's memory any more.** A backend that
cannot promise this also implements `Unfenced`, and the layer stages its transfers.

`OSError` (time-outs included) is retried by default, any other foreign exception is not; raise a leaf of
`kvbelay.errors` to say it exactly. `get` and `put` may run concurrently, also for the same request; `close` may
overlap any other call.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, runtime_checkable

import msgspec

from kvbelay.core.model import BatchId, BatchResult, Fingerprint, Miss, Ticket, TransferBatch

PORT_VERSION = 1
"""Grows when a connector that was written for the version before could be called, or read, wrongly; see
``docs/write-a-connector.md``. A backend that says its ``port_version`` is opened only by a kvbelay that knows it.
"""


class Deadline(Protocol):
    """How long a call may take, and whether it is still wanted. Ask in every loop."""

    def remaining_s(self) -> float:
        """Seconds left, more than zero. Raises `DeadlineExceeded` or `Cancelled`."""
        ...

    def sleep(self, seconds: float) -> None:
        """Wait that long; raises `DeadlineExceeded` or `Cancelled` as soon as either is true."""
        ...


class Connector(Protocol):
    """One open backend, under the name that the configuration gave it."""

    def lookup(self, ids: Sequence[BatchId], within: Deadline) -> Sequence[Ticket]:
        """Tickets for the leading hits: one for each of ``ids`` up to the first that is not there."""
        ...

    def put(self, batch: TransferBatch, within: Deadline) -> Ticket:
        """Take the batch, and return what a reader needs. A ticket with a lease means that readers are served from
        the batch's own memory until `Publishes.released` names it.
        """
        ...

    def get(self, batch: TransferBatch, ticket: Ticket, within: Deadline) -> BatchResult | Miss:
        """Bring the batch that the ticket names into the batch's memory, whole."""
        ...

    def release(self, ticket: Ticket, within: Deadline) -> None:
        """This side is done with the ticket. Idempotent; called by readers, and by the source to withdraw it."""
        ...

    def probe(self, within: Deadline) -> None:
        """One round trip that proves that the backend serves; raises if it does not."""
        ...

    def close(self) -> None:
        """Give up everything that the connector holds. Idempotent, bounded, and allowed during other calls."""
        ...


@runtime_checkable
class Publishes(Protocol):
    """A connector whose `put` gives leases."""

    def released(self, within: Deadline) -> Sequence[Ticket]:
        """Tickets of this source that nobody reads any more: released by the reader, withdrawn, or expired and quiet.
        Each is named once. Waits until there is one; at the deadline returns an empty sequence.
        """
        ...


@runtime_checkable
class Unfenced(Protocol):
    """A connector whose backend may write into a batch's memory after `get` has ended, or read it after `put`."""

    def drain(self, batch: TransferBatch, within: Deadline) -> bool:
        """True once nobody can touch the batch's memory any more; False if that is not known at the deadline."""
        ...


class Backend(Protocol):
    """What an entry point in the group ``kvbelay.connectors`` names: how to open a connector from its configuration.

    It may say for which version of the port it was written: ``port_version = 1``.
    """

    Config: ClassVar[type[msgspec.Struct]]
    digest_in_pass: ClassVar[bool]
    """Whether `BatchResult.landed_digest` is computed from the bytes at the destination. Where it is not, the layer
    computes it again before it believes a success."""

    def open(self, config: Any, *, child: str, fingerprint: Fingerprint) -> Connector:
        """Open it. ``config`` is an instance of `Config`. Raises if the backend cannot be used."""
        ...


@runtime_checkable
class Wrapping(Protocol):
    """A `Backend` whose connectors stand around another one, which the registry prepares and opens first.

    `Config` has the fields ``connector`` (its kind) and ``config`` (its own fields); `wrap` stands in for ``open``.
    """

    Config: ClassVar[type[msgspec.Struct]]
    digest_in_pass: ClassVar[bool]

    def wrap(self, inner: Connector, config: Any, *, child: str) -> Connector:
        """Stand around ``inner``, which is open, and belongs to the wrapper from now on."""
        ...


@runtime_checkable
class Examined(Protocol):
    """A `Backend` that can say what of this machine stands in its way; ``kvbelay doctor`` asks it."""

    def doctor(self) -> Iterable[Mapping[str, object]]:
        """Findings, each a mapping with ``what`` and, as far as they are known, ``level`` ("problem", "warning", "could
        not check", "note"), ``evidence`` (of ``source``, ``line`` and ``text``), ``cause``, ``remedy`` and ``page``.
        Nothing is opened, and it takes a moment.
        """
        ...
