"""A connector that does what a script says: it moves real KV, records every call, and fails on cue.

It is loaded as any connector outside of vLLM: by ``kv_connector_module_path``. Its ``kv_connector_extra_config`` bears
its ``name`` and, for what happens before a case can put up a script, a ``script``.
"""
# ruff: noqa: ARG002 # hooks have the host's arguments

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from scripts import KNOWN, SAVED, STAGE, STORE, Call, Load, Save, Script, prefixes, script_of
from tiny import BLOCK
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

POISON = 5.0
"""What stands in a block that nobody has loaded or computed yet."""


class Refused(TypeError):
    """The connector was given what is not its own."""


@dataclass
class Place:
    """One block of one group, and whose KV belongs into it."""

    group: int
    block: int
    prefix: str


@dataclass
class Order:
    """A transfer that the scheduler's half asks of the worker's."""

    request: str
    places: list[Place]
    tokens: int = 0
    attempt: int = 0
    synchronous: bool = False


@dataclass
class Orders(KVConnectorMetadata):
    loads: list[Order] = field(default_factory=list)
    saves: list[Order] = field(default_factory=list)
    """Of requests that have ended."""
    through: list[Order] = field(default_factory=list)
    """Of prompts that this step computes."""


@dataclass
class Address(KVConnectorHandshakeMetadata):
    child: str
    rank: int


@dataclass
class Live:
    """A transfer under way on the worker."""

    order: Order
    plan: Load | Save
    age: int = 0


