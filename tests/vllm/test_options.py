"""The guard's options: decoded once, and refused with the field's name and what to do."""

from __future__ import annotations

from typing import Any

import pytest

from kvbelay import errors
from kvbelay.vllm.children import Guarded, configured
from kvbelay.vllm.options import Mode, Role, child_options, guard_options


class Config:
    """As much of an engine's configuration as the options are read from."""

    def __init__(self, *children: dict[str, Any], **belay: Any) -> None:
        self.kv_transfer_config = self
        self.kv_connector_extra_config = {"connectors": list(children), "kvbelay": belay}


def nixl(**belay: Any) -> dict[str, Any]:
    return {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"kvbelay": belay, "backends": ["UCX"]}}


def children(*configs: dict[str, Any]) -> list[Guarded]:
    return [child for child, _ in configured(Config(*configs))]


def test_without_options() -> None:
    """An existing configuration needs none."""
    assert guard_options({}).mode is Mode.GUARD
    assert child_options(0, {"kv_connector": "NixlConnector"}).role is None


def test_what_is_known_of_a_class() -> None:
    """The host's P/D connectors are known, with their leases; others are caches, unless they are said to be none."""
    first, second, third = children(
        nixl(),
        {"kv_connector": "LMCacheMPConnector"},
        nixl(role="pd") | {"kv_connector": "Mine"},
    )
    assert (first.options.role, first.trusted_s) == (Role.PD, 20.0)
    assert (second.options.role, second.trusted_s) == (Role.CACHE, float("inf"))
    assert third.options.role is Role.PD


def test_names() -> None:
    """By class, numbered where two are alike; or given."""
    assert [child.name for child in children(nixl(), nixl(), nixl(name="far"))] == [
        "NixlConnector",
        "NixlConnector-2",
        "far",
    ]


@pytest.mark.parametrize(
    ("belay", "field", "remedy"),
    [
        ({"laod_s": 3}, "kvbelay.laod_s", "did you mean 'load_s'"),
        ({"load_s": "soon"}, "kvbelay", "correct"),
        ({"load_s": 0}, "kvbelay.load_s", "correct"),
        ({"save_s": float("inf")}, "kvbelay.save_s", "correct"),
        ({"mode": "guess"}, "kvbelay", "correct"),
        ({"circuit": {"failures": 0}}, "kvbelay", "correct"),
        ({"recompute_tokens_per_s": 0}, "kvbelay.recompute_tokens_per_s", "on_exhausted"),
        (5, "kvbelay", "correct"),
    ],
)
def test_wrong_options_of_the_guard(belay: Any, field: str, remedy: str) -> None:
    """The field is named, and what to do."""
    with pytest.raises(errors.ConfigError) as caught:
        guard_options({"kvbelay": belay})
    assert field in str(caught.value)
    assert remedy in str(caught.value)


@pytest.mark.parametrize(
    ("belay", "words"),
    [
        ({"nmae": "x"}, ("connectors[0].kvbelay.nmae", "did you mean 'name'")),
        ({"role": "both"}, ("connectors[0].kvbelay",)),
        ({"name": "a b"}, ("connectors[0].kvbelay.name", "letters")),
        ({"name": "kvbelay"}, ("connectors[0].kvbelay.name",)),
        ({"name": "a|b"}, ("connectors[0].kvbelay.name",)),
        ({"load_s": 25.0}, ("connectors[0].kvbelay.load_s", "lease_s", "20 s")),
        ({"load_s": 5.0, "lease_s": 6.0}, ("connectors[0].kvbelay.load_s", "lease_s", "4 s")),
    ],
)
def test_wrong_options_of_a_child(belay: dict[str, Any], words: tuple[str, ...]) -> None:
    """So it is with a child's, and with two that contradict each other, both of which are named."""
    with pytest.raises(errors.ConfigError) as caught:
        children(nixl(**belay))
    for word in words:
        assert word in str(caught.value)


def test_two_of_a_name() -> None:
    """Names are unique."""
    with pytest.raises(errors.ConfigError, match=r"connectors\[1\].*two children"):
        children(nixl(name="x"), nixl(name="x"))


@pytest.mark.parametrize("configs", [[], [5], ["NixlConnector"], None])
def test_children_that_are_none(configs: Any) -> None:
    """What is no list of connectors is refused with a sentence."""
    config = Config()
    config.kv_connector_extra_config["connectors"] = configs
    with pytest.raises(errors.ConfigError, match="connectors"):
        configured(config)
