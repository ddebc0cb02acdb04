"""The guard: a ``MultiConnector`` that no child can take down.

vLLM loads it through one more key of an existing configuration: ``"kv_connector_module_path": "kvbelay.vllm"``. It
keeps the name of the host's own class, since the host treats that name specially.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
    supports_hma,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from kvbelay import errors
from kvbelay.core.boundary import Where, call
from kvbelay.core.model import Failure
from kvbelay.vllm import host
from kvbelay.vllm.children import Guarded, child_class, child_config, configured, start_children
from kvbelay.vllm.desk import Desk
from kvbelay.vllm.digest import Hasher
from kvbelay.vllm.hooks import FATAL, made_from_table, unknown
from kvbelay.vllm.liaison import Liaison
from kvbelay.vllm.metadata import GuardHandshake, GuardMetadata, GuardWorkerMetadata
from kvbelay.vllm.observe import Observed
from kvbelay.vllm.options import Mode, guard_options
from kvbelay.vllm.post import Post
from kvbelay.vllm.series import Series
from kvbelay.vllm.stats import OURS, GuardPromMetrics, GuardStats, rebuilt

log = host.logger(__name__)


def _update_failed(connector: MultiConnector, output: Any) -> None:
    """What has ended in this step was not decided: it fails, since nobody knows how it ended."""
    for request in output.finished_recving or ():
        connector.desk.give_up(request)
    output.finished_recving = output.finished_sending = None


def _alloc_failed(connector: MultiConnector, request: Any, _blocks: Any, tokens: int) -> None:
    if tokens:
        connector.desk.give_up(request.request_id)


INSTEAD: dict[str, Callable[..., Any]] = {
    "build_connector_meta": lambda _, __: GuardMetadata(),
    "build_connector_worker_meta": lambda _: None,
    "bind_connector_metadata": lambda _, __: None,
    "clear_connector_metadata": lambda _: None,
    "get_block_ids_with_load_errors": lambda _: set(),
    "get_external_cache_hit_sources": lambda guard, *asked: super(MultiConnector, guard).get_external_cache_hit_sources(
        *asked
    ),
    "get_finished": lambda _, __: (None, None),
    "get_kv_connector_kv_cache_events": lambda _: None,
    "get_kv_connector_stats": lambda _: None,
    "get_loaded_kv_cache_group_ids": lambda guard, *asked: super(MultiConnector, guard).get_loaded_kv_cache_group_ids(
        *asked
    ),
    "get_mem_pool_context": lambda _: None,
    "get_num_new_matched_tokens": lambda _, __, ___: (0, False),
    "get_transfer_results": lambda _, __: KVConnectorTransferResults(),
    "handle_preemptions": lambda _, __: None,
    "has_pending_push_work": lambda _: False,
    "on_new_request": lambda _, __: None,
    "request_finished_all_groups": lambda _, __, ___: (False, None),
    "save_kv_layer": lambda _, __, ___, ____: None,
    "shutdown": lambda _: None,
    "start_load_kv": lambda _, __: None,
    "take_events": lambda _: [],
    "update_connector_output": _update_failed,
    "update_state_after_alloc": _alloc_failed,
    "wait_for_layer_load": lambda _, __: None,
    "wait_for_save": lambda _: None,
}
"""What the host hears where the guard itself fails. The children's failures never come here."""