def hook(method: Callable[..., Any]) -> Callable[..., Any]:
    """Record the call, and let the script's first fault for it act."""
    name = method.__name__

    @functools.wraps(method)
    def called(self: Half, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else None
        request = getattr(first, "request_id", "")
        self.note(name, request, "" if request else repr(first)[:60] if isinstance(first, str | set) else "")
        for number, fault in enumerate(self.script.faults):
            if not fault.meant(name, request, self.side, self.rank):
                continue
            self.strikes[number, name] += 1
            if not fault.skip < self.strikes[number, name] <= fault.skip + fault.times:
                continue
            STAGE.spent_s += fault.takes_s
            if fault.answer is not msgspec.UNSET:
                return fault.answer
            if fault.after:
                method(self, *args, **kwargs)
            if fault.raises:
                raise fault.exception()
        return method(self, *args, **kwargs)

    return called


class Half(KVConnectorBase_V1, SupportsHMA):
    """What the halves have in common. They are two objects, as the host makes them; orders go from one to the other."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self.name: str = extra["name"]
        self.side = role.name.lower()
        self.rank = vllm_config.parallel_config.rank if role is KVConnectorRole.WORKER else 0
        self.strikes: Counter[tuple[int, str]] = Counter()
        self._first_script = script_of(extra.get("script", {}))
        self._groups = [group.layer_names for group in kv_cache_config.kv_cache_groups]
        self._prepare()
        self._start()

    def _prepare(self) -> None:
        self._offered: dict[str, tuple[int, int]] = {}
        self._looked: Counter[str] = Counter()
        self._attempts: Counter[str] = Counter()
        self._began: set[str] = set()
        self._released: set[str] = set()
        self._next = Orders()
        self._caches: dict[str, torch.Tensor] = {}
        self._live_loads: list[Live] = []
        self._live_saves: list[Live] = []
        self._invalid: set[int] = set()

    @property
    def script(self) -> Script:
        return STAGE.scripts.get(self.name, self._first_script)

    def note(self, what: str, request: str = "", detail: str = "") -> None:
        STAGE.calls.append(Call(STAGE.step, self.name, self.side, what, request, detail))

    @hook
    def _start(self) -> None:
        """Named in a fault, the constructor raises."""

    @hook
    def shutdown(self) -> None: ...

    @hook
    def get_kv_connector_stats(self) -> Any:
        return None


class SchedulerHalf(Half):
    """Offers, orders, and what the engine asks of the scheduler's object."""

    @hook
    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)

    @hook
    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None: ...

    @property
    @hook
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    @property
    @hook
    def requires_kv_delivery(self) -> bool:
        return False

    @hook
    def on_new_request(self, request: Any) -> None: ...

    @hook
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        script, name = self.script, request.request_id
        params = request.kv_transfer_params or {}
        if script.pd and (not params.get("do_remote_prefill") or name in self._released):
            return 0, False
        self._looked[name] += 1
        if self._looked[name] <= script.looking:
            return None, script.asynchronous
        have = 0
        for prefix in prefixes(request.all_token_ids):
            if have + BLOCK > script.offer or prefix not in KNOWN:
                break
            have += BLOCK
        count = max(have - num_computed_tokens, 0)
        self._offered[name] = (num_computed_tokens, count)
        return count, script.asynchronous and count > 0

    @hook
    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return super().get_loaded_kv_cache_group_ids(request)

    @hook
    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    @hook
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        name, script = request.request_id, self.script
        self.note("given", name, str(num_external_tokens))
        start, count = self._offered.get(name, (0, 0))
        if num_external_tokens:
            count = num_external_tokens
        elif script.on_zero == "release" and name not in self._began | self._released:
            self._released.add(name)
            self.note("released", name)
            return
        elif script.on_zero != "load" or not count or name in self._began:
            return
        self._began.add(name)
        places = self._places(blocks.get_block_ids(), request.all_token_ids[: start + count], start)
        order = Order(name, places, count, self._attempts[name], synchronous=not script.asynchronous)
        self._attempts[name] += 1
        self._next.loads.append(order)

    def _places(self, blocks: tuple[list[int], ...], tokens: Any, start: int = 0) -> list[Place]:
        """Where the KV of ``tokens`` from ``start`` on stands; a sliding layer has none behind its window."""
        names = list(prefixes(tokens))
        return [
            Place(group, block, names[index])
            for group, row in enumerate(blocks)
            for index, block in enumerate(row[: len(names)])
            if index >= start // BLOCK and block != 0
        ]

    @hook
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders, self._next = self._next, Orders()
        if self.script.writes_through:
            for new in scheduler_output.scheduled_new_reqs:
                done = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
                if done >= len(new.prompt_token_ids):
                    places = self._places(new.block_ids, new.prompt_token_ids)
                    KNOWN.update(place.prefix for place in places)
                    orders.through.append(Order(new.req_id, places))
        return orders

    @hook
    def update_connector_output(self, connector_output: Any) -> None:
        heard = (connector_output.finished_recving, connector_output.finished_sending, connector_output.failed_recving)
        for what, names in zip(("heard received", "heard sent", "heard failed"), heard, strict=True):
            for name in names or ():
                self.note(what, name)

    @hook
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request, (block_ids,))

    @hook
    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._finish(request, block_ids)

    def _finish(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        name, save = request.request_id, self.script.save(request.request_id)
        if self.script.pd and name not in self._began | self._released:
            self._released.add(name)
            self.note("released", name)
        self._offered.pop(name, None)
        self._began.discard(name)
        if save.holds:
            places = self._places(blocks, request.all_token_ids[: request.num_computed_tokens])
            KNOWN.update(place.prefix for place in places)
            self._next.saves.append(Order(name, places))
        return save.holds, save.params

    @hook
    def register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:
        return False

    @hook
    def take_events(self) -> Iterable[Any]:
        return ()

    @hook
    def has_pending_block_frees(self) -> bool:
        return False

    @hook
    def has_pending_push_work(self) -> bool:
        return False

    @hook
    def set_xfer_handshake_metadata(self, metadata: Any) -> None:
        self.note("address", "", ",".join(sorted({address.child for address in metadata.values()})))

    @hook
    def reset_cache(self) -> bool:
        return True

    @hook
    def get_finished_count(self) -> int | None:
        return None


class WorkerHalf(Half):
    """Copies, reads and reports."""

    @hook
    def get_mem_pool_context(self) -> None:
        return None

    @hook
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    @hook
    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None: ...

    @hook
    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return Address(self.name, self.rank) if self.script.handshake else None

    @hook
    def handle_preemptions(self, kv_connector_metadata: Any) -> None: ...

    @hook
    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if not isinstance(connector_metadata, Orders):
            msg = f"{self.name} was given {type(connector_metadata).__name__} for its orders"
            raise Refused(msg)
        for order in connector_metadata.loads:
            if self.script.on_zero != "load":
                self._fill(order.places)

    @hook
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for order in self._get_connector_metadata().loads:
            plan = self.script.load(order.request, order.attempt, self.rank)
            if not order.synchronous:
                self._live_loads.append(Live(order, plan))
                continue
            if plan.copy is not None:
                self._copy(order, plan)
            self._invalid |= self._spoilt(order, plan, 0)
        for order in self._get_connector_metadata().saves:
            self._live_saves.append(Live(order, self.script.save(order.request)))

    @hook
    def wait_for_layer_load(self, layer_name: str) -> None: ...

    @hook
    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    @hook
    def wait_for_save(self) -> None:
        for order in self._get_connector_metadata().through:
            for place in order.places:
                for layer in self._groups[place.group]:
                    STORE[place.prefix, layer] = self._caches[layer][place.block].clone()

    @hook
    def finish_forward(self) -> None: ...

    @hook
    def reset_capture_state(self) -> None: ...

    @hook
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._advance()
        return results.finished_sending, results.finished_recving

    @hook
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self._advance()

    def _advance(self) -> KVConnectorTransferResults:
        """One step further with everything that is under way."""
        results = KVConnectorTransferResults()
        for live in (*self._live_loads, *self._live_saves):
            if (self.name, live.order.request) not in STAGE.frozen:
                self._advance_load(live, results) if isinstance(live.plan, Load) else self._advance_save(live, results)
        self._live_loads = [live for live in self._live_loads if live.age <= live.plan.last]
        self._live_saves = [live for live in self._live_saves if live.age <= live.plan.last]
        for phantom in self.script.phantoms:
            if phantom.step == STAGE.worker_steps[self.name]:
                results.finished_sending.update(phantom.sent)
                results.finished_recving.update(phantom.received)
                results.failed_recving.update(phantom.failed)
                self._invalid.update(phantom.blocks)
        STAGE.worker_steps[self.name] += 1
        for what, names in (("said received", results.finished_recving), ("said sent", results.finished_sending)):
            for name in names:
                self.note(what, name)
        return results

    def _advance_save(self, live: Live, results: KVConnectorTransferResults) -> None:
        if live.age == live.plan.read:
            self._read(live.order)
        if live.age in live.plan.reports:
            results.finished_sending.add(live.order.request)
        live.age += 1

    def _advance_load(self, live: Live, results: KVConnectorTransferResults) -> None:
        order, plan, age = live.order, live.plan, live.age
        if age == plan.copy:
            self._copy(order, plan)
        if age in plan.garbage:
            self._fill(order.places)
        if age in plan.failed:
            results.failed_recving.add(order.request)
        if age in plan.reports:
            results.finished_recving.add(order.request)
        self._invalid |= self._spoilt(order, plan, age)
        live.age += 1

    @staticmethod
    def _spoilt(order: Order, plan: Load, age: int) -> set[int]:
        return {order.places[index].block for index in plan.errors.get(age, ())}

    def _copy(self, order: Order, plan: Load) -> None:
        """All but the blocks that are said to be invalid some time."""
        invalid = {index for row in plan.errors.values() for index in row}
        for place in [place for index, place in enumerate(order.places) if index not in invalid]:
            for layer in self._groups[place.group]:
                self._caches[layer][place.block].copy_(STORE[place.prefix, layer])
        self.note("copied", order.request, str(order.tokens))

    def _fill(self, places: list[Place]) -> None:
        for place in places:
            for layer in self._groups[place.group]:
                self._caches[layer][place.block].fill_(POISON)

    def _read(self, order: Order) -> None:
        for place in order.places:
            for layer in self._groups[place.group]:
                block = self._caches[layer][place.block].clone()
                SAVED[self.name, place.prefix, layer] = block
                STORE.setdefault((place.prefix, layer), block)
        self.note("read", order.request)

    @hook
    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid

    @hook
    def get_kv_connector_kv_cache_events(self) -> Any:
        return None

    @hook
    def build_connector_worker_meta(self) -> Any:
        return None

    @hook
    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()


class ScriptedConnector(SchedulerHalf, WorkerHalf):
    """The connector, as a configuration names it."""
