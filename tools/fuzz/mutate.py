"""Mutations that keep the form: bytes are decoded to plain values, one of which is changed, and encoded again.

Coverage sees Python code only, and most of what decides whether a message is understood happens in msgspec's C. Blind
flips of bits would rarely get past it.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import Any

import msgspec

from fuzz.target import Shape

LEAVES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        15,
        16,
        17,
        1 << 31,
        (1 << 63) - 1,
        1 << 63,
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63),
        10**40,
    ),
    *(0.0, -0.0, 1e308, -1e308, float("nan"), float("inf"), -float("inf"), 0.5),
    *(
        "",
        "a",
        "\x00",
        "`",
        "$",
        "\N{SNOWMAN}",
        "\ud800",
        "x" * 500,
        "a` - at `$.policy.circuit",
        "faulty",
        "memory",
        "!",
        "odd",
    ),
    *(b"", b"\x00", b"d" * 16, b"\xff" * 8, bytes(17)),
)
DEPTH = 400
"""How deep a value is nested into itself, at most."""


def mutated(data: bytes, shape: Shape, limit: int, seed: int, otherwise: Callable[[bytes, int], bytes]) -> bytes:
    """Another input, of at most ``limit`` bytes; where the form is lost, or now and then, what ``otherwise`` makes."""
    dice = random.Random(seed)  # noqa: S311  # reproducible
    if dice.random() < 0.3:  # noqa: PLR2004  # bytes must be fuzzed too
        return otherwise(data, limit)
    try:
        value = shape.load(data)
    except (msgspec.MsgspecError, RecursionError, ValueError, struct.error):
        return otherwise(data, limit)
    for _ in range(dice.randint(1, 3)):
        value = _changed(value, dice)
    try:
        made = shape.dump(value)
    except (msgspec.MsgspecError, OverflowError, RecursionError, TypeError, ValueError):
        return otherwise(data, limit)
    return made if len(made) <= limit else otherwise(data, limit)


def _changed(value: Any, dice: random.Random) -> Any:
    """The value with one of its parts changed, at whatever depth."""
    further_down = dice.random() < 0.8  # noqa: PLR2004  # most of a message lies there
    if isinstance(value, dict) and value and further_down:
        return _changed_dict(value, dice)
    if isinstance(value, list) and value and further_down:
        return _changed_list(value, dice)
    made = [dice.choice(LEAVES)] * 8
    if isinstance(value, dict | list):
        made.append(_nested(value, dice))
    elif isinstance(value, int):
        made.append(value + dice.choice([-1, 1, 1 << 32]))
    elif isinstance(value, bytes | str) and value:
        cut = dice.randrange(len(value))
        made.append(value[:cut] + value[cut + 1 :])
    return dice.choice(made)


def _changed_dict(value: dict[Any, Any], dice: random.Random) -> dict[Any, Any]:
    key = dice.choice(list(value))
    turn = dice.randrange(8)
    if turn == 0:
        return {name: part for name, part in value.items() if name != key}
    if turn == 1:
        return {**value, dice.choice([f"{key}x", str(dice.choice(LEAVES)), f"{key}` - at `$.{key}"]): value[key]}
    return {**value, key: _changed(value[key], dice)}


def _changed_list(value: list[Any], dice: random.Random) -> list[Any]:
    index = dice.randrange(len(value))
    turn = dice.randrange(8)
    if turn == 0:
        return [*value[:index], *value[index + 1 :]]
    if turn == 1:
        return [*value, *value[index:]]
    return [*value[:index], _changed(value[index], dice), *value[index + 1 :]]


def _nested(value: Any, dice: random.Random) -> Any:
    """The value inside itself, as a tree that leads to it many times over."""
    key = dice.choice(list(value)) if isinstance(value, dict) and value else None
    made = value
    for _ in range(dice.randint(1, DEPTH)):
        made = {**value, key: made} if isinstance(value, dict) else [made]
    return made
