"""A layer from a file: what opens, and the one error that names file, field and remedy where anything is wrong."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbelay.core.model import Result
from kvbelay.core.policy import Policy
from kvbelay.errors import ConfigError, MissingExtra
from kvbelay.runtime.belay import Belay
from kvbelay.runtime.config import Config, decode_config, open_belay, prepare_children, read_config

GOOD: dict[str, Any] = {
    "threads": 2,
    "policy": {"attempts": 3, "attempt_s": 2, "fallback": "hand back", "circuit": {"failures": 3}},
    "children": [
        {"name": "near", "connector": "memory", "config": {"store": "a", "capacity_nbytes": 1_000_000}},
        {"name": "far", "connector": "memory", "config": {"store": "b"}, "recheck": True, "arena_nbytes": 4096},
    ],
}
TOML = """
threads = 2
[policy]
attempts = 3
attempt_s = 2
fallback = "hand back"
[policy.circuit]
failures = 3
[[children]]
name = "near"
connector = "memory"
config = { store = "a", capacity_nbytes = 1_000_000 }
[[children]]
name = "far"
connector = "memory"
recheck = true
arena_nbytes = 4096
[children.config]
store = "b"
"""


def write(tmp_path: Path, raw: object, name: str = "belay.json") -> Path:
    path = tmp_path / name
    path.write_text(raw if isinstance(raw, str) else json.dumps(raw), encoding="utf-8")
    return path


def changed(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """The good configuration with one thing wrong."""
    raw: dict[str, Any] = json.loads(json.dumps(GOOD))
    change(raw)
    return raw


def refusal(path: Path) -> ConfigError:
    """The error of a file that cannot be used. Nothing of it may run then."""
    before = threading.enumerate()
    with pytest.raises(ConfigError) as caught:
        prepare_children(read_config(path), source=str(path))
    assert threading.enumerate() == before
    assert caught.value.source == str(path)
    assert caught.value.remedy
    assert str(caught.value).startswith(str(path))
    return caught.value


def test_both_formats_say_the_same(tmp_path: Path) -> None:
    """TOML and JSON are decoded into the same configuration."""
    config = read_config(write(tmp_path, GOOD))
    assert config == read_config(write(tmp_path, TOML, "belay.toml"))
    assert (config.threads, config.policy.attempts, config.policy.fallback) == (2, 3, Result.HAND_BACK)
    assert config.policy.drain_s == Policy().drain_s
    assert [(child.name, child.recheck) for child in config.children] == [("near", False), ("far", True)]


def test_a_layer_from_a_file(rig: Any, tmp_path: Path) -> None:
    """The children are there, in order, and what the file says of them holds."""
    belay = open_belay(read_config(write(tmp_path, GOOD)), rig.fingerprint, source="belay.json", seed=1)
    try:
        assert [state.name for state in belay.states()] == ["near", "far"]
        assert [belay._slots[name].digest_in_pass for name in ("near", "far")] == [True, False]
        assert belay._slots["near"].pool.size == 2
        source, into = rig.blocks("r").fill(), rig.blocks("r")
        saved = belay.save("r", source.batches, 5.0)
        assert {ticket.child for ticket in saved.tickets} == {"near", "far"}
        assert belay.load("r", saved.tickets, into.batches, 5.0).result is Result.LOADED
        assert into.good(source, source.stop)
    finally:
        belay.close()


def test_hooks_are_passed_on(rig: Any) -> None:
    """The hooks of a layer from a file are those that were given."""
    heard: list[object] = []
    config = decode_config(GOOD, source="a dict")
    belay = open_belay(config, rig.fingerprint, source="a dict", watch=lambda thing, _at: heard.append(thing))
    belay.load("r", (), rig.blocks("r").batches, 5.0)
    belay.close()
    assert heard


def test_a_child_that_cannot_start_is_in_the_states(rig: Any, tmp_path: Path) -> None:
    """What only shows when a child starts makes it unavailable, with a cause that names the file; the others serve."""
    (tmp_path / "taken").write_text("a file", encoding="utf-8")
    store = {"name": "store", "connector": "file", "config": {"path": str(tmp_path / "taken"), "capacity_nbytes": 1000}}
    raw = changed(lambda raw: raw["children"].insert(0, store))
    belay: Belay = open_belay(decode_config(raw, source="x.json"), rig.fingerprint, source="x.json")
    try:
        broken = belay.states()[0]
        assert (broken.name, broken.status) == ("store", "unavailable")
        assert broken.cause is not None
        assert "x.json: children[0].config.path" in broken.cause.detail
        saved = belay.save("r", rig.blocks("r").fill().batches, 5.0)
        assert {ticket.child for ticket in saved.tickets} == {"near", "far"}
    finally:
        belay.close()


def test_nothing_starts_when_a_later_child_is_wrong(rig: Any, tmp_path: Path) -> None:
    """The whole configuration is checked before the first child opens anything."""
    place = tmp_path / "store"
    raw = {
        "children": [
            {"name": "store", "connector": "file", "config": {"path": str(place), "capacity_nbytes": 1000}},
            {"name": "near", "connector": "nowhere"},
        ]
    }
    before = threading.enumerate()
    with pytest.raises(ConfigError, match=r"children\[1\]\.connector"):
        open_belay(decode_config(raw, source="x"), rig.fingerprint, source="x")
    assert threading.enumerate() == before
    assert not place.exists()


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str, str]] = {
    "unknown key": (lambda raw: raw.update(thread=2), "thread", "did you mean 'threads'?"),
    "unknown key far from any": (lambda raw: raw.update(zzz=2), "zzz", "the fields here are children, policy, threads"),
    "unknown key of a child": (lambda raw: raw["children"][1].update(nam="x"), "children[1].nam", "'name'"),
    "unknown key of the policy": (lambda raw: raw["policy"].update(attempt=1), "policy.attempt", "'attempts'"),
    "unknown key below it": (
        lambda raw: raw["policy"]["circuit"].update(failure=1),
        "policy.circuit.failure",
        "'failures'",
    ),
    "unknown key of a connector": (
        lambda raw: raw["children"][0]["config"].update(stores="x"),
        "children[0].config.stores",
        "'store'",
    ),
    "missing key": (lambda raw: raw["children"][0].pop("name"), "children[0]", ""),
    "no children": (lambda raw: raw.pop("children"), "", ""),
    "an empty list": (lambda raw: raw.update(children=[]), "children", "configure at least one"),
    "wrong type": (lambda raw: raw.update(threads="many"), "threads", ""),
    "wrong type of the children": (lambda raw: raw.update(children={"near": {}}), "children", ""),
    "wrong type of a child": (lambda raw: raw["children"].append("near"), "children[2]", ""),
    "wrong type of a name": (lambda raw: raw["children"][0].update(name=7), "children[0].name", ""),
    "wrong type of a config": (lambda raw: raw["children"][0].update(config=[1]), "children[0].config", ""),
    "wrong type in a config": (
        lambda raw: raw["children"][0]["config"].update(capacity_nbytes="big"),
        "children[0].config.capacity_nbytes",
        "store, capacity_nbytes",
    ),
    "wrong type in the policy": (lambda raw: raw["policy"].update(attempts=1.5), "policy.attempts", ""),
    "unknown fallback": (lambda raw: raw["policy"].update(fallback="pray"), "policy.fallback", ""),
    "impossible fallback": (lambda raw: raw["policy"].update(fallback="loaded"), "policy", ""),
    "no attempts": (lambda raw: raw["policy"].update(attempts=0), "policy", ""),
    "endless drain": (lambda raw: raw["policy"].update(drain_s=float("inf")), "", ""),
    "no threads": (lambda raw: raw.update(threads=0), "threads", ""),
    "negative arena": (lambda raw: raw["children"][0].update(arena_nbytes=-1), "children[0].arena_nbytes", ""),
    "duplicate name": (lambda raw: raw["children"][1].update(name="near"), "children[1].name", "a name of its own"),
    "empty name": (lambda raw: raw["children"][1].update(name=""), "children[1].name", "a name of its own"),
    "unknown connector": (
        lambda raw: raw["children"][1].update(connector="memori"),
        "children[1].connector",
        "did you mean 'memory'?",
    ),
    "file without a path": (
        lambda raw: raw["children"][0].update(connector="file", config={"capacity_nbytes": 5}),
        "children[0].config",
        "path",
    ),
    "faulty around nothing known": (
        lambda raw: raw["children"][0].update(connector="faulty", config={"connector": "memori"}),
        "children[0].config.connector",
        "'memory'",
    ),
    "a field inside faulty": (
        lambda raw: raw["children"][0].update(connector="faulty", config={"connector": "memory", "config": {"x": 1}}),
        "children[0].config.config.x",
        "store",
    ),
    "a plan that cannot strike": (
        lambda raw: raw["children"][0].update(
            connector="faulty", config={"connector": "memory", "plan": {"strikes": [{"fault": "corrupt"}]}}
        ),
        "children[0].config.plan.strikes[0]",
        "",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(tmp_path: Path, case: str) -> None:
    """Whatever is wrong, one error names the file, the path of the field and what to do, and nothing was started."""
    change, field, remedy = WRONG[case]
    error = refusal(write(tmp_path, changed(change)))
    assert error.field == field or not field
    assert remedy in error.remedy


@pytest.mark.parametrize("raw", ["7", '"near"', "[]", "null"])
def test_a_file_that_holds_something_else(tmp_path: Path, raw: str) -> None:
    """JSON that is no object is refused as a wrong type."""
    assert "object" in refusal(write(tmp_path, raw)).what


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("belay.json", b"{"),
        ("belay.json", b'{"children": [}'),
        ("belay.json", b"\xff\xfe"),
        ("belay.json", b""),
        ("belay.json", b"[" * 100_000),
        ("belay.toml", b"children = "),
        ("belay.toml", b"a = 1\na = 2"),
        ("belay.toml", b"\xff\xfe"),
        ("belay.toml", b"a = " + b"[" * 100_000),
        ("belay", b"{}"),
    ],
)
def test_a_file_that_cannot_be_decoded(tmp_path: Path, name: str, data: bytes) -> None:
    """Broken syntax, another encoding and endless nesting are one kind of error, which names the format."""
    path = tmp_path / name
    path.write_bytes(data)
    assert ("JSON" if name.endswith("json") else "TOML") in refusal(path).what


@pytest.mark.parametrize("make", [lambda _: None, lambda path: path.mkdir()], ids=["absent", "a directory"])
def test_a_file_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], object]) -> None:
    """A file that is not there, or is none, is named."""
    path = tmp_path / "belay.toml"
    make(path)
    assert "cannot be read" in refusal(path).what


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector whose library is absent names the child's field and what to install, before anything starts."""
    monkeypatch.setitem(sys.modules, "kvbelay.connectors.stream", None)
    raw = changed(lambda raw: raw["children"].append({"name": "third", "connector": "stream"}))
    error = refusal(write(tmp_path, raw))
    assert isinstance(error, MissingExtra)
    assert (error.field, "kvbelay[stream]" in error.remedy) == ("children[2].connector", True)


