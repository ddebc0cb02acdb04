"""What the host asks of its connector, hook by hook and in its order: a step, a load, a save.

The scheduler's and the worker's own work is left out: the hooks are all that two multi connectors can differ in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.v1.outputs import KVConnectorOutput

from kvbelay.cli.bench.hosted.rig import BLOCK, Rig, request

KV = torch.zeros(1)
LAYERS = tuple(f"model.layers.{number}.self_attn.attn" for number in range(32))


def step(rig: Rig, layers: Sequence[str] = ()) -> None:
    """One step: the end of the scheduling, the worker's hooks, what the scheduler does with their results."""
    connector, worker, output = rig.connector, rig.worker, rig.output
    meta = connector.build_connector_meta(output)
    worker.handle_preemptions(meta)
    worker.bind_connector_metadata(meta)
    forward(worker, layers)
    worker.start_load_kv(None)
    worker.wait_for_save()
    done = worker.get_transfer_results(output.finished_req_ids)
    result = KVConnectorOutput(
        finished_sending=done.finished_sending,
        finished_recving=done.finished_recving,
        failed_recving=done.failed_recving,
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_stats=worker.get_kv_connector_stats(),
        kv_cache_events=worker.get_kv_connector_kv_cache_events(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    worker.clear_connector_metadata()
    connector.update_connector_output(result)
    connector.get_kv_connector_stats()
    list(connector.take_events())


def forward(worker: Any, layers: Sequence[str]) -> None:
    """The hooks inside the model: two a layer."""
    for layer in layers:
        if worker.has_connector_metadata():
            worker.wait_for_layer_load(layer)
            worker.save_kv_layer(layer, KV, None)


class Transfers:
    """Requests whose KV is loaded and saved through the first child, a batch of them at a time."""

    def __init__(self, rig: Rig, batch: int) -> None:
        self.rig = rig
        self.batch = batch
        self.ended = 0
        self._blocks = rig.blocks()
        self._ids = self._blocks.get_block_ids()
        self._loader = rig.connector.sub_connectors[0]
        self._mover = rig.worker.sub_connectors[0]
        self._quiet = self._mover.results

    def requests(self) -> list[Any]:
        """The next batch."""
        return [request(f"request-{self.ended + number}") for number in range(self.batch)]

    def load(self, requests: Sequence[Any]) -> None:
        """Two steps: the loads begin in the first, and have landed in the second."""
        connector = self.rig.connector
        self._loader.offer = (BLOCK, True)
        for one in requests:
            connector.on_new_request(one)
            _ = connector.supports_divergent_local_hybrid_hits
            connector.get_num_new_matched_tokens(one, 0)
            connector.get_loaded_kv_cache_group_ids(one)
            connector.update_state_after_alloc(one, self._blocks, BLOCK)
        step(self.rig)
        self._mover.results = KVConnectorTransferResults(finished_recving={one.request_id for one in requests})
        step(self.rig)
        self._mover.results = self._quiet
        self._loader.offer = (0, False)
        for one in requests:
            connector.update_state_after_alloc(one, self._blocks, 0)

    def save(self, requests: Sequence[Any]) -> None:
        """Two steps: the requests end and their blocks are kept, and are saved in the second."""
        self._loader.keeps = True
        for one in requests:
            self.rig.connector.request_finished_all_groups(one, self._ids)
        step(self.rig)
        self._mover.results = KVConnectorTransferResults(finished_sending={one.request_id for one in requests})
        step(self.rig)
        self._mover.results = self._quiet
        self._loader.keeps = False
        self.ended += len(requests)
