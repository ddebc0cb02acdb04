"""What a check of the kit proves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

KIT_VERSION = 1
"""Grows when a check comes, or becomes stricter, that a connector may fail which passed the kit before."""

_PROVES = "__proves__"


def proves(*invariants: str) -> Callable[[F], F]:
    """Say which invariants (keys of `kvbelay.testing.INVARIANTS`) a connector keeps that passes this check."""

    def mark(check: F) -> F:
        setattr(check, _PROVES, invariants)
        return check

    return mark


def proofs_of(check: object) -> tuple[str, ...]:
    """What `proves` said of it; nothing of a function that is no check."""
    return tuple(getattr(check, _PROVES, ()))


def checks_of(case: type) -> dict[str, Callable[..., None]]:
    """The checks that a class of the kit has, in the order in which its bases and then itself define them."""
    names = [name for cls in reversed(case.__mro__) for name in vars(cls) if name.startswith("test_")]
    return {name: getattr(case, name) for name in names if callable(getattr(case, name))}
