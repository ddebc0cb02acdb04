"""Configurations: what is right yields nothing, and each mistake is told with its field and remedy."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbelay.doctor.config import check_configs
from kvbelay.doctor.finding import Finding, Level
from kvbelay.doctor.options import SOURCE, declared

Config = dict[str, Any]
NIXL: Config = {"kv_connector": "NixlConnector", "kv_role": "kv_consumer"}
CACHE: Config = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_consumer"}
GOOD: Config = {
    "kv_connector": "MultiConnector",
    "kv_connector_module_path": "kvbelay.vllm",
    "kv_role": "kv_consumer",
    "kv_connector_extra_config": {"connectors": [NIXL, CACHE]},
}


def child(index: int, **keys: Any) -> Callable[[Config], None]:
    return lambda config: config["kv_connector_extra_config"]["connectors"][index].update(keys)


def extra(index: int, **keys: Any) -> Callable[[Config], None]:
    return child(index, kv_connector_extra_config=keys)


def ours(**keys: Any) -> Callable[[Config], None]:
    return lambda config: config["kv_connector_extra_config"].update(kvbelay=keys)


def outside(**keys: Any) -> Callable[[Config], None]:
    return lambda config: config.update(keys)


def stock(*changes: Callable[[Config], None]) -> Callable[[Config], None]:
    def change(config: Config) -> None:
        del config["kv_connector_module_path"]
        for one in changes:
            one(config)

    return change


def both(*changes: Callable[[Config], None]) -> Callable[[Config], None]:
    return lambda config: [one(config) for one in changes] and None


def changed(change: Callable[[Config], None] = lambda _: None, role: str = "kv_consumer") -> Config:
    config = copy.deepcopy(GOOD)
    change(config)
    if role != "kv_consumer":
        config = json.loads(json.dumps(config).replace("kv_consumer", role))
    return config


def found(*configs: Config) -> list[Finding]:
    return check_configs([json.dumps(one) for one in configs])


def test_a_good_configuration_yields_nothing() -> None:
    """Alone, and as a pair with its other side."""
    assert found(changed()) == []
    assert found(changed(role="kv_producer"), changed()) == []


MISTAKES: dict[str, tuple[Callable[[Config], None], str, Level, str]] = {
    "unknown key": (outside(kv_lod_failure_policy="fail"), "unknown-key", Level.PROBLEM, "kv_load_failure_policy"),
    "removed key": (outside(kv_rank=0), "deprecated", Level.PROBLEM, "take it out"),
    "misplaced extra": (outside(connectors=[]), "misplaced-key", Level.PROBLEM, "kv_connector_extra_config"),
    "misplaced name": (child(0, name="a"), "misplaced-key", Level.PROBLEM, "kv_connector_extra_config.kvbelay"),
    "extra of a child outside": (
        lambda config: config["kv_connector_extra_config"].update(kv_lease_duration=60),
        "misplaced-key",
        Level.WARNING,
        "of the child",
    ),
    "policy in a child": (child(0, kv_load_failure_policy="fail"), "misplaced-key", Level.WARNING, "outside"),
    "engine_id in a child": (stock(child(0, engine_id="x")), "misplaced-key", Level.PROBLEM, "take it out"),
    "misspelt extra": (extra(0, kv_lease_durations=60), "unknown-key", Level.WARNING, "kv_lease_duration"),
    "extra is no object": (child(0, kv_connector_extra_config=[]), "unknown-key", Level.PROBLEM, "correct"),
    "guard on another class": (outside(kv_connector="NixlConnector"), "guard", Level.PROBLEM, "MultiConnector"),
    "misspelt module": (
        outside(kv_connector_module_path="kvbelay.vlm"),
        "guard",
        Level.PROBLEM,
        "kvbelay.vllm",
    ),
    "no children": (
        lambda config: config["kv_connector_extra_config"].update(connectors=[]),
        "children",
        Level.PROBLEM,
        "connectors",
    ),
    "no class": (child(0, kv_connector=""), "children", Level.PROBLEM, "name its class"),
    "renamed class": (child(1, kv_connector="SharedStorageConnector"), "deprecated", Level.PROBLEM, "ExampleConnector"),
    "multi in multi": (child(1, kv_connector="MultiConnector"), "children", Level.PROBLEM, "beside"),
    "unknown class": (child(1, kv_connector="LMCacheConectorV1"), "children", Level.PROBLEM, "LMCacheConnectorV1"),
    "no role": (child(0, kv_role=None), "role", Level.PROBLEM, "kv_producer"),
    "unknown role": (outside(kv_role="both"), "role", Level.PROBLEM, "kv_producer"),
    "roles differ": (child(0, kv_role="kv_producer"), "role", Level.PROBLEM, "same role"),
    "deprecated role": (
        both(child(0, kv_role="kv_both"), outside(kv_role="kv_both")),
        "deprecated",
        Level.WARNING,
        "kv_consumer",
    ),
    "layouts": (child(1, kv_connector="HiSparseConnector"), "layouts", Level.PROBLEM, "agree"),
    "hybrid": (child(1, kv_connector="ExampleConnector"), "hybrid", Level.WARNING, "disable-hybrid"),
    "two P/D, stock": (stock(child(1, kv_connector="MooncakeConnector")), "two-pd", Level.PROBLEM, "guard"),
    "two P/D, guarded": (child(1, kv_connector="MooncakeConnector"), "two-pd", Level.WARNING, "keep one"),
    "two pools": (
        both(
            child(0, kv_connector="MooncakeStoreConnector", kv_connector_extra_config={"custom_mem_pool": "x"}),
            child(1, kv_connector="MooncakeStoreConnector", kv_connector_extra_config={"custom_mem_pool": "x"}),
        ),
        "two-pools",
        Level.PROBLEM,
        "one of them",
    ),
    "twins": (stock(child(0, kv_connector="LMCacheMPConnector")), "twins", Level.PROBLEM, "guard"),
    "same names": (
        both(extra(0, kvbelay={"name": "a"}), extra(1, kvbelay={"name": "a"})),
        "guard-option",
        Level.PROBLEM,
        "its own name",
    ),
    "unread options": (stock(ours(mode="guard")), "guard", Level.WARNING, "kv_connector_module_path"),
    "unknown option": (ours(load_ss=3), "guard-option", Level.PROBLEM, "load_s"),
    "unknown option of a child": (extra(0, kvbelay={"lod_s": 3}), "guard-option", Level.PROBLEM, "load_s"),
    "option of a wrong type": (ours(load_s="3"), "guard-option", Level.PROBLEM, "correct"),
    "no choice": (ours(mode="watch"), "guard-option", Level.PROBLEM, "one of them"),
    "no duration": (ours(save_s=-1), "guard-option", Level.PROBLEM, "positive"),
    "options are no object": (
        lambda config: config["kv_connector_extra_config"].update(kvbelay=3),
        "guard-option",
        Level.PROBLEM,
        "options",
    ),
    "circuit": (ours(circuit={"failure": 3}), "guard-option", Level.PROBLEM, "failures"),
    "load beyond lease": (ours(load_s=25), "deadlines", Level.PROBLEM, "20"),
    "load of a child beyond lease": (extra(0, kvbelay={"load_s": 21}), "deadlines", Level.PROBLEM, "20"),
    "load beyond a set lease": (
        both(extra(0, kv_lease_duration=9), ours(load_s=7)),
        "deadlines",
        Level.PROBLEM,
        "6",
    ),
    "save before lease": (ours(save_s=20), "deadlines", Level.WARNING, "more than 30"),
    "look-up beyond load": (ours(lookup_s=90), "deadlines", Level.WARNING, "shorten"),
    "verify without a link": (ours(verify="prefer"), "verify", Level.PROBLEM, "link"),
    "a child's verify without a link": (extra(0, kvbelay={"verify": "require"}), "verify", Level.PROBLEM, "link"),
    "a name that is none": (extra(0, kvbelay={"name": "a b"}), "guard-option", Level.PROBLEM, "letters"),
    "unknown policy": (outside(kv_load_failure_policy="retry"), "policy", Level.PROBLEM, "choose"),
    "sync and recompute, guarded": (
        both(outside(kv_load_failure_policy="recompute"), child(1, kv_connector="LMCacheConnectorV1")),
        "policy",
        Level.WARNING,
        "fail",
    ),
    "sync and recompute, stock": (
        stock(outside(kv_load_failure_policy="recompute"), child(1, kv_connector="LMCacheConnectorV1")),
        "policy",
        Level.PROBLEM,
        "guard",
    ),
    "fail, stock": (stock(), "policy", Level.WARNING, "guard"),
    "recompute, stock": (stock(outside(kv_load_failure_policy="recompute")), "policy", Level.WARNING, "bounds"),
    "observe": (ours(mode="observe"), "policy", Level.WARNING, "remove mode"),
    "no budget": (ours(recompute_tokens_per_s=0), "policy", Level.PROBLEM, "refuses|allow"),
    "exhausted fails": (
        ours(recompute_tokens_per_s=100, on_exhausted="fail"),
        "policy",
        Level.WARNING,
        "leave it at recompute",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told(name: str) -> None:
    """With its kind, how bad it is, and a remedy that helps."""
    change, check, level, remedy = MISTAKES[name]
    findings = [one for one in found(changed(change)) if one.check == f"config.{check}" and one.level is level]
    assert findings, found(changed(change))
    assert any(word in one.remedy + one.what for one in findings for word in remedy.split("|"))
    for one in findings:
        assert one.evidence[0].text
        assert one.evidence[0].source == "--config 1"


PAIRS: dict[str, tuple[Config, Config, Level, str]] = {
    "two producers": (changed(role="kv_producer"), changed(role="kv_producer"), Level.PROBLEM, "both sides are"),
    "one engine id": (
        changed(outside(engine_id="a"), "kv_producer"),
        changed(outside(engine_id="a")),
        Level.PROBLEM,
        "engine_id",
    ),
    "no connector in common": (
        changed(role="kv_producer"),
        changed(child(0, kv_connector="MooncakeConnector")),
        Level.PROBLEM,
        "in common",
    ),
    "push and pull": (
        changed(child(0, kv_connector="NixlPushConnector"), "kv_producer"),
        changed(),
        Level.PROBLEM,
        "in common",
    ),
    "hybrid on one side": (
        changed(role="kv_producer"),
        changed(child(1, kv_connector="ExampleConnector")),
        Level.PROBLEM,
        "hybrid",
    ),
    "shorter lease at prefill": (
        changed(extra(0, kv_lease_duration=20), "kv_producer"),
        changed(),
        Level.PROBLEM,
        "20 s, decode counts on 30 s",
    ),
    "longer lease at prefill": (
        changed(extra(0, kv_lease_duration=90), "kv_producer"),
        changed(),
        Level.WARNING,
        "90 s, decode counts on 30 s",
    ),
    "decode waits beyond prefill's lease": (
        changed(extra(0, kv_lease_duration=12), "kv_producer"),
        changed(both(extra(0, kv_lease_duration=12), ours(load_s=9))),
        Level.PROBLEM,
        "decode waits 9 s",
    ),
    "names differ": (
        changed(extra(0, kvbelay={"name": "a"}), "kv_producer"),
        changed(extra(0, kvbelay={"name": "b"})),
        Level.WARNING,
        "different names",
    ),
    "backends differ": (
        changed(extra(0, backends=["UCX"]), "kv_producer"),
        changed(extra(0, backends=["GDS"])),
        Level.PROBLEM,
        "backends",
    ),
    "link on one side": (
        changed(role="kv_producer"),
        changed(ours(verify="require", link={"listen": "tcp://127.0.0.1:0"})),
        Level.PROBLEM,
        "prefill has no link",
    ),
    "guard on one side": (changed(stock(), "kv_producer"), changed(), Level.WARNING, "only one side"),
}


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("swapped", [False, True])
def test_sides_that_do_not_match(name: str, swapped: bool) -> None:
    """Each difference that matters is told, whichever side is given first."""
    prefill, decode, level, words = PAIRS[name]
    sides = (decode, prefill) if swapped else (prefill, decode)
    findings = [one for one in found(*sides) if one.check == "config.pair"]
    assert any(one.level is level and words in one.what for one in findings), findings


@pytest.mark.parametrize(
    ("mine", "other", "words"),
    [
        ({"tensor_parallel_size": 4}, {"tensor_parallel_size": 6}, "neither divides"),
        ({"dtype": "bfloat16"}, {"dtype": "float16"}, "dtype"),
        ({"block-size": 16}, {"block_size": 32}, "block_size"),
        ({"model": "a"}, {"model": "b"}, "model"),
    ],
)
def test_engines_that_do_not_match(mine: Config, other: Config, words: str) -> None:
    """Where the files are engines' arguments around the configuration, those are compared, too."""
    sides = [{**mine, "kv-transfer-config": changed(role="kv_producer")}, {**other, "kv_transfer_config": changed()}]
    assert any(words in one.what and one.level is Level.PROBLEM for one in found(*sides))


