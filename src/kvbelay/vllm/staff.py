"""All children of one side of the guard, and how the same hook is asked of each of them.

An engine asks some fifteen hooks in every step: each child's method is looked up once, and nothing is made for a
child that answers at once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from kvbelay.core.boundary import ABSENT, Broken, Where, describe, gather, hand, peek
from kvbelay.core.model import Failure
from kvbelay.vllm.children import SLOW_S, Guarded

DUE = frozenset({"get_block_ids_with_load_errors", "get_transfer_results", "take_events"})
"""Hooks to which None is an answer, and a wrong one."""


class Staff:
    """The children by name, also those that could not start; iterating gives those that serve."""

    def __init__(self, children: list[Guarded]) -> None:
        self.all = {child.name: child for child in children}
        self._hooks: dict[str, _Hook] = {}
        self.asks = _Asks(self._hook)
        """By hook: asks the serving children, and gives what they answer; a `Failure` for one that raised, which is
        logged and counted. None is no answer, and left out, unless the hook is one of `DUE`.
        """
        self.serving: tuple[Guarded, ...] = ()
        self.changed()

    def __iter__(self) -> Iterator[Guarded]:
        return iter(self.serving)

    def __len__(self) -> int:
        return len(self.serving)

    def __getitem__(self, name: str) -> Guarded:
        return self.all[name]

    def __contains__(self, name: object) -> bool:
        return name in self.all

    def get(self, name: str) -> Guarded | None:
        """The child of that name, if it serves."""
        child = self.all.get(name)
        return child if child is not None and child.connector is not None else None

    def changed(self) -> None:
        """A child serves no more."""
        self.serving = tuple(child for child in self.all.values() if child.connector is not None)
        for hook in self._hooks.values():
            hook.look_up(self.serving)

    def give(self, hook: str, things: Mapping[str, object]) -> list[tuple[Guarded, object]]:
        """Ask, where each child is given what stands under its name, and others are not asked."""
        asked = self._hook(hook)
        return hand([(child, do, things[child.name]) for child, do in asked.calls if child.name in things], asked)

    def _hook(self, name: str) -> _Hook:
        hook = self._hooks.get(name)
        if hook is None:
            hook = self._hooks[name] = _Hook(name)
            hook.look_up(self.serving)
        return hook


class _Asks(dict[str, Callable[..., list[tuple[Guarded, object]]]]):
    """A dictionary, since to find an entry takes no call of ours; entries are made when they are first asked for."""

    def __init__(self, make: Callable[[str], _Hook]) -> None:
        self._make = make

    def __missing__(self, hook: str) -> Callable[..., list[tuple[Guarded, object]]]:
        ask = self[hook] = self._make(hook).ask
        return ask


class _Hook:
    """One hook of all children that serve."""

    def __init__(self, name: str) -> None:
        self.clock = time.perf_counter
        self.slow_s = SLOW_S
        self.nothing: object = self if name in DUE else None
        self.calls: list[tuple[Guarded, Callable[..., object]]] = []
        self.ask = gather(self.calls, self)
        self._name = name

    def look_up(self, children: tuple[Guarded, ...]) -> None:
        self.calls[:] = [(child, method_of(child.connector, self._name)) for child in children]

    def failed(self, child: Guarded, exc: BaseException) -> Failure:
        failure = describe(exc, Where(child.name, self._name))
        child.note(failure)
        return failure

    def slow(self, child: Guarded, seconds: float) -> None:
        child.took(self._name, seconds)


def method_of(connector: object, hook: str) -> Callable[..., object]:
    """A child's method. Where looking it up raises, so does calling it."""
    method = peek(connector, hook)
    if callable(method) and not isinstance(method, Broken):
        return method
    why = "has no" if method is ABSENT else f"raises for ({method})"

    def missing(*_: object, **__: object) -> object:
        msg = f"the connector {why} {hook}"
        raise AttributeError(msg)

    return missing
