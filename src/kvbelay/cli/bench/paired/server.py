"""One API server of vLLM with the guard over NIXL: started, asked, frozen, killed, and started again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvbelay.errors import ConfigError, DeadlineExceeded, PeerLost

HOST = "127.0.0.1"
PROGRAM = "vllm.entrypoints.openai.api_server"
"""The module; the command "vllm serve" ends with the CPU build, for it looks for a package of another name."""
BLOCK = 32
"""Tokens in a block."""
LONGEST = 1024
"""Tokens of a prompt and its answer."""
START_S = 600.0
ASK_S = 120.0
END_S = 10.0
POLL_S = 0.02
LINES = 20_000
"""Most lines of its log that are kept."""
TAIL = 12
"""Lines of it that an error shows."""
PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the ports that outgoing connections are given. A NIXL connector that finds its port taken hangs."""
LINKED = {"verify": "prefer", "link": {"listen": f"tcp://{HOST}:0"}}
"""The guard's options that turn verification on."""
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "UCX_NET_DEVICES": "lo",
    "UCX_TLS": "tcp",  # as between two machines
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),  # two servers that wait for a core spin, and for long
}
"""What servers need that share a machine's cores; the user's own environment counts more."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")


class Server:
    """Ends with `close`, and when this process ends, however that goes.

    Parameters
    ----------
    name
        In messages.
    model
        What ``--model`` of vLLM takes.
    linked
        Whether loads are verified, and the other side's death is heard.
    caching
        Whether prompts that begin alike share blocks.
    """

    def __init__(self, name: str, model: str, *, linked: bool, caching: bool = True) -> None:
        self.name = name
        self._arguments = ["--model", model, "--served-model-name", "m", "--enforce-eager"]
        self._arguments += ["--block-size", str(BLOCK), "--max-model-len", str(LONGEST)]
        self._arguments += ["--host", HOST, "--disable-uvicorn-access-log"]
        self._arguments += ["--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
        self._options = LINKED if linked else {}
        self._process: subprocess.Popen[str] | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._listener: threading.Thread | None = None
        self._lines: deque[tuple[float, str]] = deque(maxlen=LINES)
        self.port = 0

    @property
    def running(self) -> bool:
        """Whether it was started, and not killed."""
        return self._process is not None

    def start(self) -> None:
        """Start it, without waiting until it serves."""
        self.port, side_port = _free_port(), _free_port()
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_connector_module_path": "kvbelay.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}],
                "kvbelay": self._options,
            },
        }
        command = [sys.executable, "-m", PROGRAM, *self._arguments]
        command += ["--port", str(self.port), "--kv-transfer-config", json.dumps(transfer)]
        own = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port), "VLLM_HOST_IP": HOST}
        self._process = subprocess.Popen(  # noqa: S603  # vLLM
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**ON_CPU, "VLLM_NO_USAGE_STATS": "1", **os.environ, **own},
            start_new_session=True,  # Ctrl-C is ours to hear
        )
        self._warden = subprocess.Popen(  # noqa: S603  # the end of its input is our end
            ["/bin/sh", "-c", 'read -r _; kill -s KILL -- "-$0"', str(self._process.pid)],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, args=(self._process.stdout,), daemon=True)
        self._listener.start()

    def wait(self) -> None:
        """Wait until it serves. Raises `PeerLost` if it ends instead, with the end of its log."""

        def up() -> bool:
            if self._process is None or self._process.poll() is not None:
                msg = f"the {self.name} server has ended"
                raise PeerLost(msg, remedy=f"its last words are:\n{self._tail()}")
            with contextlib.suppress(OSError, http.client.HTTPException), self.asked("GET", "/health") as response:
                return response.status == http.client.OK
            return False

        until(up, f"the {self.name} server serves", START_S, pause_s=0.2)

    def kill(self) -> float:
        """End all its processes at once, as a machine's death does. Returns when they were told."""
        process, self._process = self._process, None
        now = time.monotonic()
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if self._warden is not None:  # before the group's number may become another's
            self._warden.kill()
            self._warden.communicate()
            self._warden = None
        if process is not None:
            process.wait()
        if self._listener is not None:
            self._listener.join(END_S)
        return now

    close = kill

    def freeze(self) -> None:
        """Stop all its processes where they stand."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let them go on."""
        self._signal(signal.SIGCONT)

    @contextlib.contextmanager
    def asked(self, method: str, path: str, body: object = None) -> Iterator[http.client.HTTPResponse]:
        """The response to one request, on a connection of its own."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=ASK_S)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json"})
            yield connection.getresponse()
        finally:
            connection.close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        """A completion. Raises `PeerLost` where the server answers something else."""
        with self.asked("POST", "/v1/completions", {"model": "m", "temperature": 0.0, **body}) as response:
            return self._decoded(response)

    def stream(self, body: dict[str, Any]) -> Iterator[float]:
        """The moments at which the tokens of a completion arrive."""
        whole = {"model": "m", "temperature": 0.0, "stream": True, "ignore_eos": True, **body}
        with self.asked("POST", "/v1/completions", whole) as response:
            if response.status != http.client.OK:
                self._decoded(response)
            while line := response.readline():
                if line.startswith(b"data: {"):
                    yield time.monotonic()

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that bear these labels."""
        with self.asked("GET", "/metrics") as response:
            text = response.read().decode()
        total = 0.0
        for found in map(_SAMPLE.fullmatch, text.splitlines()):
            if found is not None and found[1] == name:
                own = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                total += float(found[3]) if labels.items() <= own.items() else 0.0
        return total

    def said(self, pattern: str, since: float, within_s: float) -> float:
        """When it logged a line that matches, ``since`` then. Raises `DeadlineExceeded`."""
        heard: list[float] = []

        def found() -> bool:
            heard[:] = [at for at, line in list(self._lines) if at >= since and re.search(pattern, line)]
            return bool(heard)

        until(found, f"the {self.name} server logs {pattern!r}", within_s)
        return heard[0]

    def _listen(self, output: Any) -> None:
        with output:
            for line in output:
                self._lines.append((time.monotonic(), line.rstrip()))

    def _tail(self) -> str:
        return "\n".join(line for _, line in list(self._lines)[-TAIL:])

    def _decoded(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        text = response.read()
        if response.status != http.client.OK:
            msg = f"the {self.name} server answered {response.status}: {text[:400].decode(errors='replace')}"
            raise PeerLost(msg, remedy=f"the last words of its log are:\n{self._tail()}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, number)


def until(holds: Callable[[], bool], what: str, within_s: float, *, pause_s: float = POLL_S) -> None:
    """Wait until it is so. Raises `DeadlineExceeded`."""
    ends_at = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends_at:
            msg = f"{within_s:.0f} s were not enough until {what}"
            raise DeadlineExceeded(msg)
        time.sleep(pause_s)


def _free_port() -> int:
    """One that nobody has, and that no outgoing connection is given before the server listens there."""
    lowest = int(PORTS.read_text(encoding="ascii").split()[0]) if PORTS.exists() else 32_768
    for _ in range(1000):
        port = 10_000 + secrets.randbelow(max(1, lowest - 10_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise ConfigError("no port is free below those of outgoing connections", remedy="end some servers")