def test_tensor_parallel_sizes_that_divide_one_another() -> None:
    """P with four ranks and D with two understand each other."""
    sides = [{"tensor_parallel_size": size, "kv_transfer_config": changed(role=role)} for size, role in
             ((4, "kv_producer"), (2, "kv_consumer"))]  # fmt: skip
    assert found(*sides) == []


def test_a_store_that_does_not_know_prefills_size() -> None:
    """prefill_tp_sizes has to have it."""
    store = child(1, kv_connector="MooncakeStoreConnector", kv_connector_extra_config={"prefill_tp_sizes": [2]})
    prefill = {"tensor_parallel_size": 4, "kv_transfer_config": changed(store, "kv_producer")}
    decode = {"tensor_parallel_size": 4, "kv_transfer_config": changed(store)}
    assert any("prefill_tp_sizes" in one.what for one in found(prefill, decode))


def test_a_file_is_told_with_its_line(tmp_path: Path) -> None:
    """Evidence names file and line."""
    path = tmp_path / "d.json"
    path.write_text(json.dumps(changed(outside(kv_rank=0)), indent=1))
    (finding,) = check_configs([str(path)])
    assert finding.evidence[0].source == str(path)
    assert '"kv_rank"' in path.read_text().splitlines()[finding.evidence[0].line - 1]


