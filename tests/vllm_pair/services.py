"""Servers of caches beside the engines: LMCache's, and Mooncake's master."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from server import free_port, until
from serving import forks, run

START_S = 90.0
"""How long one may take to start, on a machine that others use too."""


class Service:
    """A program that listens on a port of this machine: started, killed, and started again."""

    def __init__(self, name: str, folder: Path, port: int, command: Sequence[str]) -> None:
        self.name = name
        self.port = port
        self._command = list(command)
        self._log_path = folder / f"{name}.log"
        self._process: BaseProcess | None = None

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        """Start it, without waiting until it serves."""
        self._process = forks().Process(target=run, args=(self._command, self._log_path))
        self._process.start()

    def wait(self) -> None:
        """Wait until it listens."""

        def up() -> bool:
            if not self.running:
                msg = f"{self.name} has ended:\n{self._log_path.read_text(errors='replace')[-4000:]}"
                raise RuntimeError(msg)
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", self.port)) == 0

        until(up, f"{self.name} listens", START_S, pause_s=0.1)

    def kill(self) -> None:
        """End it at once."""
        if self._process is None or self._process.pid is None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has ended, or has no group yet
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join()


def lmcache_server(folder: Path) -> Service:
    """A cache of 1 GB, in chunks of two blocks."""
    port = free_port()
    command = [sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(free_port()), "--l1-size-gb", "1"]
    command += ["--eviction-policy", "LRU", "--chunk-size", "64", "--supported-transfer-mode", "engine_driven"]
    return Service("lmcache", folder, port, command)


def mooncake_master(folder: Path) -> Service:
    """Mooncake's master. What it has granted to a reader is good for 20 ms, so that many loads fail."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("mooncake_master")), "-rpc_address=127.0.0.1", f"-rpc_port={port}"]
    command += ["-metrics_host=127.0.0.1", f"-metrics_port={free_port()}", "-default_kv_lease_ttl=20", "-logtostderr"]
    return Service("mooncake", folder, port, command)


def mooncake_client(folder: Path, master: Service) -> dict[str, str]:
    """What an engine has to find in its environment; each engine brings a segment of its own into the store."""
    path = folder / "mooncake.json"
    config = {
        "mode": "embedded",
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": f"127.0.0.1:{master.port}",
        "protocol": "tcp",
        "device_name": "",
        "global_segment_size": "64MB",
        "local_buffer_size": "64MB",
    }
    path.write_text(json.dumps(config))
    return {
        "MOONCAKE_CONFIG_PATH": str(path),
        "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",  # for a part of an engine that is gone; 30 s by default
        "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    }
