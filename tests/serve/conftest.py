"""Servers as processes, the official client, and the engine alone, whose answers are the right ones."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import openai
import pytest

from kvbelay.cli.up.ports import free_ports
from kvbelay.reference import Engine, PagedCache, tiny_model

PATIENCE_S = 30.0
OFFER = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
"""What a router sends to the prefill side."""


class Server:
    """``python -m kvbelay.serve`` with the tiny model."""

    def __init__(self, folder: Path, name: str, **settings: Any) -> None:
        (self.port,) = free_ports(1)
        self.settings = {"name": name, "model": "tiny", "port": self.port, **settings}
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S)
        self.log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "kvbelay.serve", json.dumps(self.settings)],
                stderr=log,
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
            )

    def wait(self) -> None:
        """Until it serves."""

        def up() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            try:
                return self.get("/health")[0] == 200
            except OSError:
                return False

        self.until(up)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.client.close()
        self.kill()

    def get(self, path: str) -> tuple[int, str]:
        status, body = self._ask("GET", path)
        return status, body.decode()

    def post(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """Status and body, also of an error."""
        status, answer = self._ask("POST", path, body)
        return status, json.loads(answer)

    def metric(self, series: str) -> float:
        """A series of ``/metrics``, its labels as they stand there; 0 if there is none."""
        found = re.search(rf"^{re.escape(series)} (\S+)$", self.get("/metrics")[1], re.MULTILINE)
        return float(found[1]) if found else 0.0

    def complete(self, prompt: str, tokens: int = 16, **more: Any) -> Any:
        """A completion of the official client."""
        params = more.pop("params", None)
        extra = {"kv_transfer_params": params} if params is not None else {}
        extra |= more.pop("extra", {})
        return self.client.completions.create(model="tiny", prompt=prompt, max_tokens=tokens, extra_body=extra, **more)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response.status, response.read()

    @staticmethod
    def until(holds: Callable[[], bool]) -> None:
        """Wait for a condition."""
        ends_at = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < ends_at
            time.sleep(0.02)

    def offer(self, prompt: str) -> dict[str, Any]:
        """Have the prompt prefilled; returns what the decode side needs."""
        params: dict[str, Any] = self.complete(prompt, 1, params=OFFER).kv_transfer_params
        return params


@cache
def _alone() -> Engine:
    model = tiny_model()
    return Engine(model, PagedCache(model.config, 256))


@pytest.fixture(scope="session")
def alone() -> Callable[[str, int], str]:
    """What the engine answers to a prompt by itself, in so many tokens."""
    tokenizer, engine = tiny_model().tokenizer, _alone()

    def answer(prompt: str, tokens: int = 16) -> str:
        return tokenizer.decode(engine.generate(tokenizer.encode(prompt), tokens, range(256)).tokens)

    return answer


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers, which end with the module."""
    folder = tmp_path_factory.mktemp("servers")
    started: list[Server] = []

    def begin(name: str, **settings: Any) -> Server:
        started.append(Server(folder, name, **settings))
        return started[-1]

    yield begin
    for server in started:
        server.close()


Pair = tuple[Server, Server]


@pytest.fixture(scope="module")
def couple(start: Callable[..., Server]) -> Callable[[], Pair]:
    """Starts a prefill and a decode server."""

    def begin() -> Pair:
        (port,) = free_ports(1)
        address = f"tcp://127.0.0.1:{port}"
        prefill = start("prefill-1", publishes=address)
        decode = start("decode-1", sources={"prefill-1": address})
        prefill.wait()
        decode.wait()
        return prefill, decode

    return begin


@pytest.fixture(scope="module")
def pair(couple: Callable[[], Pair]) -> Pair:
    """A prefill and a decode server that stay whole."""
    return couple()


@pytest.fixture
def frail(couple: Callable[[], Pair]) -> Iterator[Pair]:
    """A prefill and a decode server to be broken."""
    servers = couple()
    yield servers
    for server in servers:
        server.close()
