"""What a `Belay` shows on Prometheus: each outcome once, how the children stand, and nothing that a peer chose."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from kvbelay.core.circuit import CircuitState
from kvbelay.core.model import Result, Side
from kvbelay.observability.prometheus import Metrics

from .moody import TOKENS, Mood, Scene

Shown = Callable[..., float]


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def scene(registry: CollectorRegistry) -> Iterator[Scene]:
    """Two children, watched."""
    metrics = Metrics(registry)
    scene = Scene(metrics, "near", "far")
    metrics.show(scene.belay)
    yield scene
    scene.close()


@pytest.fixture
def shown(registry: CollectorRegistry) -> Shown:
    """The sum of a series' samples that have these labels."""

    def read(series: str, **labels: str) -> float:
        samples = [sample for family in registry.collect() for sample in family.samples]
        wanted = labels.items()
        return sum(one.value for one in samples if one.name == f"kvbelay_{series}" and wanted <= one.labels.items())

    return read


def test_outcomes(scene: Scene, shown: Shown) -> None:
    """Each request is counted once a direction, under the child that completed it, with the time that it took."""
    assert scene.load().result is Result.LOADED
    assert shown("outcomes_total") == 2
    assert shown("outcomes_total", side="load", result="loaded", child="near") == 1
    assert shown("outcomes_total", side="save", result="saved") == 1
    assert shown("decision_seconds_count", side="load") == shown("decision_seconds_count", side="save") == 1
    assert shown("failures_total") == shown("recomputed_tokens_total") == 0


def test_failures(scene: Scene, shown: Shown) -> None:
    """A failure is counted with its child, operation and kind, also where another child made it good."""
    scene.children["near"].mood = Mood.CORRUPT
    assert scene.load().result is Result.LOADED
    assert shown("failures_total", child="near", operation="get", kind="CorruptData") >= 1
    assert shown("failures_total", child="far") == 0
    assert shown("outcomes_total", result="loaded", child="far") == 1


def test_recomputed_tokens(scene: Scene, shown: Shown) -> None:
    """Tokens that nobody could bring are counted as computed again; nobody's fault is not."""
    for child in scene.children.values():
        child.mood = Mood.LOST
    assert scene.load().result is Result.RECOMPUTE
    assert shown("recomputed_tokens_total") == TOKENS
    assert shown("outcomes_total", result="recompute", child="") == 1


def test_states(scene: Scene, shown: Shown) -> None:
    """At a scrape the children are shown as they stand: circuit, what is held, and who could not start."""
    scene.fails_to_start("absent")
    scene.children["near"].mood = Mood.HANGS
    assert scene.load(within_s=0.05).held
    assert shown("held_transfers", child="near") == 1
    assert shown("child_unavailable", child="absent") == 1
    assert shown("child_unavailable", child="near") == shown("child_unavailable", child="far") == 0
    scene.children["near"].mood = Mood.WELL
    scene.children["near"].go_on.set()
    while scene.belay.pending():
        time.sleep(0.001)
    assert shown("held_transfers") == 0
    scene.children["far"].mood = Mood.LOST
    while scene.belay.states()[1].circuit is CircuitState.CLOSED:
        scene.load("far")
    assert shown("circuit_open", child="far") == 1


def test_swallowed(scene: Scene, shown: Shown) -> None:
    """Completions that change nothing are shown by child and reason; of children that nobody has under one name."""
    scene.belay.heard("near", Side.LOAD, "nobody's", True)
    for index in range(20):
        scene.belay.heard(f"made up {index}", Side.LOAD, "nobody's", None)
    assert shown("swallowed_total", child="near", reason="unknown request") == 1
    assert shown("swallowed_total", child="?", reason="unknown child") == 20


def test_an_empty_layer(registry: CollectorRegistry, shown: Shown) -> None:
    """Before it has a layer, and with one that has no child, a scrape is answered."""
    metrics = Metrics(registry)
    assert shown("circuit_open") == 0
    scene = Scene(metrics)
    metrics.show(scene.belay)
    assert shown("circuit_open") == 0
    scene.close()


def test_what_peers_choose_makes_no_series(scene: Scene, registry: CollectorRegistry, shown: Shown) -> None:
    """Tickets that name children which nobody has, and errors of a connector's own making, add no series beyond one."""
    scene.children["near"].mood = Mood.OWN
    names: set[int] = set()
    for index in range(40):
        outcome = scene.load(strangers=[f"stranger {index}.{number}" for number in range(3)])
        assert {failure.child for failure in outcome.failures} - scene.children.keys(), "no stranger was looked for"
        scene.belay.heard(f"stranger {index}", Side.LOAD, f"r{index}", f"nonsense {index}")
        if index >= 10:
            names.add(generate_latest(registry).count(b"\n"))
    assert len(names) == 1
    assert shown("failures_total", child="?") >= 40
    assert shown("failures_total", child="near", kind="ForeignError") > 0
    assert b"stranger" not in generate_latest(registry)
    assert b"Odd" not in generate_latest(registry)


def test_nothing_is_kept_of_a_request(registry: CollectorRegistry) -> None:
    """When all requests have ended, the sink remembers none."""
    metrics = Metrics(registry)
    scene = Scene(metrics, "near")
    metrics.show(scene.belay)
    for mood in (Mood.WELL, Mood.LOST, Mood.CORRUPT):
        scene.children["near"].mood = mood
        scene.load()
    assert metrics._wanted == {}
    scene.close()


def test_a_sink_that_raises_harms_nobody() -> None:
    """What is raised in the sink changes no outcome, and stands among the hook's failures."""

    class Broken(Metrics):
        def __call__(self, *_: object) -> None:
            raise RuntimeError("the sink is broken")

    scene = Scene(Broken(CollectorRegistry()), "near")
    assert scene.load().result is Result.LOADED
    assert "the sink is broken" in scene.belay.hook_failures[-1].detail
    scene.close()
