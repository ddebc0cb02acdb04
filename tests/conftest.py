"""For all tests: where continuous integration runs, a test that is skipped has failed. Proofs that peers demand of one
another, and plain sockets for peers of a test's own making.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbelay.net.tls import TlsConfig

ROOT = Path(__file__).resolve().parents[1]

Reports = Generator[None, pytest.TestReport, pytest.TestReport]
Collected = Generator[None, pytest.CollectReport, pytest.CollectReport]


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}: with CI=true nothing may be skipped"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Reports:  # noqa: ARG001 # the hook's names
    """A skipped test."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Collected:  # noqa: ARG001 # the hook's name
    """A module that is skipped as a whole."""
    report = yield
    _refuse(report)
    return report


@pytest.fixture(scope="session")
def freeze() -> Callable[[int], None]:
    return stand_still


def stand_still(child: int) -> None:
    """Stop the process with this number. Returns when all its threads stand still: a busy machine takes some 10 ms."""
    os.kill(child, signal.SIGSTOP)
    os.waitid(os.P_PID, child, os.WSTOPPED | os.WEXITED | os.WNOWAIT)


@pytest.fixture(scope="session")
def certify() -> Callable[..., Path]:
    return certificates


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with authority.pem, node.pem and node.key, made by the commands of docs/stream.md."""
    return certificates(tmp_path_factory.mktemp("authority"))


def certificates(folder: Path, addresses: str = "IP:127.0.0.1") -> Path:
    """Run what docs/stream.md says, for these addresses; what is there already of the authority is kept."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes certificates, is not installed")
    once, node = (ROOT / "docs" / "stream.md").read_text().split("```sh\n")[2].split("```")[0].split("\n\n")
    script = node.replace("ADDRESSES=IP:10.0.0.1", f"ADDRESSES={addresses}")
    assert addresses in script
    if not (folder / "authority.key").exists():
        script = f"{once}\n{script}"
    done = subprocess.run(["bash", "-euc", script], cwd=folder, capture_output=True, text=True, check=False)  # noqa: S607
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    """A token, made by the command of docs/stream.md."""
    command = (ROOT / "docs" / "stream.md").read_text().split("```sh\n")[1].split("```")[0]
    subprocess.run(["bash", "-euc", command], cwd=tmp_path, check=True)  # noqa: S607
    return str(tmp_path / "token")


@pytest.fixture
def kinds(authority: Path, token_file: str) -> dict[str, dict[str, Any]]:
    """What a configuration says for each kind of trust."""
    tls = TlsConfig(*(str(authority / name) for name in ("node.pem", "node.key", "authority.pem")))
    return {"plain": {}, "token": {"token_file": token_file}, "tls": {"tls": tls}}


@pytest.fixture(params=["token", "tls"])
def secured(request: pytest.FixtureRequest, kinds: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What a configuration says for each kind that may leave the host."""
    return kinds[request.param]


def dial_raw(address: str) -> socket.socket:
    """A client of our own making."""
    if address.startswith("unix://"):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(10)
        sock.connect(address.removeprefix("unix://"))
    else:
        sock = socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1])), timeout=10)
    return sock


@pytest.fixture
def raw() -> Iterator[Callable[[str], socket.socket]]:
    """Connects a plain socket to an address; closed at the end."""
    made: list[socket.socket] = []

    def dial(address: str) -> socket.socket:
        made.append(dial_raw(address))
        return made[-1]

    yield dial
    for sock in made:
        sock.close()