@made_from_table(INSTEAD)
class MultiConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Children by name, behind one boundary. See `kvbelay.vllm.hooks` for what is asked of whom."""

    def __new__(cls, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> Any:
        """The guard, or in shadow mode the host's own class under observation."""
        if guard_options(vllm_config.kv_transfer_config.kv_connector_extra_config).mode is Mode.OBSERVE:
            return Observed(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        options = guard_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._series = Series()
        children = start_children(vllm_config, role, kv_cache_config, self._series)
        self._side: Desk | Post
        if role is KVConnectorRole.SCHEDULER:
            shapes = host.shapes(kv_cache_config)
            engine, ranks = vllm_config.kv_transfer_config.engine_id, host.ranks(vllm_config)
            self._side = self.desk = Desk(
                children,
                options,
                self._series,
                Liaison(options, shapes, self._series, engine=engine, ranks=ranks),
                ranks=ranks,
                sync_is_safe=host.sync_loads_are_safe(vllm_config, kv_cache_config),
            )
            self._close = self.desk.liaison.close
            _greet(children, sync_is_safe=host.sync_loads_are_safe(vllm_config, kv_cache_config))
        else:
            one_group = host.groups(kv_cache_config) == 1
            self._side = self.post = Post(children, self._series, rank=host.rank(vllm_config), one_group=one_group)
            self._close = self.post.close
            self._make_hasher = partial(Hasher.of, kv_cache_config=kv_cache_config, vllm_config=vllm_config)
            if host.version() in host.TESTED:  # known to pass these arguments alone, for each layer: a call is saved
                self.__dict__.update(wait_for_layer_load=self.post.wait_for_layer, save_kv_layer=self.post.save_layer)
        self.staff = self._side.staff

    @property
    def sub_connectors(self) -> list[KVConnectorBase_V1]:
        """The children's connectors, as the host's own class gives them."""
        return [child.connector for child in self.staff]

    def out_of_service(self, answers: Iterable[object]) -> None:
        """Leave out the children that failed in a hook which they cannot do without."""
        for answer in answers:
            if isinstance(answer, Failure) and answer.operation in FATAL:
                self._side.out_of_service(self.staff[answer.child], answer)

    def failed_itself(self, failure: Failure) -> None:
        """A mistake of the guard's own: the engine goes on, and everybody should hear of it."""
        self._series.count("failures", OURS, failure.operation, failure.kind)
        log.error("kvbelay: a mistake of its own in %s: %s; please report it", failure.operation, failure.detail)

    # The scheduler's side

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self.desk.quarantine.manager = kv_cache_manager
        if self.desk.liaison.offering is not None:
            self.desk.liaison.offering.manager = kv_cache_manager
        self.out_of_service(answer for _, answer in self.staff.asks["bind_kv_cache_manager"](kv_cache_manager))

    def on_new_request(self, request: Any) -> None:
        self.desk.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.desk.match(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        default: tuple[int, ...] = super().get_loaded_kv_cache_group_ids(request)
        said: tuple[int, ...] = self._chosen_says("get_loaded_kv_cache_group_ids", default, request)
        return said

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        default: dict[Any, int] = super().get_external_cache_hit_sources(request, num_external_tokens)
        said: dict[Any, int] = self._chosen_says(
            "get_external_cache_hit_sources", default, request, num_external_tokens
        )
        return said

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.desk.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> GuardMetadata:
        return self.desk.metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        self.desk.update(connector_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        def ask(child: Guarded) -> object:
            seen = self.desk.seen_by(child, request)
            if supports_hma(child.connector):
                return child.ask("request_finished_all_groups", seen, block_ids, request=request.request_id)
            return child.ask("request_finished", seen, block_ids[0], request=request.request_id)

        return self.desk.finished(request, block_ids, ask)

    def has_pending_push_work(self) -> bool:
        answers = self.staff.asks["has_pending_push_work"]()
        return self.desk.pending() or any(answer is True for _, answer in answers)

    @property
    def requires_kv_delivery(self) -> bool:
        return any(self._property("requires_kv_delivery"))

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        said = self._property("supports_divergent_local_hybrid_hits")
        return bool(said) and all(said)

    def take_events(self) -> Iterable[Any]:
        events: list[Any] = []
        for child, said in self.staff.asks["take_events"]():
            if type(said) is Failure or (type(said) in {tuple, list} and not said):
                continue
            taken = call(lambda said=said: list(said), Where(child.name, "take_events"))  # type: ignore[misc, call-overload]
            if isinstance(taken, Failure):
                child.note(taken)
            else:
                events.extend(taken)
        return events

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self._set_handshake("set_xfer_handshake_metadata", metadata)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        self._set_handshake("set_xfer_handshake_metadata_pp_aware", metadata)

    # A worker's side

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        answers = self.staff.asks["get_handshake_metadata"]()
        given = {child.name: said for child, said in answers if isinstance(said, KVConnectorHandshakeMetadata)}
        return GuardHandshake(given) if given else None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self.post.know_caches(kv_caches, self._make_hasher)
        self.out_of_service(answer for _, answer in self.staff.asks["register_kv_caches"](kv_caches))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self.post.bind(connector_metadata)
        super().bind_connector_metadata(connector_metadata)

    def clear_connector_metadata(self) -> None:
        self.post.clear()
        super().clear_connector_metadata()

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if type(kv_connector_metadata) is not GuardMetadata:
            return
        self.staff.give("handle_preemptions", kv_connector_metadata.children)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.post.start_load(forward_context, kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.post.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        if not kwargs:
            self.post.save_layer(layer_name, kv_layer, attn_metadata)
            return
        for child in self.staff:
            child.ask("save_kv_layer", layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        self.staff.asks["wait_for_save"]()
        self.post.keep_offered()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self.post.results(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=received, failed_recving=failed)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        sent, received, _ = self.post.results(finished_req_ids)
        return sent or None, received or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self.post.invalid_blocks()

    def get_finished_count(self) -> int | None:
        return None

    def get_kv_connector_kv_cache_events(self) -> Any:
        for _, events in self.staff.asks["get_kv_connector_kv_cache_events"]():
            if not isinstance(events, Failure):
                return events
        return None

    def get_mem_pool_context(self) -> Any:
        for _, context in self.staff.asks["get_mem_pool_context"]():
            if not isinstance(context, Failure):
                return context
        return None

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.post.report()

    # Both sides, and the class

    def shutdown(self) -> None:
        self.staff.asks["shutdown"]()
        self._close()  # from now on others take this engine for dead

    def get_kv_connector_stats(self) -> GuardStats | None:
        parts: dict[str, Any] = {}
        for child, stats in self.staff.asks["get_kv_connector_stats"]():
            if isinstance(stats, KVConnectorStats):
                parts[child.name] = stats
        self._side.show()
        ours = self._series.take()
        if ours:
            parts[OURS] = ours
        return GuardStats(data=parts) if parts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> GuardStats:
        return rebuilt(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> GuardPromMetrics:
        return GuardPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        from vllm.config.kv_transfer import KVTransferConfig  # noqa: PLC0415  # the host asks before it is configured

        for config in extra_config.get("connectors") or []:

            def ask(config: dict[str, Any] = config) -> bool:
                child = child_class(type("C", (), {"kv_transfer_config": KVTransferConfig(**config)}))
                return bool(child.requires_piecewise_for_cudagraph(config.get("kv_connector_extra_config") or {}))

            said = call(ask, Where(str(config.get("kv_connector")), "requires_piecewise_for_cudagraph"))
            if said is not False:
                return True
        return False

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        wanted: dict[str, str] = {}
        for child, config in configured(vllm_config):

            def ask(config: Any = config) -> str | None:
                own = child_config(vllm_config, config)
                layout: str | None = child_class(own).get_required_kvcache_layout(own)
                return layout

            layout = call(ask, Where(child.name, "get_required_kvcache_layout"))
            if isinstance(layout, str):
                wanted[child.name] = layout
        if len(set(wanted.values())) > 1:
            said = ", ".join(f"{name} needs {layout}" for name, layout in wanted.items())
            msg = f"the children need different KV cache layouts: {said}"
            raise errors.ConfigError(msg, source="--kv-transfer-config", remedy="choose children that agree")
        return next(iter(wanted.values()), None)

    def _chosen_says(self, hook: str, default: Any, request: Any, *args: object) -> Any:
        case = self.desk.cases.get(request.request_id)
        child = self.staff.get(case.chosen) if case is not None else None
        if child is None:
            return default
        answer = child.ask(hook, request, *args, request=request.request_id)
        return default if isinstance(answer, Failure) or type(answer) is not type(default) else answer

    def _property(self, name: str) -> list[bool]:
        said = []
        for child in self.staff:
            answer = call(lambda child=child: getattr(child.connector, name), Where(child.name, name))  # type: ignore[misc]
            said.append(answer is True)
        return said

    def _set_handshake(self, hook: str, metadata: dict[Any, KVConnectorHandshakeMetadata]) -> None:
        parts = [(child, GuardHandshake.part(metadata, child.name)) for child in self.staff]
        self.out_of_service([child.ask(hook, part) for child, part in parts if part])


def _greet(children: list[Guarded], *, sync_is_safe: bool) -> None:
    """One line at the start: what guards what."""
    names = ", ".join(child.name for child in children)
    log.info("kvbelay guards %s on vLLM %s", names, host.version())
    if not host.may_recompute():
        log.warning("kvbelay: vLLM %s was not tested; a failed load is left to kv_load_failure_policy", host.version())
    if not sync_is_safe:
        log.info("kvbelay: synchronous loads are refused here, where vLLM could not bear that one fails")
    drift = unknown(KVConnectorBase_V1)
    if drift:
        log.warning("kvbelay: hooks of this vLLM that are passed to no child: %s", ", ".join(drift))


__all__ = ["GuardWorkerMetadata", "MultiConnector"]
