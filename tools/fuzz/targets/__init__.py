"""All targets, by name. A target's module is imported when it is asked for: each is fuzzed in a process of its own."""

from __future__ import annotations

from importlib import import_module

from fuzz.target import Target

MODULES = {
    "stream-hello": "frames",
    "stream-request": "frames",
    "stream-answer": "frames",
    "stream-called": "greetings",
    "stream-caller": "greetings",
    "stream-places": "greetings",
    "link-hello": "link",
    "link-welcome": "link",
    "link-said": "link",
    "link-served": "link",
    "tickets": "tickets",
    "file-record": "records",
    "file-directory": "directory",
    "config-json": "configuration",
    "config-toml": "configuration",
    "requests": "requests",
    "traces": "traces",
    "verdicts": "verdicts",
}


def target(name: str) -> Target:
    """The target of that name."""
    found: tuple[Target, ...] = import_module(f"fuzz.targets.{MODULES[name]}").TARGETS
    return next(one for one in found if one.name == name)
