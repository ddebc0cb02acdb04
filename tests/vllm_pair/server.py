"""One API server of vLLM in processes of its own: started, asked, frozen, killed, and started again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import httpx
from children import Child
from serving import forks, serve

from kvbelay.cli.up.cores import spread
from kvbelay.cli.up.engines import ALONE

BLOCK = 32
"""Tokens in a block."""
START_S = 120.0
"""How long a server may take to start, on a machine that others use too."""


class Server:
    """An engine with children below `MultiConnector`, guarded or stock; or, without children, a plain engine.

    Parameters
    ----------
    name
        In the log's file name, and in messages.
    children
        The children's configurations.
    options
        The guard's options; None: the stock class.
    blocks
        Size of its KV cache; None: as many as fit into 1 GiB.
    environment
        What its children want there.
    before
        Done in its processes before they begin, to break something on purpose.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        *,
        children: Sequence[Child] = (),
        options: Mapping[str, Any] | None = None,
        blocks: int | None = None,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], None] | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.guarded = options is not None
        self.log_path = folder / f"{name}.log"
        self.port, self.side_port = free_port(), free_port()
        self._children = list(children)
        self._options = dict(options or {})
        self.blocks = blocks
        self._more = dict(environment or {})
        self._before = before
        self._process: BaseProcess | None = None
        limits = httpx.Limits(keepalive_expiry=1.0)  # the server hangs up on a connection that is idle for 5 s
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=180.0, limits=limits)

    @property
    def running(self) -> bool:
        """Whether its first process is there."""
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Start it, without waiting until it serves."""
        arguments = ["--model", str(self.model), "--served-model-name", "m", "--enforce-eager", "--dtype", "float32"]
        arguments += ["--host", "127.0.0.1", "--port", str(self.port), "--disable-uvicorn-access-log"]
        arguments += ["--block-size", str(BLOCK), "--max-model-len", "512", "--max-num-seqs", "32", *ALONE]
        if self._children:
            arguments += ["--kv-transfer-config", json.dumps(self._transfer_config())]
        if self.blocks is not None:
            arguments += ["--num-gpu-blocks-override", str(self.blocks)]
        environment = self._environment()
        self._process = forks().Process(target=serve, args=(arguments, environment, self.log_path, self._before))
        self._process.start()

    def wait(self) -> None:
        """Wait until it serves."""

        def up() -> bool:
            if not self.running:
                tail = self.log()[-4000:]
                msg = f"{self.name} has ended:\n{tail}"
                raise RuntimeError(msg)
            try:
                return self.client.get("/health", timeout=5.0).status_code == httpx.codes.OK
            except httpx.HTTPError:
                return False

        try:
            until(up, f"{self.name} serves", START_S, pause_s=0.1)
        except TimeoutError as late:
            tail = self.log()[-4000:]
            self.kill()  # or the next test would take it for one that serves
            msg = f"{late}:\n{tail}"
            raise TimeoutError(msg) from None
        if self._process is not None and self._process.pid is not None:
            spread(self._process.pid)

    def kill(self) -> None:
        """End all its processes at once, as a machine's death does."""
        if self._process is None:
            return
        group = self._signal(signal.SIGKILL)
        self._process.kill()  # it may have no group yet
        self._process.join()
        until(lambda: all(state in "ZX" for state in states(group)), f"{self.name} is gone", 30.0)
        self._process = None

    def freeze(self) -> None:
        """Stop all its processes where they stand, and wait until every thread of theirs has stopped."""
        group = self._signal(signal.SIGSTOP)
        until(lambda: all(state in "TtZX" for state in states(group)), f"{self.name} is frozen", 30.0)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self.client.close()

    def alive(self) -> bool:
        """Whether the engine answers for its health."""
        try:
            return self.running and self.client.get("/health", timeout=30.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def log(self, since: int = 0) -> str:
        """What it has logged, from a `mark` on."""
        with self.log_path.open("rb") as text:
            text.seek(since)
            return text.read().decode(errors="replace")

    def mark(self) -> int:
        """Where its log ends now."""
        return self.log_path.stat().st_size if self.log_path.exists() else 0

    def said(self, pattern: str, since: int = 0) -> bool:
        """Whether the log has a line that matches."""
        return re.search(pattern, self.log(since)) is not None

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a series of ``/metrics`` over all label sets that have these labels; 0 if there is none."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            found = re.fullmatch(r"([\w:]+)(?:\{(.*)\})? (\S+)", line)
            if found is not None and found[1] == name:
                own = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', found[2] or ""))
                if labels.items() <= own.items():
                    total += float(found[3])
        return total

    def _signal(self, number: int) -> int:
        """Send a signal to the whole process group; returns the group."""
        group = self._process.pid if self._process is not None else None
        if group is None:
            msg = f"{self.name} was not started"
            raise RuntimeError(msg)
        with contextlib.suppress(ProcessLookupError):  # all of it has ended
            os.killpg(group, number)
        return group

    def _transfer_config(self) -> dict[str, Any]:
        extra: dict[str, Any] = {"connectors": self._children}
        config: dict[str, Any] = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
        if self.guarded:
            config["kv_connector_module_path"] = "kvbelay.vllm"
            extra["kvbelay"] = self._options
        return {**config, "kv_connector_extra_config": extra}

    def _environment(self) -> dict[str, str]:
        return {
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # see ALONE
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(self.side_port),
            "UCX_NET_DEVICES": "lo",
            "UCX_TLS": "tcp",  # as between two machines: a frozen peer serves nothing
            **self._more,
        }


def until(holds: Callable[[], bool], what: str, seconds: float, *, pause_s: float = 0.02) -> None:
    """Wait until a condition holds."""
    ends_at = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > ends_at:
            msg = f"{seconds:.0f} s were not enough until {what}"
            raise TimeoutError(msg)
        time.sleep(pause_s)


def free_port() -> int:
    """A port that nobody listens on now, and that no outgoing connection takes before a server is started again.

    The kernel gives outgoing connections ports of a range of its own. A NIXL child that finds its port taken hangs in
    its start for ever.
    """
    first_of_the_kernel = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = secrets.choice(range(10_000, first_of_the_kernel))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def states(group: int) -> list[str]:
    """The states of all threads of a process group."""
    found: list[str] = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it may end meanwhile
            if int(_stat(process)[2]) == group:
                found += [_stat(thread)[0] for thread in process.glob("task/*")]
    return found


def _stat(process: Path) -> list[str]:
    """State, parent and process group, among others."""
    return (process / "stat").read_text().rpartition(") ")[2].split()
