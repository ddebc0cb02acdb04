"""Has one kind of pair up at a time: the machine has two cores, and memory for no more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from children import Child
from dance import Plain
from pair import LOAD_S, Pair
from server import Server

P = TypeVar("P", bound=Pair)


class Stage:
    """Pairs by kind, of which the last one asked for is up. ``folder`` makes a new folder of a name.

    ``known`` gives a model's folder, and the right answers of that model.
    """

    def __init__(self, known: Callable[[str], tuple[Path, Plain]], folder: Callable[[str], Path]) -> None:
        self.known = known
        self._folder = folder
        self._kind = ""
        self._pair: Pair | None = None

    def has(self, kind: str, make: Callable[[Path], P]) -> P:
        """The pair of this kind, with all its servers running."""
        if self._pair is None or self._kind != kind:
            self.clear()
            self._kind, self._pair = kind, make(self._folder(kind))
        pair: P = self._pair  # type: ignore[assignment]  # one kind is always made in the same way
        pair.start()
        return pair

    def pair(
        self,
        kind: str,
        children: Sequence[Child],
        *,
        options: Mapping[str, Any] | None,
        environment: Mapping[str, str] | None = None,
        blocks: int = 80,
    ) -> Pair:
        """A pair with the same children on both sides, guarded with these options, or stock; of the tiny model."""
        model, plain = self.known("tiny")
        if options is not None:
            options = {"load_s": LOAD_S, **options}

        def make(folder: Path) -> Pair:
            made = [
                Server(
                    side,
                    model,
                    folder,
                    children=children,
                    options=options,
                    blocks=blocks,
                    environment=environment,
                )
                for side in ("prefill", "decode")
            ]
            return Pair(made[0], made[1], plain)

        return self.has(kind, make)

    def clear(self) -> None:
        """End what is up."""
        if self._pair is not None:
            self._pair.close()
        self._pair = None
