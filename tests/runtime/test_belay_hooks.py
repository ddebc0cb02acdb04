"""Hooks: what they hear and in which order, and that nothing which they do reaches anybody else."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from kvbelay.connectors.faulty import Fault, Operation, Strike
from kvbelay.core.model import Action, Do, Event, Kind, Report, Result, Side
from kvbelay.runtime.belay import Belay


class Evil:
    """Whatever is read of it raises."""

    def __getattribute__(self, name: str) -> Any:
        message = f"reading {name} broke"
        raise RuntimeError(message)


@pytest.fixture
def belay_with(rig: Any) -> Any:
    """Makes a layer with the test's own hooks."""
    made: list[Belay] = []

    def make(**options: Any) -> Belay:
        made.append(Belay(rig.policy, **options))
        return made[-1]

    yield make
    for belay in made:
        belay.close()


def test_watch_hears_everything_in_order(rig: Any) -> None:
    """Event, reports and actions of a request, each once, in the order in which they happened."""
    layer = rig.layer()
    near = rig.faulty("near", Strike(fault=Fault.RAISE, nth=2))
    layer.add("near", near)
    assert layer.load("r", rig.blocks("r", 2), rig.put(near.inner, rig.blocks("r", 2).fill())).result is Result.LOADED
    rig.wait_for(lambda: layer.actions(Do.TELL))
    kinds = [thing.do if isinstance(thing, Action) else thing.kind for thing in layer.log]
    assert kinds == [
        *[Kind.BEGIN, Do.START],
        *[Kind.LANDED, Kind.FAILED],
        *[Do.START, Kind.LANDED, Do.TELL],
    ]
    assert [type(thing) for thing in layer.log[:3]] == [Event, Action, Report]


