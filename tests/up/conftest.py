"""Modules that the tests here share."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]
if find_spec("vllm") is None:
    collect_ignore = ["test_vllm.py"]
else:
    sys.path[1:1] = [str(HERE.parent / "vllm_pair")]  # the model
