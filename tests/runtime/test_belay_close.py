"""Closing: whoever waits is told, every thread ends, and what hangs does not keep anybody."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import pytest

from kvbelay import errors
from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.core.model import Kind, Report, Result, Side


def test_close_with_transfers_in_flight(rig: Any) -> None:
    """Closing tells everybody who waits, ends the threads, and is done once."""
    layer = rig.layer()
    near = rig.faulty("near", Strike(fault=Fault.FREEZE, nth=2, seconds=60.0))
    store = rig.faulty("store", Strike(fault=Fault.DROP, operation=Operation.PUT, nth=1))
    layer.add("near", near)
    source = rig.blocks("r").fill()
    tickets = rig.put(near.inner, source)
    load = layer.aside(lambda: layer.load("r", rig.blocks("r"), tickets, within_s=60.0))
    rig.wait_for(lambda: rig.struck)
    layer.add("store", store)
    save = layer.aside(lambda: layer.belay.save("s", rig.blocks("s").fill().batches, 60.0))
    rig.wait_for(lambda: len(rig.struck) == 2)
    assert layer.belay.close() == 0
    assert [future.result(1).result for future in (load, save)] == [Result.CANCELLED] * 2
    assert layer.belay.close() == 0
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvbelay")]
    with pytest.raises(errors.Closed):
        layer.load("t", rig.blocks("t"))
    layer.belay.cancel("r")
    layer.belay.heard("near", Side.LOAD, "r", None)


@pytest.mark.parametrize("within_s", [0.0, 0.02])
def test_close_does_not_wait_for_a_hung_call(rig: Any, within_s: float) -> None:
    """With less time than a drain takes, whoever waits is told that the blocks are held; the release comes later."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, drain_s=60.0))
    near = rig.deaf(rig.memory("near"))
    layer.add("near", near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    into = rig.blocks("r")
    future = layer.aside(lambda: layer.load("r", into, tickets, within_s=60.0))
    rig.wait_for(near.entered.is_set)
    began = time.monotonic()
    assert layer.belay.close(within_s) == 1
    assert time.monotonic() - began < 5.0
    outcome = future.result(5)
    assert (outcome.result, outcome.held) == (Result.CANCELLED, True)
    near.go.set()
    rig.wait_for(lambda: layer.released == [("r", Side.LOAD)])


def test_close_of_many_hung_children_takes_no_longer(rig: Any) -> None:
    """The time given to close is for all children together."""
    layer = rig.layer()
    deaf = [rig.deaf(rig.memory(f"child{index}")) for index in range(4)]
    futures = []
    for index, each in enumerate(deaf):
        layer.add(f"child{index}", each)
        tickets = rig.put(each.inner, rig.blocks(f"r{index}").fill())
        into = rig.blocks(f"r{index}")
        futures.append(layer.aside(lambda into=into, tickets=tickets: layer.load(into.request, into, tickets, 60.0)))
        rig.wait_for(each.entered.is_set)
    began = time.monotonic()
    assert layer.belay.close(1.0) == 4
    assert time.monotonic() - began < 3.5
    assert all(future.result(1).held for future in futures)
    for each in deaf:
        each.go.set()
    rig.wait_for(lambda: len(layer.released) == 4)


def test_close_in_a_backoff(rig: Any) -> None:
    """A request that waits for its next attempt is told at once."""
    layer = rig.layer(msgspec.structs.replace(rig.policy, backoff_s=20.0, backoff_max_s=20.0))
    near = rig.faulty("near", Strike(fault=Fault.RAISE, nth=1))
    layer.add("near", near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    future = layer.aside(lambda: layer.load("r", rig.blocks("r"), tickets, within_s=60.0))
    rig.wait_for(lambda: any(isinstance(thing, Report) and thing.kind is Kind.FAILED for thing in layer.log))
    layer.belay.close()
    assert future.result(1).result is Result.CANCELLED


def test_close_races_with_load(rig: Any) -> None:
    """Whoever calls load while the layer closes gets an outcome or `Closed`, and never waits."""
    for _ in range(20):
        layer = rig.layer()
        near = rig.memory("near")
        layer.add("near", near)
        source = rig.blocks("r").fill()
        tickets = rig.put(near, source)
        gate = threading.Barrier(5)

        def load(index: int, layer: Any = layer, gate: Any = gate, tickets: Any = tickets) -> Any:
            gate.wait()
            try:
                return layer.belay.load(f"r{index}", tickets, rig.blocks("r").batches, 60.0).result
            except errors.Closed:
                return Result.CANCELLED

        futures = [layer.aside(lambda index=index, load=load: load(index)) for index in range(4)]
        gate.wait()
        layer.belay.close()
        results = {future.result(5) for future in futures}
        assert results <= {Result.LOADED, Result.CANCELLED, Result.RECOMPUTE, Result.MISSED}


def test_a_connector_whose_close_raises_or_hangs(rig: Any) -> None:
    """Neither keeps the layer open; the one that hangs is counted."""
    layer = rig.layer()
    stop = threading.Event()
    raising, hanging = rig.memory("raising"), rig.memory("hanging")
    raising.close = lambda: 1 / 0
    hanging.close = lambda: stop.wait(20)
    layer.add("raising", raising)
    layer.add("hanging", hanging)
    assert layer.belay.close(0.1) == 1
    stop.set()


def test_the_process_ends_although_a_call_hangs() -> None:
    """A call that never comes back does not keep the interpreter alive after close."""
    script = """
import threading
from kvbelay.connectors.memory import BACKEND, MemoryConfig
from kvbelay.core.model import Fingerprint
from kvbelay.core.policy import Policy
from kvbelay.runtime.belay import Belay
from array import array
from kvbelay.core.model import BatchId, BlockSpan, TransferBatch
mark = Fingerprint(model="m", revision="1", layouts=())
near = BACKEND.open(MemoryConfig(), child="near", fingerprint=mark)
near.lookup = lambda ids, within: threading.Event().wait()
belay = Belay(Policy(drain_s=0.05))
belay.add("near", lambda: near)
span = BlockSpan(memoryview(bytearray(16)), array("Q", [0]), 16)
batch = TransferBatch(BatchId(mark.digest(), 0, 16, (0, 1), b"p"), "r", 0, (span,))
print(belay.load("r", (), [batch], 1.0).held, belay.close(0.1))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=True)
    assert (done.stdout.split(), done.stderr) == (["True", "1"], "")
