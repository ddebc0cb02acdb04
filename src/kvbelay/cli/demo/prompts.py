"""Prompts of the demo, and reading the user's own."""

from __future__ import annotations

from pathlib import Path

from kvbelay.errors import ConfigError

PROMPTS = (
    "What is the capital of France, and which river flows through it? Answer in one sentence.",
    "A train leaves at nine in the morning and arrives at a quarter past one. How long was it on the way?",
    "My neighbour's cat sits on my roof every evening and will not come down. What would you suggest that I do?",
    "Name three things that a sailor checks before leaving the harbour, and say in a few words why each matters.",
    "Explain to a child of seven why the moon seems to follow us when we look out of the window of a car at night.",
    "Write the first two lines of a poem about a lighthouse keeper who has not seen another person all winter.",
    "I have flour, eggs, milk and a little sugar in the kitchen, and twenty minutes. What can I cook for two people?",
    "Which is heavier, a kilogram of feathers or a kilogram of iron? Explain your answer in one short sentence.",
    "Give me a short and polite message that tells a colleague that our meeting is moved from Monday to Thursday.",
    "Why do leaves change their colour in autumn, and why do some trees keep theirs through the whole of the winter?",
    "What does a climber mean by belaying, and what happens to the rope when the person who is climbing slips?",
    "List the planets of the solar system in order of their distance from the sun, beginning with the nearest one.",
    "Translate the sentence 'the library opens at ten and closes at six' into French, then say it in other words.",
    "A farmer has seventeen sheep, and all but nine run away. How many sheep are left? Explain how you know it.",
)


def read_prompts(path: Path) -> tuple[str, ...]:
    """One prompt a line; empty lines do not count. Raises `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        msg = f"the prompts cannot be read: {exc}"
        raise ConfigError(msg, source=str(path), remedy="name a text file in UTF-8, one prompt a line") from exc
    prompts = tuple(line.strip() for line in lines if line.strip())
    if not prompts:
        msg = "there is no prompt"
        raise ConfigError(msg, source=str(path), remedy="write one prompt a line")
    return prompts
