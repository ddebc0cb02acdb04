"""One API server of vLLM with the guard over NIXL: started, asked, frozen, killed, and started again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from kvbelay.cli.up.cores import spread
from kvbelay.cli.up.engines import ALONE, ON_CPU
from kvbelay.cli.up.ports import HOST, free_ports
from kvbelay.cli.up.process import Process, words
from kvbelay.cli.up.process import Server as Started
from kvbelay.cli.up.warden import Warden, kill
from kvbelay.errors import DeadlineExceeded, PeerLost

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
LOG_POLL_S = 0.001
"""So late is it known, at most, that a line was logged."""
LINKED = {"verify": "prefer", "link": {"listen": f"tcp://{HOST}:0"}}
"""The guard's options that turn verification on."""
ENVIRONMENT = {
    **ON_CPU,
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2)),  # two servers that wait for a core spin, and for long
}
"""The user's own counts more."""
_SAMPLE = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")


class Server:
    """Ends with `close`, and when this process ends, however that goes.

    Parameters
    ----------
    name
        In messages.
    model
        What ``--model`` of vLLM takes.
    folder
        For its log.
    warden
        Hears of its processes.
    linked
        Whether loads are verified, and the other side's death is heard.
    caching
        Whether prompts that begin alike share blocks.
    cores
        Where it runs.
    """

    def __init__(
        self,
        name: str,
        model: str,
        folder: Path,
        warden: Warden,
        *,
        linked: bool,
        caching: bool = True,
        cores: Collection[int] = (),
    ) -> None:
        self.name = name
        self._arguments = ["--model", model, "--served-model-name", "m", "--enforce-eager", *ALONE]
        self._arguments += ["--block-size", str(BLOCK), "--max-model-len", str(LONGEST)]
        self._arguments += ["--host", HOST, "--disable-uvicorn-access-log"]
        self._arguments += ["--enable-prefix-caching" if caching else "--no-enable-prefix-caching"]
        self._options = LINKED if linked else {}
        self._cores = cores
        self._log = folder / f"{name}.log"
        self._warden = warden
        self._process: Process | None = None
        self.port = 0

    @property
    def running(self) -> bool:
        """Whether it was started, and not killed."""
        return self._process is not None

    @property
    def group(self) -> int:
        """The number of its process group; 0: it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it, without waiting until it serves."""
        self.port, side_port = free_ports(2)
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
        surroundings = ENVIRONMENT | {key: os.environ[key] for key in ENVIRONMENT if key in os.environ} | own
        self._process = Process(Started(self.name, self.port, command, surroundings), self._log, self._warden)

    def wait(self) -> None:
        """Wait until it serves. Raises `PeerLost` if it ends instead, with the end of its log."""

        def up() -> bool:
            ended = "it was not started" if self._process is None else self._process.ended()
            if self._process is None or ended is not None:
                raise PeerLost(str(ended))
            return self._process.serves()

        until(up, f"the {self.name} server serves", START_S, pause_s=0.2)
        spread(self.group, self._cores)

    def kill(self) -> float:
        """End all its processes at once, as a machine's death does. Returns when they were told."""
        process, self._process = self._process, None
        now = time.monotonic()
        if process is not None:
            kill(process.pid)
            process.end(END_S)
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

    def mark(self) -> int:
        """Where its log ends now."""
        return self._log.stat().st_size

    def said(self, pattern: str, mark: int, within_s: float) -> float:
        """When a line that matches has come into the log, behind a mark. Raises `DeadlineExceeded`."""
        with self._log.open("rb") as log:
            log.seek(mark)
            text = b""

            def found() -> bool:
                nonlocal text
                text += log.read()
                return re.search(pattern, text.decode(errors="replace")) is not None

            until(found, f"the {self.name} server logs {pattern!r}", within_s, pause_s=LOG_POLL_S)
        return time.monotonic()

    def _decoded(self, response: http.client.HTTPResponse) -> dict[str, Any]:
        text = response.read()
        if response.status != http.client.OK:
            said = text[:400].decode(errors="replace")
            msg = f"the {self.name} server answered {response.status}: {said}{words(self._log)}"
            raise PeerLost(msg)
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _signal(self, number: int) -> None:
        if self._process is not None:
            os.killpg(self.group, number)


def until(holds: Callable[[], bool], what: str, within_s: float, *, pause_s: float = POLL_S) -> None:
    """Wait until it is so. Raises `DeadlineExceeded`."""
    ends_at = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > ends_at:
            msg = f"{within_s:.0f} s were not enough until {what}"
            raise DeadlineExceeded(msg)
        time.sleep(pause_s)
