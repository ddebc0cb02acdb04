"""A hook that answers what no hook should: a wrong type, a number out of range, nothing."""

from __future__ import annotations

from typing import Any

import pytest
from engine import Engine
from expect import HOLDS, Stock, prove, put_up
from forks import Engines
from scripts import STAGE, Fault, Script
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

KILLS = Stock("dead")
ODD: dict[str, Any] = {
    "M-beyond": (320, True),
    "M-negative": (-32, True),
    "M-nothing-async": (0, True),
    "M-text": ("96", True),
    "M-float": (64.0, True),
    "M-bool": (True, True),
    "M-short": (96,),
    "M-none": None,
    "M-object": object(),
    "M-flag": (64, "no"),
    "F-none": None,
    "F-bool": True,
    "F-text": ("no", None),
    "F-params": (False, ["remote_engine_id"]),
    "F-keys": (False, {1: object()}),
    "B-none": None,
    "B-object": object(),
    "G-none": None,
    "G-pair": (set(), {"r0"}),
    "G-lists": KVConnectorTransferResults(["r0"], ["r0"], ["r0"]),
    "G-nones": KVConnectorTransferResults(None, None, None),
    "G-numbers": KVConnectorTransferResults({1}, {2}, {3}),
    "E-none": None,
    "E-list": [3],
    "E-text": {"3"},
    "E-unknown": {-1, 10**9},
    "W-object": object(),
    "W-dict": {"r0": "ok"},
    "S-object": object(),
    "S-dict": {"bytes": 1},
    "V-none": None,
    "V-number": 5,
    "V-objects": (object(),),
    "P-text": "",
    "H-none": None,
    "D-none": None,
}
"""By the letter of the hook and what is odd. Objects cannot travel to the fork, and so stand here."""
HOOKS = {
    "M": "get_num_new_matched_tokens",
    "B": "build_connector_meta",
    "G": "get_transfer_results",
    "E": "get_block_ids_with_load_errors",
    "F": "request_finished_all_groups",
    "W": "build_connector_worker_meta",
    "S": "get_kv_connector_stats",
    "V": "take_events",
    "P": "has_pending_push_work",
    "H": "get_loaded_kv_cache_group_ids",
    "D": "supports_divergent_local_hybrid_hits",
}


def odd_answer(engine: Engine, odd: str) -> None:
    """Both children offer alike; a hook of x answers something odd."""
    fault = Fault(hook=HOOKS[odd[0]], answer=ODD[odd], times=1)
    put_up(x=Script(offer=96, faults=(fault,)), y=Script(offer=96))
    for number in range(4):
        engine.add(f"r{number}", number, new=8)
        engine.step()
    engine.finish()
    engine.right()
    engine.once()
    engine.rest()
    assert STAGE.of("x", fault.hook)


LEAK = Stock("stuck", "'r0': 'FINISHED_LENGTH_CAPPED'")
STOCK = {
    **dict.fromkeys(("M-negative", "M-nothing-async", "M-flag", "F-params", "F-keys", "E-text", "E-unknown"), HOLDS),
    **dict.fromkeys(("W-object", "W-dict", "V-objects", "P-text", "D-none"), HOLDS),
    "M-bool": Stock("wrong", "r0"),
    "F-text": LEAK,
}
"""What does not kill vLLM's own class."""


@pytest.mark.parametrize("odd", ODD)
def test_odd_answer(standing: Engines, which: str, odd: str) -> None:
    """Whatever a hook answers: every request is answered rightly, and the engine lives."""
    prove(standing, which, odd_answer, STOCK.get(odd, KILLS), odd=odd)
