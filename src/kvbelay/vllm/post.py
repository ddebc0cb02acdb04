"""A worker's side: one gate, and the children's hooks around each step."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults, KVConnectorWorkerMetadata

from kvbelay import errors
from kvbelay.core.boundary import Where, call, describe, each1, each3, fail
from kvbelay.core.gate import Gate
from kvbelay.core.model import Failure, Kind, Order, Report, Side, Swallow
from kvbelay.link.messages import Process
from kvbelay.link.processes import this_process
from kvbelay.vllm.children import Guarded
from kvbelay.vllm.digest import Hasher
from kvbelay.vllm.metadata import GuardMetadata, GuardWorkerMetadata
from kvbelay.vllm.reader import DIGEST, Reader
from kvbelay.vllm.readings import OFFERED, Reading, Sums
from kvbelay.vllm.series import Series
from kvbelay.vllm.staff import Staff, method_of

NOTHING: frozenset[Process] = frozenset()
NO_STEP = GuardMetadata()
"""What there is between two steps."""
Bound = list[tuple[str, Callable[..., object]]]


class Post:
    """One rank. What it has to tell the scheduler waits in it for `report`."""

    def __init__(self, children: list[Guarded], series: Series, *, rank: int, one_group: bool) -> None:
        self.staff = Staff(children)
        self.gate = Gate(rank)
        self.step = GuardMetadata()
        self._series = series
        self._one_group = one_group
        self._in_step: list[Guarded] = []
        """Children that have orders for this step, and have taken them."""
        self._blocks: dict[str, dict[str, frozenset[int]]] = {}
        """Block ids that a load writes, by request and child."""
        self._failed: dict[tuple[str, str], Failure] = {}
        """Loads that a child reported as failed, by child and request, while they are not received yet."""
        self._invalid: set[int] = set()
        self._reports: list[Report] = []
        self._failures: dict[tuple[str, str], Failure] = {}
        """The first of each child and hook that the scheduler has not heard of."""
        self._unavailable = {child.name: child.cause for child in children if child.cause is not None}
        self._reader = Reader(fail(errors.UnverifiableLayout("no KV caches were registered"), Where("", DIGEST)), None)
        process = this_process()
        self._process = NOTHING if process is None else frozenset({process})
        self._checks: dict[tuple[str, str], Reading] = {}
        """Loads that are compared with what was offered, by child and request."""
        self._being_read: dict[tuple[str, str], Reading] = {}
        """Those of them that the child has reported as complete."""
        self._offered: list[Reading] = []
        """What was computed for other engines, and is not hashed yet."""
        self._sums: dict[tuple[str, int], Sums] = {}
        """What was hashed, and the scheduler has not heard of."""
        self._savers: Bound = []
        self._waiters: Bound = []
        self.wait_for_layer: Callable[[str], None] = each1(self._waiters, self._wait_failed)
        """Lets every child finish a layer's loads."""
        self.save_layer: Callable[[str, object, object], None] = each3(self._savers, self._save_failed)
        """Lets every child save a layer."""
        for child in children:
            self.gate.know(child.name)
        self.bind_layers()

    def out_of_service(self, child: Guarded, cause: Failure) -> None:
        """A child has failed for good."""
        child.stop(cause)
        self._unavailable[child.name] = cause
        self.staff.changed()
        self.bind_layers()

    def know_caches(self, kv_caches: dict[str, Any], make: Callable[[dict[str, Any]], Hasher]) -> None:
        """The caches are there. ``make`` makes of them what hashes their blocks."""
        device = next((cache.device for cache in kv_caches.values() if isinstance(cache, torch.Tensor)), None)
        self._reader = Reader(call(lambda: make(kv_caches), Where("", DIGEST)), device)

    def close(self) -> None:
        """The engine ends."""
        self._reader.close()

    def bind_layers(self) -> None:
        """Look up the children's layer hooks once: an engine calls them for every layer."""
        self._savers[:] = [(child.name, method_of(child.connector, "save_kv_layer")) for child in self.staff]
        self._waiters[:] = [(child.name, method_of(child.connector, "wait_for_layer_load")) for child in self.staff]

    def bind(self, meta: object) -> None:
        """A step begins."""
        self.step = step = meta if type(meta) is GuardMetadata else NO_STEP
        self._reader.begin(idle=step.idle)
        self._read_offered()
        for request, side in step.forget:
            self._forget(request, side)
        now = time.monotonic() if step.orders else 0.0
        for order in step.orders:
            self._keep(self.gate.obey(order, now))
            if order.side is Side.LOAD and not order.cancel:
                self._blocks.setdefault(order.request, {})[order.child] = step.blocks.get(order.request, frozenset())
            child = self.staff.get(order.child)
            if child is None:
                cause = self.staff[order.child].cause if order.child in self.staff else None
                self._settle(order, Kind.FAILED, cause)
        self._heed_others(step)
        self._in_step = [child for child in self.staff.serving if child.name in step.children]
        for child, answer in self.staff.give("bind_connector_metadata", step.children):
            if isinstance(answer, Failure):  # what it has not heard it does not begin
                self._in_step.remove(child)
                self._fail_begun(child, Kind.FAILED, answer)

    def _heed_others(self, step: GuardMetadata) -> None:
        """What the step has to do with other engines."""
        for reading in step.wipe:
            self._reader.wipe(reading)
        for reading in step.checks:
            self._checks[reading.child, reading.request] = reading
        for request, name in step.released:
            if self.gate.armed(request, Side.SAVE, name):
                self._keep(self.gate.hear(name, Side.SAVE, request, Kind.LANDED))

    def start_load(self, forward_context: object, kwargs: dict[str, Any]) -> None:
        """Let the children start the step's loads."""
        if kwargs or len(self._in_step) < len(self.staff):
            answers = [(child, child.ask("start_load_kv", forward_context, **kwargs)) for child in self._in_step]
        else:
            answers = self.staff.asks["start_load_kv"](forward_context)
        for child, answer in answers:
            if isinstance(answer, Failure):  # it may have begun some
                self._fail_begun(child, Kind.BROKEN, answer)

    def results(self, finished: set[str]) -> tuple[set[str], set[str], set[str]]:
        """What has ended on this rank, each once: sent, received, and of these failed to receive."""
        self._ask_results(finished)
        for reading, sums in self._reader.done():
            self._was_read(reading, sums)
        if self.gate.due() is not None:
            for report in self.gate.expire(time.monotonic()):
                self._keep(report)
        if not (self._reports or self.step.pulses or self.step.fails):
            return set(), set(), set()
        received, sent = set(self.step.fails), set[str]()
        for request, side, child in self.step.pulses:
            if not self.gate.armed(request, side, child):
                (received if side is Side.LOAD else sent).add(request)
        for report in self._reports:
            if report.kind is Kind.DRAINED or not self.gate.settled(report.request, report.side):
                continue
            (received if report.side is Side.LOAD else sent).add(report.request)
        return sent, received, set(self.step.fails)

    def keep_offered(self) -> None:
        """What this step has computed for other engines is hashed in the next one, when the host has answered."""
        self._offered += self.step.offered

    def invalid_blocks(self) -> set[int]:
        """Blocks of this step's synchronous loads that are not good."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def report(self) -> GuardWorkerMetadata | None:
        """What the scheduler has to know of this step."""
        said = self.staff.asks["build_connector_worker_meta"]()
        if not (said or self._reports or self._unavailable or self._failures or self._sums or self._process):
            return None
        metas = {
            child.name: cast("KVConnectorWorkerMetadata", meta) for child, meta in said if type(meta) is not Failure
        }
        up = GuardWorkerMetadata(
            reports=frozenset(self._reports),
            children=metas,
            unavailable=dict(self._unavailable),
            failures=tuple(self._failures.values()),
            sums=self._sums,
            processes=self._process,
        )
        self._process = NOTHING
        self._reports, self._failures, self._unavailable, self._sums = [], {}, {}, {}
        return up

    def show(self) -> None:
        """Bring the series up to date."""
        self._series.swallowed(self.gate.swallowed)

    def clear(self) -> None:
        """A step ends."""
        self.staff.asks["clear_connector_metadata"]()
        self.step = NO_STEP

    def _read_offered(self) -> None:
        offered, self._offered = self._offered, []
        for reading in offered:
            self._reader.read(reading)

    def _ask_results(self, finished: set[str]) -> None:
        """Completions, then block errors: asked in the other order, a failed load passes for a good one."""
        said = self.staff.asks["get_transfer_results"](finished)
        blamed = self.staff.asks["get_block_ids_with_load_errors"]()
        for child, blocks in blamed:
            if type(blocks) is set and not blocks:
                continue
            checked = child.checked("get_block_ids_with_load_errors", blocks, _are_ids)
            if not isinstance(checked, Failure):
                self._blame_blocks(child, cast("set[int]", checked))
        for child, answer in said:
            if _is_quiet(answer):
                continue
            results: Any = child.checked("get_transfer_results", answer, _are_results)
            if not isinstance(results, Failure):
                self._take(child, results)

    def _take(self, child: Guarded, results: Any) -> None:
        """A child's completions."""
        for request in results.failed_recving:
            error = errors.TransferFailed("the connector reported a failed load; its own log may say why")
            self._blame(child, request, error)
        for request in results.finished_recving:
            self._received(child.name, request)
        for request in results.finished_sending:
            self._keep(self.gate.hear(child.name, Side.SAVE, request, Kind.LANDED))

    def _received(self, child: str, request: str) -> None:
        """A load is complete, as its child says. One that is compared is settled when it was hashed."""
        key = (child, request)
        if key in self._being_read:
            self.gate.swallowed[child, Swallow.DUPLICATE] += 1
            return
        reading = self._checks.pop(key, None)
        if reading is not None and key not in self._failed:
            self._being_read[key] = reading
            self._reader.read(reading)
            return
        failure = self._failed.pop(key, None)
        kind = Kind.LANDED if failure is None else Kind.FAILED
        self._keep(self.gate.hear(child, Side.LOAD, request, kind, failure=failure))

    def _was_read(self, reading: Reading, sums: Sums) -> None:
        key = (reading.child, reading.request)
        if reading.epoch == OFFERED:
            self._sums[reading.request, OFFERED] = sums
        elif self._being_read.get(key) is reading:
            del self._being_read[key]
            self._sums[reading.request, reading.epoch] = sums
            self._received(*key)

    def _blame_blocks(self, child: Guarded, blocks: set[int]) -> None:
        """Failed blocks are a failure of the whole load that they belong to."""
        for request, by_child in self._blocks.items():
            bad = by_child.get(child.name, frozenset()) & blocks
            if bad:
                self._blame(child, request, errors.TransferFailed(f"the connector reported {len(bad)} failed blocks"))
        bad_now = self.step.sync.get(child.name, frozenset()) & blocks
        if bad_now:
            error = errors.TransferFailed(f"the connector reported {len(bad_now)} failed blocks")
            self._invalidate(child.name, bad_now, fail(error, Where(child.name, "load")))

    def _blame(self, child: Guarded, request: str, error: errors.KvbelayError) -> None:
        """A load of this child is not good; it is over when the child says that it was received."""
        if child.name in self._blocks.get(request, ()):
            self._failed.setdefault((child.name, request), fail(error, Where(child.name, "load", request)))

    def _fail_begun(self, child: Guarded, kind: Kind, failure: Failure) -> None:
        """What the child was to begin in this step has failed."""
        self._failures.setdefault((child.name, failure.operation), failure)
        for order in self.step.orders:
            if order.child == child.name and order.side is Side.LOAD and not order.cancel:
                self._settle(order, kind, failure)
        self._invalidate(child.name, self.step.sync.get(child.name, frozenset()), failure)

    def _settle(self, order: Order, kind: Kind, failure: Failure | None) -> None:
        self._keep(self.gate.hear(order.child, order.side, order.request, kind, failure=failure))

    def _invalidate(self, child: str, blocks: frozenset[int], failure: Failure) -> None:
        """Synchronous loads of this step have failed: the host hears of their blocks, where it can."""
        if self._one_group and blocks:
            self._invalid |= blocks
            self._failures.setdefault((child, failure.operation), failure)

    def _wait_failed(self, name: str, exc: BaseException) -> None:
        failure = self._layer_failed(name, "wait_for_layer_load", exc)
        self._invalidate(name, self.step.sync.get(name, frozenset()), failure)

    def _save_failed(self, name: str, exc: BaseException) -> None:
        self._layer_failed(name, "save_kv_layer", exc)

    def _layer_failed(self, name: str, hook: str, exc: BaseException) -> Failure:
        failure = describe(exc, Where(name, hook))
        self.staff[name].note(failure)
        return self._failures.setdefault((name, hook), failure)

    def _forget(self, request: str, side: Side) -> None:
        self.gate.forget(request, side)
        if side is Side.LOAD:
            for child in self._blocks.pop(request, ()):
                for by_load in (self._failed, self._checks, self._being_read):
                    by_load.pop((child, request), None)

    def _keep(self, report: Report | None) -> None:
        if report is not None:
            self._reports.append(report)


def _is_quiet(said: Any) -> bool:
    """Nothing has ended; asked in most steps."""
    if type(said) is not KVConnectorTransferResults:
        return False
    received, sent, failed = said.finished_recving, said.finished_sending, said.failed_recving
    return type(received) is type(sent) is type(failed) is set and not (received or sent or failed)


def _are_results(said: Any) -> bool:
    return all(
        all(type(request) is str for request in requests)
        for requests in (said.finished_sending, said.finished_recving, said.failed_recving)
    )


def _are_ids(said: Any) -> bool:
    return type(said) is set and all(type(block) is int for block in said)
