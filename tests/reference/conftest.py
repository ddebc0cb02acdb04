"""The tiny model, and what several test files do with it."""

from __future__ import annotations

import pytest

from kvbelay.reference import Model, tiny_model


@pytest.fixture(scope="session")
def tiny() -> Model:
    return tiny_model()


@pytest.fixture(scope="session")
def prompt(tiny: Model) -> list[int]:
    """77 tokens: with blocks of 8, nine whole ones and a tail of five."""
    return tiny.tokenizer.encode("A climber who belays well is forgotten; one who does not is remembered twice.")
