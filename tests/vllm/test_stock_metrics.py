"""The field report 14: statistics are never fatal."""

from __future__ import annotations

import pytest
from engine import Child, Engine, Spec
from expect import Stock, prove, put_up
from forks import Engines
from prometheus_client import REGISTRY
from scripts import Script

NOT_REGISTERED = Stock("dead", "is not registered")
NO_SERIES = Stock("dead", "is not contained in the list of registered connectors")


def counted(engine: Engine, series: tuple[str, ...]) -> list[str]:
    """Two requests, and then every child of ``series`` has one of its own."""
    put_up(x=Script(offer=96), y=Script(offer=96))
    for number in range(2):
        engine.add(f"r{number}", number)
    engine.finish()
    engine.right()
    samples = [sample for metric in REGISTRY.collect() for sample in metric.samples]
    ours = [f"{sample.name} {sample.labels} {sample.value}" for sample in samples if "scripted" in sample.name]
    for child in series:
        named = [line for line in ours if f"'{child}'" in line and "_created" not in line]
        assert len(named) == 1, f"{child} has the series {named} of {ours}"
    return ours


@pytest.mark.parametrize(
    ("x", "y", "series", "stock"),
    [
        pytest.param("CountingConnector", "", ("x",), Stock("broken", "x has the series []"), id="one"),
        pytest.param("CountingConnector", "CountingConnector", ("x", "y"), Stock("broken", "x has the"), id="two"),
        pytest.param("MuteConnector", "CountingConnector", ("y",), NO_SERIES, id="without-series"),
        pytest.param("LooseConnector", "", ("x",), NOT_REGISTERED, id="not-registered"),
        pytest.param("Aliased", "CountingConnector", ("x", "y"), NOT_REGISTERED, id="other-name"),
        pytest.param("BadSeriesConnector", "CountingConnector", ("y",), Stock("unborn", "no series"), id="bad-series"),
        pytest.param("BadStatsConnector", "CountingConnector", ("y",), Stock("dead", "no statistics"), id="bad-stats"),
    ],
)
def test_14_statistics(
    standing: Engines, holder: str, *, x: str, y: str, series: tuple[str, ...], stock: Stock
) -> None:
    """Each child that has a series has it under its own name, whatever the others' classes lack."""
    children = (
        Child(name="x", kind=x, module="variants"),
        Child(name="y", kind=y, module="variants") if y else Child(name="y"),
    )
    prove(standing, holder, counted, stock, Spec(children=children, stats=True), series=series, fresh=True)
