"""What clients write into ``kv_transfer_params``: anything at all."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Child, Engine, Spec
from expect import HOLDS, prove, put_up
from forks import Engines
from scripts import STAGE, Save, Script

from kvbelay.vllm.params import refusal

GOOD = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_request_id": "r-p0",
    "remote_block_ids": [[1, 2, 3]],
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "tp_size": 1,
    "remote_num_tokens": 110,
    "remote_blocks_expiry_time": 12.5,
}
"""What a prefill engine of vLLM 0.32 with NixlConnector hands on."""
NEEDED = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
BAD: dict[str, Any] = {
    "engine-list": {"remote_engine_id": ["p0"]},
    "engine-huge": {"remote_engine_id": "p" * 100_000},
    "host-number": {"remote_host": 7},
    "host-text": {"remote_host": "a b\r\nHost: evil"},
    "host-missing": {"remote_host": None},
    "port-negative": {"remote_port": -1},
    "port-text": {"remote_port": "5600"},
    "port-bool": {"remote_port": True},
    "port-beyond": {"remote_port": 70_000},
    "blocks-number": {"remote_block_ids": 3},
    "blocks-negative": {"remote_block_ids": [[-1]]},
    "blocks-text": {"remote_block_ids": ["1"]},
    "blocks-mixed": {"remote_block_ids": [1, [2]]},
    "blocks-huge": {"remote_block_ids": list(range(2_000_000))},
    "tp-zero": {"tp_size": 0},
    "tp-float": {"tp_size": 1.0},
    "tokens-negative": {"remote_num_tokens": -32},
    "tokens-beyond": {"remote_num_tokens": 1 << 40},
    "expiry-nan": {"remote_blocks_expiry_time": float("nan")},
    "flag-text": {"do_remote_prefill": "yes"},
}


@pytest.mark.parametrize("bad", BAD)
def test_what_no_engine_sends_is_refused(bad: str) -> None:
    """Each wrong value is named by its key; what an engine sends passes, with nulls and without the rest."""
    assert refusal(GOOD, needed=NEEDED, hosts=None) == ""
    assert refusal({**GOOD, "tp_size": None, "later": object()}, needed=NEEDED, hosts=None) == ""
    assert refusal({}, needed=NEEDED, hosts=frozenset()) == ""
    why = refusal({**GOOD, **BAD[bad]}, needed=NEEDED, hosts=None)
    assert next(iter(BAD[bad])) in why


def test_foreign_hosts_are_refused() -> None:
    """With a list of hosts no other one is pulled from."""
    assert refusal(GOOD, needed=NEEDED, hosts=frozenset({"10.0.0.7"})) == ""
    assert "hosts" in refusal(GOOD, needed=NEEDED, hosts=frozenset({"10.0.0.8"}))


def hostile(engine: Engine, params: dict[str, Any], pulls: bool) -> None:
    """Such a request between two good ones; x pulls what it is told to."""
    put_up(x=Script(offer=96, pd=True), y=Script(saves={"*": Save(holds=True)}))
    engine.add("r0", 0, params=GOOD)
    engine.add("bad", 1, params=params)
    engine.add("r2", 2, params=GOOD)
    engine.finish()
    engine.right()
    engine.once()
    assert STAGE.loaded("x", "r0") == STAGE.loaded("x", "r2") == 96
    assert STAGE.loaded("x", "bad") == (96 if pulls else 0)


OURS: dict[str, Any] = {
    "ours-number": 5,
    "ours-list": [1],
    "children-number": {"children": 5},
    "child-list": {"children": {"x": [1]}},
    "until-text": {"until": {"x": "soon"}},
    "until-nan": {"until": {"x": float("nan")}},
    "until-number": {"until": 3},
    "deep": {"children": {"y": {"children": {"x": {"until": {}}}}}},
    "long": {"children": {f"c{number}": {} for number in range(10_000)}},
}
"""Under the guard's own key."""


@pytest.mark.parametrize("name", [*(name for name in BAD if "nan" not in name), *OURS])  # JSON has no such number
def test_hostile_parameters(standing: Engines, name: str) -> None:
    """They cost their own request its pull, if anything: all are answered rightly, and the next one pulls again."""
    params = {**GOOD, "kvbelay": OURS[name]} if name in OURS else {**GOOD, **BAD[name]}
    pulling = Child(name="x", belay={"role": "pd", "hosts": ["10.0.0.7"]})
    spec = Spec(children=(pulling, Child(name="y")))
    prove(standing, "guard", hostile, HOLDS, spec, params=params, pulls=name in OURS)


def each_its_own(engine: Engine) -> None:
    """Children x and y pull what stands under their names, and not what stands flat, which is the third one's."""
    put_up(x=Script(offer=96, pd=True), y=Script(offer=64, pd=True), z=Script(offer=32, pd=True))
    theirs = {"x": {"do_remote_prefill": False}, "y": {**GOOD, "remote_engine_id": "p1"}}
    engine.add("r", 0, params={**GOOD, "kvbelay": {"children": theirs}})
    engine.add("flat", 1, params=GOOD)
    engine.finish()
    engine.right()
    engine.served("r", "y", 64)
    engine.served("flat", "x", 96)


def test_each_child_sees_its_own(standing: Engines) -> None:
    """Where two children of the other side used one key, each finds its own parameters on this one."""
    pulling = tuple(Child(name=name, belay={"role": "pd"}) for name in "xyz")
    prove(standing, "guard", each_its_own, HOLDS, Spec(children=pulling))
