"""One engine of vLLM in this process, driven step by step, and what may be asked of it."""

from __future__ import annotations

import contextlib
import importlib
import logging
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import host
import msgspec
from scripted import POISON, Refused
from scripts import SAVED, STAGE, STORE, prefixes
from tiny import prompt
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from vllm import SamplingParams

GUARD = "kvbelay.vllm"
"""The one key that an operator adds."""
STEP_S = 0.01
"""What a step takes by the guard's clock."""
LONGEST_S = 60.0
"""Bound of a wait on a busy machine; on an idle one the steps run out first."""
LAST = "last"
"""The request that comes after a case."""
IDLE_S = 0.001
"""Pause between two steps that computed nothing, as the engine's own loop makes it."""


class Died(Exception):
    """Something that the host does not catch came out of the engine: it would be dead now."""


class Stuck(Exception):
    """What was waited for did not come within its bound."""


class WrongTokens(AssertionError):
    """A request was answered, and not with what a plain engine answers."""


class Clock:
    """Stands for the module ``time`` in the guard: its time goes on with the engine's steps and with what scripts say
    that a hook takes, so that no deadline passes only because the machine is busy.
    """

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    @staticmethod
    def monotonic() -> float:
        return 1000.0 + STAGE.step * STEP_S + STAGE.spent_s

    perf_counter = monotonic

    def install(self) -> None:
        importlib.import_module(f"{GUARD}.multi")
        for name, module in list(sys.modules.items()):
            if name.startswith(GUARD) and getattr(module, "time", None) is time:
                module.time = self


class Child(msgspec.Struct, frozen=True, kw_only=True):
    """One child in the configuration."""

    name: str
    kind: str = "ScriptedConnector"
    module: str = "scripted"
    role: str = "kv_both"
    script: dict[str, Any] = {}
    """What already its start does; a case puts up the rest."""
    belay: dict[str, Any] = {}
    """The guard's options for it."""


class Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An engine."""

    which: str = "stock"
    """``stock`` and ``guard`` hold the children; ``bare`` is the first child alone; ``plain`` has no connector."""
    children: tuple[Child, ...] = (Child(name="x"), Child(name="y"))
    model: str = "llama"
    asynchronous: bool = False
    """The async scheduler."""
    prefix_caching: bool = True
    policy: str = "fail"
    """``kv_load_failure_policy``."""
    blocks: int = 96
    running: int = 16
    """Requests that run at once."""
    budget: int = 2048
    """Tokens in a step."""
    ranks: int = 1
    stats: bool = False
    """Statistics and Prometheus as in a server."""
    belay: dict[str, Any] = {}
    """The guard's options."""

    @property
    def forkable(self) -> bool:
        """A fork would share the workers of several ranks, and have no thread that listens for other engines."""
        return self.ranks == 1 and not (self.which == "guard" and self.belay.get("link"))

    def transfer(self) -> KVTransferConfig | None:
        """The operator's ``--kv-transfer-config``."""
        children = [
            {
                "kv_connector": child.kind,
                "kv_connector_module_path": child.module,
                "kv_role": child.role,
                "kv_connector_extra_config": {
                    "name": child.name,
                    "script": child.script,
                    "kvbelay": {"name": child.name, **child.belay},
                },
            }
            for child in self.children
        ]
        if self.which == "plain":
            return None
        if self.which == "bare":
            return KVTransferConfig(**children[0], kv_load_failure_policy=self.policy)
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_connector_module_path=GUARD if self.which == "guard" else None,
            kv_role="kv_both",
            kv_load_failure_policy=self.policy,
            kv_connector_extra_config={
                "connectors": children,
                **({"kvbelay": self.belay} if self.which == "guard" else {}),
            },
        )

    def arguments(self, models: Path) -> EngineArgs:
        return EngineArgs(
            model=str(models / self.model),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            block_size=32,
            num_gpu_blocks_override=self.blocks,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=256,
            max_num_seqs=self.running,
            max_num_batched_tokens=self.budget,
            async_scheduling=self.asynchronous,
            enable_prefix_caching=self.prefix_caching,
            disable_hybrid_kv_cache_manager=False,
            tensor_parallel_size=self.ranks,
            distributed_executor_backend="mp" if self.ranks > 1 else "uni",
            disable_log_stats=not self.stats,
            kv_transfer_config=self.transfer(),
        )


