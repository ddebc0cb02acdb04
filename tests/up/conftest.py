"""Modules that the tests here share."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent)]
collect_ignore = [] if find_spec("vllm") else ["test_vllm.py"]