@pytest.mark.parametrize("text", ["{", '{"a": }', "{}", "[1]", "[" * 100_000])
def test_what_is_no_configuration(text: str, tmp_path: Path) -> None:
    """A problem, and no exception."""
    path = tmp_path / "d.json"
    path.write_text(text)
    (finding,) = check_configs([str(path)])
    assert (finding.check, finding.level) == ("config.json", Level.PROBLEM)


@pytest.mark.parametrize(
    "config",
    [
        {"kv_connector": 3},
        {"kv_connector_extra_config": {"connectors": {"a": 1}}, **NIXL},
        {
            "kv_connector": "MultiConnector",
            "kv_role": ["x"],
            "kv_connector_extra_config": {"connectors": [3, None, "x", {}]},
        },
    ],
)
def test_odd_types_are_findings(config: Config) -> None:
    """Nothing that JSON can say raises."""
    assert found(config)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """Could not check, with the reason."""
    (tmp_path / "latin").write_bytes(b"\xff\xfe{")
    for path in (tmp_path / "none.json", tmp_path, tmp_path / "latin"):
        (finding,) = check_configs([str(path)])
        assert finding.level is Level.UNCHECKED
        assert finding.cause


def test_options_are_those_of_the_guard() -> None:
    """What is read from the guard's source has its defaults and choices."""
    assert SOURCE.is_file()
    guard = declared("GuardOptions")
    assert (guard["load_s"].default, guard["mode"].default, guard["mode"].choices) == (
        60.0,
        "guard",
        ("guard", "observe"),
    )
    assert guard["recompute_tokens_per_s"].default == float("inf")
    assert declared("ChildOptions")["role"].choices == ("cache", "pd")