class Engine:
    """An engine and its requests.

    Whatever the engine lets out becomes `Died`, with the line that raised; every wait has a bound, and ends as `Stuck`.
    Each block that is allocated is poisoned first, so that KV which nobody loaded or computed shows in the text.
    """

    def __init__(self, spec: Spec, models: Path, answers: dict[int, list[int]]) -> None:
        self.spec = spec
        if spec.which == "guard" and spec.ranks == 1:  # the others' workers are processes of their own
            Clock().install()
        with host.warnings.catch_warnings():
            host.warnings.simplefilter("ignore")
            config = spec.arguments(models).create_engine_config()
            if spec.stats:
                logging.getLogger("vllm").setLevel(logging.INFO)  # the statistics are logged, too
            config.scheduler_config.async_scheduling = spec.asynchronous  # the CPU platform switches it off
            self.llm = LLMEngine.from_vllm_config(config, disable_log_stats=not spec.stats)
        self.core = self.llm.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.connector = self.scheduler.connector
        self.worker = get_kv_transfer_group() if self.connector is not None and spec.ranks == 1 else None
        self._answers = answers
        self.numbers: dict[str, int] = {}
        """Request -> the number of its prompt."""
        self.tokens: dict[str, list[int]] = {}
        self.ended: dict[str, str | None] = {}
        """Request -> why it ended."""
        self.params: dict[str, Any] = {}
        """Request -> the ``kv_transfer_params`` of its answer."""
        self.computed: Counter[str] = Counter()
        """Request -> tokens that went through the model."""
        self.preempted: Counter[str] = Counter()
        self.unsettled: set[str] = set()
        """Requests of which a child has said that it failed, and not that it has ended."""
        self._watch_schedule()
        if spec.ranks == 1:
            self._poison_allocations()
        self.free = self.pool.get_num_free_blocks()
        """Free blocks of the idle engine."""

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    def _watch_schedule(self) -> None:
        schedule = self.scheduler.schedule

        def watched(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.computed.update(output.num_scheduled_tokens)
            self.preempted.update(output.preempted_req_ids or ())
            return output

        self.scheduler.schedule = watched

    def _poison_allocations(self) -> None:
        manager = self.scheduler.kv_cache_manager
        allocate = manager.allocate_slots

        def poisoned(request: Any, *args: Any, **kwargs: Any) -> Any:
            hits = kwargs.get("new_computed_blocks")
            kept = [set(row) for row in manager.get_block_ids(request.request_id)]
            if hits is not None:
                kept = [row | set(hit) for row, hit in zip(kept, hits.get_block_ids(), strict=True)]
            blocks = allocate(request, *args, **kwargs)
            if blocks is not None:
                for group, row in enumerate(manager.get_block_ids(request.request_id)):
                    self.fill(group, set(row) - kept[group] - {0})
            return blocks

        manager.allocate_slots = poisoned

    def layers(self, group: int) -> Iterator[tuple[str, Any]]:
        """The layers of a KV cache group, and the tensors of their blocks."""
        context = self.core.vllm_config.compilation_config.static_forward_context
        for name in self.scheduler.kv_cache_config.kv_cache_groups[group].layer_names:
            yield name, context[name].kv_cache

    def fill(self, group: int, blocks: set[int]) -> None:
        """Poison these blocks."""
        for _, cache in self.layers(group):
            for block in blocks:
                cache[block].fill_(POISON)

    # Driving it.

    @contextlib.contextmanager
    def _alive(self) -> Iterator[None]:
        try:
            yield
        except Exception as exc:
            frame = traceback.extract_tb(exc.__traceback__)[-1]
            if frame.filename.endswith("scripted.py") and frame.name != "called" and not isinstance(exc, Refused):
                raise  # the harness' own mistake
            where = f"{Path(frame.filename).name}:{frame.name}: {frame.line}"
            msg = f"{type(exc).__name__}: {exc} | {where}"
            raise Died(msg) from exc

    def add(self, name: str, number: int, *, new: int = 8, params: dict[str, Any] | None = None) -> None:
        """Ask for ``new`` tokens after prompt ``number``."""
        sampling = SamplingParams(
            temperature=0,
            max_tokens=new,
            ignore_eos=True,
            detokenize=False,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        self.numbers[name] = number
        self.ended.pop(name, None)
        del self.computed[name]
        with self._alive():
            self.llm.add_request(name, {"prompt_token_ids": prompt(number)}, sampling)

    def abort(self, *names: str) -> None:
        """The clients of these requests are gone."""
        with self._alive():
            self.llm.abort_request(list(names), internal=True)
        for name in names:
            self.ended.setdefault(name, "abort")

    def step(self) -> None:
        STAGE.step += 1
        with self._alive():
            outputs = self.llm.step()
        for output in outputs:
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.ended[output.request_id] = output.outputs[0].finish_reason
                self.params[output.request_id] = output.kv_transfer_params

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def run(
        self, until: Callable[[], bool], *, seconds: float = LONGEST_S, steps: int = 2000, pause_s: float = IDLE_S
    ) -> None:
        """Step until ``until()``; an engine that has nothing to do is asked again, as its server would."""
        deadline = time.monotonic() + seconds
        for _ in range(steps):
            if until():
                return
            before = self.computed.total()
            self.step()
            if self.computed.total() == before:
                time.sleep(pause_s)
            if time.monotonic() > deadline:
                break
        raise Stuck(self.state())

    def finish(self, *names: str, steps: int = 2000) -> None:
        """Step until these requests, or all, have ended."""
        self.run(lambda: all(name in self.ended for name in names or self.numbers), steps=steps)

    def rest(self) -> None:
        """Step until the engine has nothing left to do."""
        self.run(self.idle)

    def idle(self) -> bool:
        """Its server would wait for a request now."""
        with self._alive():
            return not self.scheduler.has_requests() and not self.core.batch_queue

    def forget_prefixes(self, *, running: bool = False) -> bool:
        """Reset the prefix cache, and the children's caches with it; or first preempt what is ``running``."""
        with self._alive():
            return self.llm.reset_prefix_cache(reset_running_requests=running, reset_connector=True)

    def shut_down(self) -> None:
        """Shut the connector down, as the engine's end does; in a fork the rest of an engine cannot be."""
        with self._alive():
            if self.worker is None:
                self.core.shutdown()
            else:
                self.scheduler.shutdown()
                self.worker.shutdown()

    # Asking it.

    def state(self) -> str:
        """The requests that the scheduler knows."""
        states = {name: request.status.name for name, request in self.scheduler.requests.items()}
        return f"unfinished: {states}, blocks in use: {self.in_use()}"

    def waits(self, name: str) -> bool:
        """The request waits for its KV."""
        request = self.scheduler.requests.get(name)
        return request is not None and request.status.name == "WAITING_FOR_REMOTE_KVS"

    def in_use(self) -> int:
        """Blocks that are not free."""
        return self.free - self.pool.get_num_free_blocks()

    def held(self) -> int:
        """Blocks in quarantine."""
        return len(getattr(getattr(self.connector, "desk", None), "quarantine", ()))

    def blocks_of(self, name: str) -> set[int]:
        return {block for row in self.scheduler.kv_cache_manager.get_block_ids(name) for block in row} - {0}

    def right(self, *names: str) -> None:
        """These requests, or all that were not aborted, were answered, and as a plain engine answers."""
        for name in names or [name for name, why in self.ended.items() if why != "abort"]:
            assert self.ended.get(name) == "length", f"{name} ended by {self.ended.get(name)!r}: {self.state()}"
            said, expected = self.tokens[name], self._answers[self.numbers[name]]
            if said != expected[: len(said)]:
                msg = f"{name}: {said}, and not {expected[: len(said)]}"
                raise WrongTokens(msg)

    def served(self, name: str, child: str | None, loaded: int = 0) -> None:
        """The request's KV came from ``child``, ``loaded`` tokens of it, and all else went through the model once."""
        if child is not None:
            assert STAGE.loaded(child, name) == loaded, f"{child} loaded {STAGE.loaded(child, name)} of {name}"
        whole = len(prompt(self.numbers[name])) + len(self.tokens[name]) - 1
        assert self.computed[name] == whole - loaded, f"{self.computed[name]} tokens of {name} were computed"

    def once(self, *names: str) -> None:
        """Nothing of these requests, or all, went through the model twice."""
        for name in names or self.tokens:
            whole = len(prompt(self.numbers[name])) + len(self.tokens[name]) - 1
            assert self.computed[name] <= whole, f"{self.computed[name]} tokens of {name} were computed, not {whole}"

    def read_right(self, child: str, name: str) -> None:
        """The child has read the KV of the request's prompt, and nothing else."""
        for prefix in prefixes(prompt(self.numbers[name])):
            for number, group in enumerate(self.scheduler.kv_cache_config.kv_cache_groups):
                for layer, _ in self.layers(number):
                    read = SAVED.get((child, prefix, layer))
                    if read is None and getattr(group.kv_cache_spec, "sliding_window", None):
                        continue  # behind the window
                    assert read is not None, f"{child} has not read {name}"
                    assert read.allclose(STORE[prefix, layer], atol=1e-4), f"{child} read what is not the KV of {name}"

    def clean(self) -> None:
        """Nothing of any request is left: no request, no block, no state.

        Except what is in quarantine, if the case says that it left transfers of some requests `unsettled`. What the
        scheduler's half has still to tell the workers goes with the step of one more request.
        """
        self.rest()
        if self.spec.ranks == 1:
            STAGE.scripts.clear()
        self.add(LAST, 11, new=1)
        self.finish()
        self.rest()
        assert not self.scheduler.requests, self.state()
        assert not self.scheduler.deferred_frees
        held = self.held() if self.unsettled else 0
        assert self.in_use() == held, f"{self.in_use()} blocks are still in use, {self.held()} in quarantine"
        left = [*self.scheduler.finished_recving_kv_req_ids, *self.scheduler.failed_recving_kv_req_ids]
        assert not left, f"the scheduler remembers {left}"
        for role, connector in (("scheduler", self.connector), ("worker", self.worker)):
            found = list(leftovers(connector, set(self.numbers) - {LAST} - self.unsettled, role))
            assert not found, f"left over: {found}"


FOREIGN = ("kvbelay.link.offers", "logging", "torch", "vllm.config", "vllm.v1", "scripted", "transformers", "variants")
"""Modules whose objects a connector only points at, or that keep what they keep for as long as a lease lasts."""


def leftovers(thing: Any, names: set[str], path: str, seen: set[int] | None = None) -> Iterator[str]:
    """Where below ``thing`` a request's name stands."""
    seen = set() if seen is None else seen
    if isinstance(thing, str):
        if thing in names:
            yield f"{path} = {thing}"
        return
    if id(thing) in seen or thing is None or isinstance(thing, int | float | bytes | type | Callable):
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        for key, value in list(thing.items()):
            yield from leftovers(key, names, f"{path} key", seen)
            yield from leftovers(value, names, f"{path}[{key!r}]"[-200:], seen)
    elif isinstance(thing, list | tuple | set | frozenset) or hasattr(thing, "popleft"):
        for value in list(thing):
            yield from leftovers(value, names, f"{path}[]", seen)
    elif not type(thing).__module__.startswith(FOREIGN):
        slots = [slot for kind in type(thing).__mro__ for slot in getattr(kind, "__slots__", ())]
        fields = {**getattr(thing, "__dict__", {}), **{slot: getattr(thing, slot, None) for slot in slots}}
        for key, value in fields.items():
            yield from leftovers(value, names, f"{path}.{key}"[-200:], seen)
