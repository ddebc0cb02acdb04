"""A worker's side: one gate, and the children's hooks around each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from kvbelay import errors
from kvbelay.core.boundary import Where, describe, each, fail
from kvbelay.core.gate import Gate
from kvbelay.core.model import Failure, Kind, Order, Report, Side
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.metadata import GuardMetadata, GuardWorkerMetadata
from kvbelay.vllm.series import Series

Bound = list[tuple[str, Callable[..., object]]]


class Post:
    """One rank. What it has to tell the scheduler waits in it for `report`."""

    def __init__(self, children: list[Guarded], series: Series, *, rank: int, one_group: bool) -> None:
        self.children = {child.name: child for child in children}
        self.gate = Gate(rank)
        self.step = GuardMetadata()
        self._series = series
        self._one_group = one_group
        self._blocks: dict[str, frozenset[int]] = {}
        self._failed: dict[tuple[str, str], Failure] = {}
        """Loads that a child reported as failed, by child and request, while they are not received yet."""
        self._invalid: set[int] = set()
        self._reports: list[Report] = []
        self._failures: list[Failure] = []
        self._unavailable = {child.name: child.cause for child in children if child.cause is not None}
        self._savers: Bound = []
        self._waiters: Bound = []
        for child in children:
            self.gate.know(child.name)
        self.bind_layers()

    def serving(self) -> list[Guarded]:
        """The children that run."""
        return [child for child in self.children.values() if child.connector is not None]

    def out_of_service(self, child: Guarded, cause: Failure) -> None:
        """A child has failed for good."""
        child.stop(cause)
        self._unavailable[child.name] = cause
        self.bind_layers()

    def bind_layers(self) -> None:
        """Look up the children's layer hooks once: an engine calls them for every layer."""
        self._savers = [(child.name, child.connector.save_kv_layer) for child in self.serving()]
        self._waiters = [(child.name, child.connector.wait_for_layer_load) for child in self.serving()]

    def bind(self, meta: object) -> None:
        """A step begins."""
        now = time.monotonic()
        self.step = meta if isinstance(meta, GuardMetadata) else GuardMetadata()
        for request, side in self.step.forget:
            self.gate.forget(request, side)
            if side is Side.LOAD:
                self._blocks.pop(request, None)
        self._blocks.update(self.step.blocks)
        for order in self.step.orders:
            self._keep(self.gate.obey(order, now))
            child = self.children.get(order.child)
            if child is None or child.connector is None:
                self._settle(order, child.cause if child is not None else None)
        for child in self.serving():
            if child.name in self.step.children:
                answer = child.ask("bind_connector_metadata", self.step.children[child.name])
                if isinstance(answer, Failure):
                    self._fail_begun(child, answer)

    def start_load(self, forward_context: object, kwargs: dict[str, Any]) -> None:
        """Let the children start the step's loads."""
        for child in self._in_step():
            answer = child.ask("start_load_kv", forward_context, **kwargs)
            if isinstance(answer, Failure):
                self._fail_begun(child, answer)

    def wait_for_layer(self, layer: str) -> None:
        """Let every child finish a layer's loads."""
        each(self._waiters, self._wait_failed, layer)

    def save_layer(self, layer: str, kv: object, attn: object, kwargs: dict[str, Any]) -> None:
        """Let every child save a layer."""
        if kwargs:
            for child in self.serving():
                child.ask("save_kv_layer", layer, kv, attn, **kwargs)
            return
        each(self._savers, self._save_failed, layer, kv, attn)

    def results(self, finished: set[str]) -> tuple[set[str], set[str], set[str]]:
        """What has ended on this rank, each once: sent, received, and of these failed to receive."""
        for child in self.serving():
            self._ask_results(child, finished)
        for report in self.gate.expire(time.monotonic()):
            self._keep(report)
        received = set(self.step.pulses) | set(self.step.fails)
        sent: set[str] = set()
        for report in self._reports:
            if report.kind is Kind.DRAINED or not self.gate.settled(report.request, report.side):
                continue
            (received if report.side is Side.LOAD else sent).add(report.request)
        return sent, received, set(self.step.fails)

    def invalid_blocks(self) -> set[int]:
        """Blocks of this step's synchronous loads that are not good."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> GuardWorkerMetadata | None:
        """What the scheduler has to know of this step."""
        metas = {}
        for child in self.serving():
            meta = child.ask("build_connector_worker_meta")
            if meta is not None and not isinstance(meta, Failure):
                metas[child.name] = meta
        up = GuardWorkerMetadata(
            reports=frozenset(self._reports),
            children=metas,
            unavailable=dict(self._unavailable),
            failures=tuple(self._failures),
        )
        self._reports, self._failures, self._unavailable = [], [], {}
        return up if up.reports or up.children or up.unavailable or up.failures else None

    def show(self) -> None:
        """Bring the series up to date."""
        self._series.swallowed(self.gate.swallowed)

    def clear(self) -> None:
        """A step ends."""
        for child in self.serving():
            child.ask("clear_connector_metadata")
        self.step = GuardMetadata()

    def _in_step(self) -> Iterable[Guarded]:
        return (child for child in self.serving() if child.name in self.step.children)

    def _ask_results(self, child: Guarded, finished: set[str]) -> None:
        """A child's completions, then its block errors: in the other order a failed load passes for a good one."""
        answer = child.checked("get_transfer_results", child.ask("get_transfer_results", finished), _are_results)
        blocks = child.checked("get_block_ids_with_load_errors", child.ask("get_block_ids_with_load_errors"), _are_ids)
        if isinstance(blocks, set) and blocks:
            self._blame_blocks(child, blocks)
        if isinstance(answer, Failure):
            return
        results: Any = answer
        for request in results.failed_recving:
            error = errors.TransferFailed("the connector reported a failed load")
            self._failed.setdefault((child.name, request), fail(error, Where(child.name, "load", request)))
        for request in results.finished_recving:
            failure = self._failed.pop((child.name, request), None)
            kind = Kind.LANDED if failure is None else Kind.FAILED
            self._keep(self.gate.hear(child.name, Side.LOAD, request, kind, failure=failure))
        for request in results.finished_sending:
            self._keep(self.gate.hear(child.name, Side.SAVE, request, Kind.LANDED))

    def _blame_blocks(self, child: Guarded, blocks: set[int]) -> None:
        """Failed blocks are a failure of the whole load that they belong to."""
        left = set(blocks)
        for request, written in self._blocks.items():
            if written & blocks and not self.gate.settled(request, Side.LOAD):
                error = errors.TransferFailed(f"the connector reported {len(written & blocks)} failed blocks")
                self._failed.setdefault((child.name, request), fail(error, Where(child.name, "load", request)))
                left -= written
        if self._one_group:
            self._invalid |= left

    def _fail_begun(self, child: Guarded, failure: Failure) -> None:
        """What the child was to begin in this step has failed; it may have begun some of it."""
        for order in self.step.orders:
            if order.child == child.name and order.side is Side.LOAD and not order.cancel:
                self._settle(order, failure)
        if self._one_group:
            self._invalid |= self.step.sync.get(child.name, frozenset())

    def _settle(self, order: Order, failure: Failure | None) -> None:
        kind = Kind.BROKEN if self.children[order.child].connector is not None else Kind.FAILED
        self._keep(self.gate.hear(order.child, order.side, order.request, kind, failure=failure))

    def _wait_failed(self, name: str, exc: BaseException) -> None:
        failure = describe(exc, Where(name, "wait_for_layer_load"))
        self._failures.append(failure)
        if self._one_group:
            self._invalid |= self.step.sync.get(name, frozenset())

    def _save_failed(self, name: str, exc: BaseException) -> None:
        self._failures.append(describe(exc, Where(name, "save_kv_layer")))

    def _keep(self, report: Report | None) -> None:
        if report is not None:
            self._reports.append(report)


def _are_results(said: Any) -> bool:
    return all(
        all(type(request) is str for request in requests)
        for requests in (said.finished_sending, said.finished_recving, said.failed_recving)
    )


def _are_ids(said: Any) -> bool:
    return type(said) is set and all(type(block) is int for block in said)