def test_a_layer_needs_threads() -> None:
    """A number of threads that can do nothing is refused, and none is started."""
    before = threading.enumerate()
    with pytest.raises(ConfigError, match="threads"):
        Belay(threads=0)
    assert threading.enumerate() == before


def test_what_is_decoded_is_a_struct() -> None:
    """Past the edge nothing reads a dict: the configuration is typed, frozen and comparable."""
    config = decode_config(GOOD, source="a dict")
    assert type(config) is Config
    with pytest.raises(AttributeError):
        config.threads = 3  # type: ignore[misc]


@pytest.mark.parametrize("name", ["threads` - at `$.threads", "a` - at `$.policy.nosuch", "a` - at `$.policy.circuit"])
def test_a_field_whose_name_looks_like_a_path(name: str) -> None:
    """An unknown field is refused as one, whatever its name says about where it stands."""
    with pytest.raises(ConfigError, match="unknown field"):
        decode_config({**GOOD, name: 1}, source="here")


def nested(depth: int) -> dict[str, object]:
    """A memory connector in so many faulty ones."""
    config: dict[str, object] = {"connector": "memory"}
    for _ in range(depth):
        config = {"connector": "faulty", "config": config}
    return {"children": [{"name": "near", **config}]}


def test_wrappers_in_wrappers() -> None:
    """Connectors may stand around one another a few times; hundreds of times is an error of the configuration."""
    assert len(prepare_children(decode_config(nested(15), source="here"), source="here")) == 1
    with pytest.raises(ConfigError, match="more than 16 connectors"):
        prepare_children(decode_config(nested(300), source="here"), source="here")


def test_values_that_cannot_be_read() -> None:
    """A host's own dict may nest without end or hold text that is none: that is a `ConfigError`, too."""
    endless: dict[str, object] = {}
    endless["endless"] = endless
    for raw in ({**GOOD, "a\ud800": 1}, {"children": [{"name": "a", "connector": "memory", "config": endless}]}):
        with pytest.raises(ConfigError):
            prepare_children(decode_config(raw, source="here"), source="here")
