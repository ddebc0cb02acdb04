"""One side of the comparison: a real scheduler with its connector, and a worker's connector beside it; no model."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvbelay.cli.bench.hosted import idle

BLOCK = 32
PROMPT = BLOCK + 1
"""Tokens of a prompt: one whole block, which can be loaded, and the token that has to be computed."""
MOST_RUNNING = 1024
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 256,
    "max_position_embeddings": 1024,
    "dtype": "float32",
}
"""A model that nobody loads: its configuration is all that a scheduler needs."""


def configure(children: int, *, guarded: bool) -> VllmConfig:
    """An engine's configuration with so many idle children, under the guard or under the host's own class."""
    child = {
        "kv_connector": idle.IdleConnector.__name__,
        "kv_connector_module_path": idle.__name__,
        "kv_role": "kv_both",
    }
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_connector_module_path="kvbelay.vllm" if guarded else None,
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": [dict(child) for _ in range(children)]},
    )
    with TemporaryDirectory(prefix="kvbelay-bench-") as model, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Path(model, "config.json").write_text(json.dumps(SHAPE))
        config: VllmConfig = EngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=BLOCK,
            num_gpu_blocks_override=4 * MOST_RUNNING,
            max_model_len=8 * BLOCK,
            max_num_seqs=MOST_RUNNING,
            max_num_batched_tokens=MOST_RUNNING * 2 * BLOCK,
            enable_prefix_caching=False,
            disable_hybrid_kv_cache_manager=False,
            kv_transfer_config=transfer,
        ).create_engine_config()
    return config


class Rig:
    """A scheduler in whose last step ``running`` requests computed one token each, and what a worker has for it."""

    def __init__(self, children: int, running: int, *, guarded: bool) -> None:
        config = configure(children, guarded=guarded)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
        cache = KVCacheConfig(4 * MOST_RUNNING, [], [KVCacheGroupSpec(["layer"], spec)])
        config.cache_config.num_gpu_blocks = cache.num_blocks
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)
        self.connector: Any = self.scheduler.connector
        self.worker: Any = KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, cache)
        for number in range(running):
            self.scheduler.add_request(request(f"running-{number}"))
        self.output: Any = None
        while self.output is None or self.output.total_num_scheduled_tokens != running:
            self.output = self.scheduler.schedule()
            self.scheduler.update_from_output(self.output, _sampled(self.output))

    def blocks(self) -> Any:
        """Blocks of one of the running requests, as the scheduler shows them to a connector."""
        return self.scheduler.kv_cache_manager.get_blocks("running-0")

    def close(self) -> None:
        """End both halves."""
        self.worker.shutdown()
        self.scheduler.shutdown()


def request(name: str) -> Request:
    """A request that nobody has seen yet."""
    sampling = SamplingParams(temperature=0, max_tokens=4 * BLOCK, ignore_eos=True)
    sampling.update_from_generation_config({}, eos_token_id=None)
    return Request(name, [1] * PROMPT, sampling, None)


def _sampled(output: Any) -> ModelRunnerOutput:
    """A token for each request that the step computed to its end."""
    names = list(output.num_scheduled_tokens)
    return ModelRunnerOutput(names, {name: at for at, name in enumerate(names)}, [[2]] * len(names))
