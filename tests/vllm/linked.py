"""An engine with a link, which is its own other side: what it offers through child x it loads through child x."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from engine import Child, Engine, Spec
from expect import USUAL, put_up, value
from scripts import Load, Save, Script

LINK: dict[str, Any] = {"verify": "prefer", "link": {"listen": "tcp://127.0.0.1:0"}, "load_s": 5.0}
CHILDREN = (Child(name="x", belay={"role": "pd"}), Child(name="y"))
MODES = ("guard", "guard-async", "guard-hybrid")
PULL = {"do_remote_prefill": True, "remote_engine_id": "p0"}


def spec(**belay: Any) -> Spec:
    return msgspec.structs.replace(USUAL, children=CHILDREN, prefix_caching=False, stats=True, belay={**LINK, **belay})


def listen() -> list[str]:
    """What the guard logs from now on."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("vllm.kvbelay").addHandler(handler)
    return said


def scripts(keeps: int = 3000, **loads: Load) -> None:
    """Child x offers what it is asked for, and keeps it until the case lets it go; it loads what it is told."""
    offers = {f"o{number}": Save(holds=True, params=PULL, reports=(keeps,)) for number in range(20)}
    plans = {name: (load,) for name, load in loads.items()}
    put_up(x=Script(offer=96, pd=True, writes_through=True, saves=offers, loads=plans))


def offered(engine: Engine, number: int) -> dict[str, Any]:
    """The prompt's KV is computed and offered; what a router hands on to the other side."""
    engine.add(f"o{number}", number, new=1, params={"do_remote_decode": True})
    engine.finish(f"o{number}")
    params = engine.params[f"o{number}"]
    return params if "remote_engine_id" in params else {**PULL}


def verified(child: str = "x", **labels: str) -> float:
    return value("verified_loads_total", child=child, **labels)


def let_go(engine: Engine) -> None:
    """The other side's leases end."""
    engine.run(lambda: engine.in_use() == 0, steps=4000, pause_s=0.0)


def guard_of(engine: Engine) -> Any:
    return engine.connector.desk
