"""One request's way through the logs of prefill, decode and router."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbelay.doctor.finding import Finding, Level
from kvbelay.doctor.trace import core_of

Read = Callable[..., list[Finding]]
ID = "89d64ec8cba2cca1"
ROUTER = f"2026-11-30 01:53:40,100 router INFO request {ID}: prefill http://p:1\n"
PREFILL = f"(APIServer pid=1) INFO 11-30 01:53:41 [logger.py:49] Received request cmpl-{ID}-0: params\n"
DECODE = (
    f"(APIServer pid=2) INFO 11-30 01:53:42 [async_llm.py:1] Added request cmpl-{ID}-0-8d336b17.\n"
    f"(APIServer pid=2) INFO 11-30 01:53:42 [async_llm.py:1] Added request cmpl-{ID}9-0-8d336b17.\n"
    f"(Worker pid=3) ERROR 11-30 01:53:43 [pull_worker.py:562] NIXL transfer failure: transfer_setup_failed | Context: "
    f"{{'request_id': 'cmpl-{ID}-0-8d336b17', 'remote_request_id': 'cmpl-87a96ec2beacca17-0-9dfb7d74'}}\n"
)
OTHER = "(Worker pid=4) WARNING 11-30 01:53:44 [base_worker.py:1] cmpl-87a96ec2beacca17-0-9dfb7d74 was let go\n"


@pytest.fixture
def logs(tmp_path: Path) -> list[Path]:
    paths = []
    for name, text in {"decode": DECODE, "prefill": PREFILL + OTHER, "router": ROUTER, "idle": "nothing\n"}.items():
        paths.append(tmp_path / f"{name}.log")
        paths[-1].write_text(text)
    return paths


@pytest.mark.parametrize("given", [ID, f"cmpl-{ID}", f"cmpl-{ID}-0", f"cmpl-{ID}-0-8d336b17"])
def test_lines_of_all_sides_in_order(given: str, logs: list[Path], read: Read) -> None:
    """Whatever vLLM has put around the id, and under the id that the other side uses; nobody else's lines."""
    (found,) = [one for one in read(*logs, request=given) if one.check == "log.request"]
    assert found.level is Level.NOTE
    assert [Path(one.source).stem for one in found.evidence] == ["router", "prefill", "decode", "decode", "prefill"]
    assert [one.line for one in found.evidence] == [1, 1, 1, 3, 2]
    assert "idle.log" in found.cause


@pytest.mark.parametrize(("given", "why"), [("cmpl-ffffffffffff", "names it"), ("cmpl-1", "too short")])
def test_a_request_that_cannot_be_followed(given: str, why: str, logs: list[Path], read: Read) -> None:
    """It is said why, and what to do about it."""
    (found,) = [one for one in read(*logs, request=given) if one.check == "log.request"]
    assert found.level is Level.UNCHECKED
    assert why in found.cause
    assert found.remedy


@pytest.mark.parametrize(
    ("given", "core"),
    [
        ("cmpl-ab12-0", "ab12"),
        ("chatcmpl-ab12", "ab12"),
        ("ab12-0", "ab12-0"),
        ("cmpl-3f6c1f1e-95a2-4b4e-9f0a-446655440000-0-8d336b17", "3f6c1f1e-95a2-4b4e-9f0a-446655440000"),
        ("cmpl-3f6c1f1e-95a2-4b4e-9f0a-446655440000", "3f6c1f1e-95a2-4b4e-9f0a-446655440000"),
    ],
)
def test_what_remains_of_an_id(given: str, core: str) -> None:
    """A client's own id is not cut."""
    assert core_of(given) == core