def test_watch_is_called_one_at_a_time(rig: Any, belay_with: Any) -> None:
    """However many threads are at work, `watch` runs on one of them at a time, and time does not go back for it."""
    at_it = threading.Lock()
    overlaps: list[object] = []
    times: list[float] = []

    def watch(thing: object, at: float) -> None:
        if not at_it.acquire(blocking=False):
            overlaps.append(thing)
            return
        times.append(at)
        at_it.release()

    belay = belay_with(watch=watch)
    near = rig.memory("near")
    belay.add("near", lambda: near)
    sources = [rig.blocks(f"r{index}").fill() for index in range(8)]
    tickets = [rig.put(near, source) for source in sources]

    def load(index: int) -> None:
        for turn in range(10):
            belay.load(f"r{index} {turn}", tickets[index], rig.blocks(f"r{index}").batches, 5.0)

    threads = [threading.Thread(target=load, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rig.wait_for(lambda: len(times) == 80 * (1 + 1 + 3 + 1))
    assert not overlaps
    assert times == sorted(times)


HOOKS: dict[str, Any] = {
    "an error": ValueError("no"),
    "an exit": SystemExit(3),
    "an interrupt": KeyboardInterrupt(),
    "an evil answer": Evil,
}


@pytest.mark.parametrize("case", HOOKS)
def test_hooks_that_raise_are_dropped(rig: Any, belay_with: Any, case: str) -> None:
    """Whatever a hook raises or returns, outcomes, deadlines and releases come as ever, and what it raised is kept."""
    thing = HOOKS[case]

    def hook(*_: object) -> object:
        if thing is Evil:
            return Evil()
        raise thing

    belay = belay_with(watch=hook, released=hook)
    near = rig.faulty("near", Strike(fault=Fault.HANG, nth=1))
    belay.add("near", lambda: near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    held: list[Any] = []

    def caller() -> None:
        held.append(belay.load("r", tickets, rig.blocks("r").batches, 60.0).held)
        near.let_go()
        rig.wait_for(lambda: belay.pending() == 0)
        held.append(belay.load("r", tickets, rig.blocks("r").batches, 5.0).result)

    threads = [
        threading.Thread(target=caller),
        threading.Thread(target=lambda: rig.wait_for(lambda: rig.struck) or belay.heard("near", Side.LOAD, "r", None)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert held == [True, Result.LOADED]
    rig.wait_for(lambda: not belay._driver._news)
    operations = {failure.operation for failure in belay.hook_failures}
    assert operations == (set() if thing is Evil else {"watch", "released"})
    assert len(belay.hook_failures) <= 16


def test_hook_failures_are_bounded(rig: Any, belay_with: Any) -> None:
    """Of many failures the last ones are kept."""
    count = iter(range(10_000))

    def watch(_thing: object, _at: float) -> None:
        raise ValueError(next(count))

    belay = belay_with(watch=watch)
    near = rig.memory("near")
    belay.add("near", lambda: near)
    tickets = rig.put(near, rig.blocks("r").fill())
    for _ in range(20):
        belay.load("r", tickets, rig.blocks("r").batches, 5.0)
    rig.wait_for(lambda: not belay._driver._news)
    last = next(count) - 1
    rig.wait_for(lambda: str(last) in belay.hook_failures[-1].detail)
    assert len(belay.hook_failures) == 16
    assert str(last - 15) in belay.hook_failures[0].detail


def test_ctrl_c_in_a_hook_reaches_the_process(rig: Any, belay_with: Any) -> None:
    """In the main thread a KeyboardInterrupt is the process's: the request that waited there is called off."""
    calls = iter([KeyboardInterrupt])

    def watch(_thing: object, _at: float) -> None:
        if threading.current_thread() is threading.main_thread():
            raise next(calls, ValueError)

    belay = belay_with(watch=watch)
    near = rig.memory("near")
    belay.add("near", lambda: near)
    with pytest.raises(KeyboardInterrupt):
        belay.load("r", rig.put(near, rig.blocks("r").fill()), rig.blocks("r").batches, 5.0)
    assert belay.pending() == 0


def test_a_hook_that_hangs_keeps_only_its_own_thread(rig: Any, belay_with: Any) -> None:
    """Other callers get their outcomes while one thread is stuck in a hook; it hears the rest when it is back."""
    stuck, go = threading.Event(), threading.Event()
    heard: list[object] = []

    def watch(thing: object, _at: float) -> None:
        heard.append(thing)
        if len(heard) == 1:
            stuck.set()
            go.wait(20)

    belay = belay_with(watch=watch)
    near = rig.memory("near")
    belay.add("near", lambda: near)
    tickets = rig.put(near, rig.blocks("r").fill())
    threads = [
        threading.Thread(target=belay.load, args=(name, tickets, rig.blocks("r").batches, 5.0)) for name in ("a", "b")
    ]
    threads[0].start()
    assert stuck.wait(10)
    threads[1].start()
    threads[1].join(10)
    assert not threads[1].is_alive()
    assert len(heard) == 1
    go.set()
    threads[0].join(10)
    rig.wait_for(lambda: len(heard) == 2 * (1 + 1 + 3 + 1))


@pytest.mark.parametrize("lends", [True, False])
def test_hooks_may_call_the_layer(rig: Any, belay_with: Any, lends: bool) -> None:
    """A hook can ask, cancel and even close the layer that calls it, on whatever thread it runs."""
    closed: list[int] = []

    def released(request: str, _side: Side) -> None:
        belay.heard("near", Side.LOAD, request, None)
        belay.cancel(request)
        belay.states()
        belay.swallowed()
        closed.append(belay.close(1.0))

    belay = belay_with(released=released)
    near = rig.stream() if lends else rig.faulty("near", Strike(fault=Fault.HANG, operation=Operation.PUT, nth=1))
    belay.add("near", lambda: near)
    source = rig.blocks("r").fill()
    saved: list[Any] = []
    thread = threading.Thread(target=lambda: saved.append(belay.save("r", source.batches, 60.0)))
    thread.start()
    if not lends:
        rig.wait_for(lambda: rig.struck)
        belay.heard("near", Side.SAVE, "r", None)
    thread.join(20)
    assert saved[0].held
    if lends:
        belay.cancel("r")
    else:
        near.let_go()
    rig.wait_for(lambda: closed == [0])
    assert not belay.hook_failures
    assert belay.pending() == 0


def test_released_is_called_once_an_outcome(rig: Any) -> None:
    """Whatever is held, its release is told once, after the outcome, and never for what was not held."""
    layer = rig.layer()
    near = rig.faulty("near", Strike(fault=Fault.HANG, nth=2))
    layer.add("near", near)
    tickets = rig.put(near.inner, rig.blocks("r").fill())
    assert not layer.load("free", rig.blocks("r", 1), tickets[:1]).held
    into = rig.blocks("r")
    into.request = "held"
    layer.hold("near", into, tickets, lambda: rig.struck)
    near.let_go()
    rig.wait_for(layer.settled)
    rig.wait_for(lambda: layer.released)
    assert layer.released == [("held", Side.LOAD)]
    told = [thing for thing in layer.log if isinstance(thing, Action) and thing.do in {Do.TELL, Do.RELEASE}]
    assert [(action.do, action.request) for action in told] == [
        (Do.TELL, "free"),
        (Do.TELL, "held"),
        (Do.RELEASE, "held"),
    ]


def test_the_seed_decides_about_backoffs(rig: Any) -> None:
    """Two layers with one seed wait equally long; the jitter is not the same for all."""
    waits = []
    for seed in (5, 5, 6):
        ledger = Belay(msgspec.structs.replace(rig.policy), seed=seed)
        waits.append([ledger._driver.ledger._random() for _ in range(3)])
        ledger.close()
    assert waits[0] == waits[1] != waits[2]
