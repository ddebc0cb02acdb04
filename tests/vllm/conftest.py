"""Engines of vLLM for the tests of this folder.

Where vLLM is not installed there is nothing to collect: these tests have a target of their own in the Makefile.
"""

from __future__ import annotations

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
    import host  # noqa: F401 # the environment, and vLLM without its warnings, before any test module
    from expect import WHICH
    from forks import Engines, engines
    from oracle import ask_plainly
    from tiny import make_model

    @pytest.fixture(params=WHICH)
    def which(request: pytest.FixtureRequest) -> str:
        """The class that holds the children, and the engine's mode."""
        return request.param

    @pytest.fixture(params=[which for which in WHICH if "-" not in which])
    def holder(request: pytest.FixtureRequest) -> str:
        """The class alone: a test that chooses its modes itself, or that has only one."""
        return request.param

    @pytest.fixture(scope="session")
    def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
        """The engines of this session; they know the right answers of both models."""
        models = tmp_path_factory.mktemp("models")
        for name in ("llama", "hybrid"):
            make_model(name, models)
        with engines(tmp_path_factory.mktemp("engines"), models, ask_plainly) as all_of_them:
            yield all_of_them
