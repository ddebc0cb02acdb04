"""What the doctor knows of vLLM and of the guard, against the real ones."""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvbelay.core.circuit import CircuitPolicy
from kvbelay.doctor import config, drift, known, url
from kvbelay.doctor.drift import check_drift
from kvbelay.doctor.options import CIRCUIT, declared, mistakes
from kvbelay.errors import ConfigError
from kvbelay.vllm import host, series
from kvbelay.vllm.children import TRUSTED
from kvbelay.vllm.hooks import NAMES
from kvbelay.vllm.options import NAME, ChildOptions, GuardOptions, guard_options

TESTED_HERE = host.version() in host.TESTED


def test_the_installed_vllm_has_no_drift() -> None:
    """Of the version that the guard was tested with nothing is said; of another one something is."""
    assert (check_drift() == []) is TESTED_HERE
    folder = drift.installed()
    assert folder is not None
    assert drift.version_in(folder) == host.version()


def test_the_table_is_read_right() -> None:
    """Read as data, it has the hooks that it has when it is imported; so have the versions."""
    assert drift.in_table() == NAMES
    assert drift.versions_tested() == host.TESTED


@pytest.mark.parametrize(
    ("cls", "path"), [(GuardOptions, None), (ChildOptions, None), (CircuitPolicy, CIRCUIT)], ids=str
)
def test_options_are_read_right(cls: Any, path: Any) -> None:
    """Names and plain defaults of the guard's options, read as data, are the real ones."""
    told = declared(cls.__name__) if path is None else declared(cls.__name__, path)
    assert tuple(told) == cls.__struct_encode_fields__
    fresh = msgspec.to_builtins(cls())
    for name, option in told.items():
        if isinstance(option.default, str | bool | int | float):
            assert option.default == fresh[name], name


@pytest.mark.parametrize(
    "options",
    [{"load_ss": 1}, {"load_s": "1"}, {"load_s": 0}, {"mode": "watch"}, {"circuit": {"failure": 1}}, 3, {"save_s": -1}],
)
def test_the_guard_refuses_what_the_doctor_tells(options: Any) -> None:
    """What is called a mistake stops the start of the engine."""
    assert list(mistakes(options, "GuardOptions", "kvbelay"))
    with pytest.raises(ConfigError):
        guard_options({"kvbelay": options})


def test_connectors_are_those_of_vllm() -> None:
    """All of them by name; which of them are for P/D, and how long they keep what they offer, as the guard has it."""
    assert known.CONNECTORS.keys() == KVConnectorFactory._registry.keys()
    assert {name for name, one in known.CONNECTORS.items() if one.pd} == host.PULLING
    assert set(host.LEASES.values()) == {known.LEASE_S}
    assert known.TRUSTED == TRUSTED
    assert config.NAME.pattern == NAME.pattern


@cache
def classes() -> dict[str, ast.ClassDef]:
    """All classes of vLLM's connectors, without an import of their packages."""
    folder = Path(base.__file__).parent
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in folder.rglob("*.py"))
    return {node.name: node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)}


def lineage(name: str, known_classes: dict[str, ast.ClassDef]) -> list[ast.ClassDef]:
    """A class and its ancestors, as far as they are vLLM's connectors."""
    node = known_classes.get(name)
    above = [one for one in node.bases if isinstance(one, ast.Name)] if node is not None else []
    return [*([node] if node is not None else []), *(one for up in above for one in lineage(up.id, known_classes))]


@pytest.mark.parametrize("name", sorted(known.CONNECTORS.keys() - {known.MULTI, "LMCacheMPConnector", "NixlConnector"}))
def test_hybrid_support_and_layouts_are_those_of_vllm(name: str) -> None:
    """LMCache's own package brings its connector, and NixlConnector is another name; the others are read."""
    found = lineage(name, classes())
    assert found, name
    assert ("SupportsHMA" in {one.name for one in found}) is known.CONNECTORS[name].hybrid
    asked = [one for cls in found[:-1] for one in cls.body if getattr(one, "name", "") == "get_required_kvcache_layout"]
    returned = {
        node.value.value
        for one in asked
        for node in ast.walk(one)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Constant) and node.value.value
    }
    layout = known.CONNECTORS[name].layout
    assert layout in returned if layout else not returned


def test_fields_are_those_of_vllm() -> None:
    """A key that vLLM takes is no unknown one."""
    assert {field.name for field in fields(KVTransferConfig)} == known.FIELDS


def test_series_are_those_of_the_guard() -> None:
    """What is looked for on /metrics is what the guard shows there."""
    shown = {f"kvbelay_{name}" for name in (*series.GAUGES, *(f"{name}_total" for name in series.COUNTERS))}
    asked = {"kvbelay_quarantined_blocks", "kvbelay_circuit_open", "kvbelay_peers_open", "kvbelay_failures_total"}
    assert asked <= shown
    assert f"{url.TRANSFERS[0]}_total" in shown
