"""vLLM, imported once in a test session, and the environment that it needs for it.

Import this module before any of vLLM's own.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_DISABLE_REQUEST_ID_RANDOMIZATION="1",
    VLLM_CPU_CI_ENV="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    VLLM_NO_USAGE_STATS="1",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    TQDM_DISABLE="1",
    OMP_NUM_THREADS="1",  # a process that forks must not have a pool of threads
    PYTHONPATH=os.pathsep.join(filter(None, [str(Path(__file__).parent), os.environ.get("PYTHONPATH")])),
)
sys.path[:0] = [str(Path(__file__).parent)]  # a child connector is loaded by the name of its module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import vllm.v1.engine.llm_engine  # the import that takes its seconds
    import vllm.v1.worker.cpu_worker

__all__ = ["torch", "vllm"]
