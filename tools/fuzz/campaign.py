"""One target under atheris, in a process of its own: ``python -m fuzz.campaign TARGET [libFuzzer's arguments]``."""

from __future__ import annotations

import sys

import atheris

DECODERS = ["kvbelay.core", "kvbelay.connectors", "kvbelay.runtime.config", "kvbelay.testing.traces"]
"""What coverage is measured of."""

with atheris.instrument_imports(include=DECODERS, enable_loader_override=False):
    from fuzz.mutate import mutated
    from fuzz.target import Shape
    from fuzz.targets import target

    CHOSEN = target(sys.argv[1])


def main() -> None:
    """Fuzz until the budget is spent, or something is found."""
    shape = CHOSEN.shape

    def mutate(data: bytes, limit: int, seed: int) -> bytes:
        return mutated(data, shape or Shape(bytes, bytes), limit, seed, atheris.Mutate)

    extra = {"custom_mutator": mutate} if shape is not None else {}
    atheris.Setup([sys.argv[0], *sys.argv[2:]], CHOSEN.take, **extra)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
