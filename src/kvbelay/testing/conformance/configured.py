"""A case for a backend that is opened from a configuration, as an engine opens it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbelay.connectors.port import Connector
from kvbelay.connectors.registry import fenced, prepare_object
from kvbelay.core.model import Fingerprint
from kvbelay.errors import ConfigError
from kvbelay.testing.conformance import ConnectorConformance
from kvbelay.testing.conformance.capabilities import CAPABILITIES, CanFreeze, Evicts, GivesLeases
from kvbelay.testing.conformance.kit import Kit

ARENA_NBYTES = 2**26
"""Of an `Unfenced` connector, which is staged as the runtime does it."""
CAPACITY_NBYTES, LEASE_S = 2**28, 30.0
"""Stand for the placeholders where a check asks for nothing else."""

SCRATCH, CAPACITY, LEASE = "{scratch}", "{capacity_nbytes}", "{lease_s}"
NEEDS = {Evicts.__name__: CAPACITY, GivesLeases.__name__: LEASE}
"""What the kit has to be able to choose, for a capability to be checked."""


class Subject(msgspec.Struct, frozen=True):
    """A backend, and how it is opened.

    In the configurations ``{scratch}`` in a text stands for a fresh directory; a text that is ``{capacity_nbytes}``
    or ``{lease_s}`` stands for a number.
    """

    name: str
    backend: Any
    config: dict[str, Any] = {}
    reader: dict[str, Any] | None = None
    """Of the side that gets, where it differs."""
    claims: tuple[str, ...] = ()
    """Keys of `CAPABILITIES`."""
    keeps: tuple[str, ...] = ()
    """`Kit.keeps`."""


class Configured(Kit):
    """How a subject is opened; `case_of` puts the checks behind it."""

    subject: Subject

    @classmethod
    def shares(cls) -> bool:
        """Whether every check gets the same place, as far as its configuration says."""
        return SCRATCH not in str(cls.subject.config)

    def open_source(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        return self._open(self.subject.config, scratch, fingerprint)

    def open_reader(self, scratch: Path, fingerprint: Fingerprint) -> Connector:
        config = self.subject.config if self.subject.reader is None else self.subject.reader
        return self._open(config, scratch, fingerprint)

    def open_bounded(self, scratch: Path, fingerprint: Fingerprint, capacity_nbytes: int) -> Connector:
        own = scratch / "bounded"
        own.mkdir(exist_ok=True)
        return self._open(self.subject.config, own, fingerprint, capacity_nbytes=capacity_nbytes)

    def open_leasing(self, scratch: Path, fingerprint: Fingerprint, lease_s: float) -> Connector:
        return self._open(self.subject.config, scratch, fingerprint, lease_s=lease_s)

    def _open(
        self,
        config: Mapping[str, object],
        scratch: Path,
        fingerprint: Fingerprint,
        *,
        capacity_nbytes: int = CAPACITY_NBYTES,
        lease_s: float = LEASE_S,
    ) -> Connector:
        numbers = {CAPACITY: capacity_nbytes, LEASE: lease_s}
        filled = {key: _filled(value, str(scratch), numbers) for key, value in config.items()}
        prepared = prepare_object(self.child, self.subject.name, self.subject.backend, filled)
        return fenced(prepared.open(fingerprint), child=self.child, arena_nbytes=ARENA_NBYTES)


def case_of(subject: Subject) -> type[Kit]:
    """The class of a subject, with what it claims. Raises `ConfigError` where it cannot be checked."""
    for name in subject.claims:
        if name == CanFreeze.__name__:
            msg = f"{name} cannot be checked on a backend alone: the kit has to freeze it"
            raise ConfigError(msg, source="--capability", remedy="write a kit case that has frozen(), and name that")
        if name in NEEDS and not _mentions(subject.config, NEEDS[name]):
            msg = f'{name} cannot be checked: nothing in the configuration is "{NEEDS[name]}"'
            raise ConfigError(msg, source="--config", remedy="put it where the kit shall choose the number")
    bases: list[type] = [Configured, *(CAPABILITIES[name] for name in subject.claims), ConnectorConformance]
    return type(subject.name, tuple(bases), {"subject": subject, "keeps": subject.keeps})


def _filled(value: object, scratch: str, numbers: Mapping[str, float]) -> object:
    if isinstance(value, str):
        return numbers[value] if value in numbers else value.replace(SCRATCH, scratch)
    if isinstance(value, Mapping):
        return {key: _filled(each, scratch, numbers) for key, each in value.items()}
    if isinstance(value, Sequence):
        return [_filled(each, scratch, numbers) for each in value]
    return value


def _mentions(value: object, placeholder: str) -> bool:
    if isinstance(value, Mapping):
        return any(_mentions(each, placeholder) for each in value.values())
    if isinstance(value, list):
        return any(_mentions(each, placeholder) for each in value)
    return value == placeholder
