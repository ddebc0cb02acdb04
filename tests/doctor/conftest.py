"""The doctor, asked for what it finds in logs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbelay.doctor.finding import Finding
from kvbelay.doctor.logs import check_logs
from kvbelay.doctor.signatures import Signatures, load

LOGS = Path(__file__).parent / "logs"


@pytest.fixture(scope="session")
def signatures() -> Signatures:
    return load()


@pytest.fixture
def read(signatures: Signatures) -> Callable[..., list[Finding]]:
    """Findings in logs of tests/doctor/logs by name, or in files."""

    def ask(*names: str | Path, request: str = "") -> list[Finding]:
        paths = [str(name if isinstance(name, Path) else LOGS / f"{name}.log") for name in names]
        return check_logs(paths, request, signatures, note=lambda _: None)

    return ask
