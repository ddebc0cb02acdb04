"""Engines in processes of their own: one is built for each `Spec`, and every case runs in a fork of it.

A dead engine poisons its process, and building one takes seconds; forking one that stands takes milliseconds. Only an
engine of several ranks, or with a link to others, is not forked, and good for one case. A case is
a function at the top of a module, ``case(engine, **arguments)``; arguments (by their annotations) and what it returns
are data that msgspec can carry. It must have been imported
before the first engine is forked, which pytest's collection sees to.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import multiprocessing
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, get_type_hints

import msgspec
from engine import Died, Engine, Spec, Stuck, WrongTokens
from scripts import KNOWN, STORE

Case = Callable[..., Any]
START_S = 180.0
"""An engine's start on a busy machine; the first of a model looks its class up in a process of its own."""
CASE_S = 90.0
"""A case that takes longer hangs inside a call."""
KEPT = 8
"""Engines that stand at once, about 0.3 GB each."""
LOG = 6000
"""Bytes of the log that a verdict shows."""
CAUSES = {Died: "dead", Stuck: "stuck", WrongTokens: "wrong", AssertionError: "broken"}


class Verdict(msgspec.Struct, kw_only=True):
    """How a case went."""

    kind: str
    """``held``: all assertions did. ``dead``: the engine. ``stuck``: a wait's bound. ``wrong``: tokens. ``broken``:
    another assertion. ``hung``: inside a call, beyond every bound. ``unborn``: the engine did not start. ``error``:
    the case itself."""
    why: str = ""
    trace: str = ""
    facts: Any = None
    seconds: float = 0.0
    log: str = ""
    """The end of what the engine logged."""


class Request(msgspec.Struct, kw_only=True):
    """A case to run."""

    module: str
    name: str
    arguments: dict[str, Any]
    seconds: float


def judge(action: Callable[[], Any]) -> Verdict:
    """Run it, and say how it went."""
    began = time.monotonic()
    try:
        verdict = Verdict(kind="held", facts=action())
    except BaseException as exc:  # noqa: BLE001 # how it fails is what is measured
        kind = next((kind for cause, kind in CAUSES.items() if isinstance(exc, cause)), "error")
        why = str(exc) or traceback.format_exception_only(exc)[-1].strip()
        verdict = Verdict(kind=kind, why=f"{type(exc).__name__}: {why}" if kind == "error" else why)
        verdict.trace = "".join(traceback.format_exception(exc))[-6000:]
    verdict.seconds = time.monotonic() - began
    return verdict


def _alarm(seconds: float) -> None:
    def rings(*_: object) -> None:
        raise Stuck(f"not done after {seconds} s: " + "".join(traceback.format_stack(limit=6)))

    signal.signal(signal.SIGALRM, rings)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _play(engine: Engine, request: Request) -> Verdict:
    """In the fork: the case, and then that nothing of it is left."""
    case = getattr(sys.modules[request.module], request.name)

    def whole() -> Any:
        _alarm(request.seconds)
        kinds = get_type_hints(case)
        given = request.arguments.items()
        facts = case(engine, **{key: msgspec.convert(value, kinds[key], str_keys=True) for key, value in given})
        engine.clean()
        return facts

    verdict = judge(whole)
    if not engine.spec.forkable:
        engine.shut_down()
    return verdict


def _fork(engine: Engine, request: Request, log: Path) -> bytes:
    """Play the case in a fork, and wait for it."""
    reader, writer = os.pipe()
    start = log.stat().st_size
    pid = os.fork()
    if pid == 0:
        _die_with_parent()
        verdict = _play(engine, request)
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(msgspec.json.encode(verdict, enc_hook=repr))
        os._exit(0)
    os.close(writer)
    try:
        answer = _read(reader, time.monotonic() + request.seconds + 5.0)
    finally:
        os.close(reader)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    sys.stderr.flush()
    with log.open("rb") as text:
        text.seek(max(start, log.stat().st_size - LOG))
        tail = text.read().decode(errors="replace")
    if answer:
        verdict = msgspec.json.decode(answer, type=Verdict)
    else:
        verdict = Verdict(kind="hung", why=f"no answer in {request.seconds} s, wait status {status}")
    verdict.log = tail
    return msgspec.json.encode(verdict)


def _read(reader: int, deadline: float) -> bytes:
    parts = []
    while (left := deadline - time.monotonic()) > 0:
        ready, _, _ = select.select([reader], [], [], left)
        if not ready:
            break
        part = os.read(reader, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)
    return b""


def _serve(pipe: Connection, spec: Spec, models: Path, answers: dict[int, list[int]], log: Path) -> None:
    """An engine's own process: build it, then fork it for each case."""
    _die_with_parent()
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.stdout = sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115 # as long as the process
    faulthandler.enable(2)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    engine: list[Engine] = []
    born = judge(lambda: engine.append(Engine(spec, models, answers)))
    if born.kind != "held":
        born.kind, born.log = "unborn", log.read_text(errors="replace")[-LOG:]
    pipe.send_bytes(msgspec.json.encode(born))
    while engine:
        try:
            request = msgspec.json.decode(pipe.recv_bytes(), type=Request)
        except EOFError:
            break
        if not spec.forkable:
            verdict = _play(engine.pop(), request)
            verdict.log = log.read_text(errors="replace")[-LOG:]
            pipe.send_bytes(msgspec.json.encode(verdict, enc_hook=repr))
        else:
            pipe.send_bytes(_fork(engine[0], request, log))
    os._exit(0)


class Template:
    """The process of one engine."""

    def __init__(self, spec: Spec, folder: Path, models: Path, answers: dict[int, list[int]]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        number = sum(1 for _ in folder.glob("*.log"))
        log = folder / f"{number:03}.log"
        log.write_text(f"{spec}\n")
        arguments = (theirs, spec, models, answers, log)
        self._process = context.Process(target=_serve, args=arguments, daemon=spec.ranks == 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking: no thread of ours holds a lock
            self._process.start()
        theirs.close()
        self.born = self._hear(START_S)

    def _hear(self, seconds: float) -> Verdict:
        try:
            if self._pipe.poll(seconds):
                return msgspec.json.decode(self._pipe.recv_bytes(), type=Verdict)
        except EOFError:
            return Verdict(kind="unborn", why="the engine's process is gone")
        return Verdict(kind="hung", why=f"nothing heard in {seconds} s")

    def play(self, case: Case, arguments: dict[str, Any], seconds: float) -> Verdict:
        request = Request(module=case.__module__, name=case.__name__, arguments=arguments, seconds=seconds)
        self._pipe.send_bytes(msgspec.json.encode(request))
        return self._hear(seconds + 30.0)

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()
        self._process.join(10.0)
        self._process.close()


class Engines:
    """All engines of a test session, each built when a case first asks for it.

    ``ask`` is the case that asks a plain engine what is right: it returns (answers, file of the KV).
    """

    def __init__(self, folder: Path, models: Path, ask: Case) -> None:
        self._folder = folder
        self._models = models
        self._ask = ask
        self._answers: dict[str, dict[int, list[int]]] = {}
        self._kv: dict[str, dict[Any, Any]] = {}
        self._templates: dict[bytes, Template] = {}

    def _template(self, spec: Spec) -> Template:
        """The standing engine of this kind; the one that was least recently asked for makes room."""
        if spec.model not in self._answers:
            self._know(spec.model)
        key = msgspec.json.encode(spec)
        while key not in self._templates and len(self._templates) >= KEPT:
            self._templates.pop(next(iter(self._templates))).close()
        if key not in self._templates:
            STORE.clear()
            if spec.ranks == 1:  # what the process that is forked now begins with
                STORE.update(self._kv.get(spec.model, {}))
            KNOWN.clear()
            KNOWN.update(prefix for prefix, _ in STORE)
            self._templates[key] = Template(spec, self._folder, self._models, self._answers[spec.model])
        self._templates[key] = self._templates.pop(key)
        return self._templates[key]

    def _know(self, model: str) -> None:
        """Ask a plain engine what is right, and where the KV of it is."""
        from safetensors.torch import load_file  # noqa: PLC0415 # it imports torch

        spec = Spec(which="plain", model=model, blocks=256, prefix_caching=False, budget=4096)
        template = Template(spec, self._folder, self._models, {})
        verdict = template.play(self._ask, {"folder": str(self._folder)}, CASE_S)
        template.close()
        assert verdict.kind == "held", f"{verdict.why}\n{verdict.trace}\n{verdict.log}\n{template.born}"
        answers, file = verdict.facts
        self._answers[model] = {int(number): tokens for number, tokens in answers.items()}
        self._kv[model] = {tuple(key.split("|")): block for key, block in load_file(file).items()}

    def play(
        self, case: Case, spec: Spec, *, seconds: float = CASE_S, fresh: bool = False, **arguments: Any
    ) -> Verdict:
        """Run one case on the engine that ``spec`` asks for; a ``fresh`` one is not kept."""
        template = self._template(spec)
        verdict = template.born
        if verdict.kind == "held":
            verdict = template.play(case, arguments, seconds)
        if fresh or verdict is template.born or not spec.forkable:
            self._templates.pop(msgspec.json.encode(spec)).close()
        return verdict

    def close(self) -> None:
        for template in self._templates.values():
            template.close()
        self._templates.clear()


def _prime(models: Path) -> None:
    """Build an engine in this process, and end it: what is imported and registered by then, each fork has at once."""
    from vllm.distributed import cleanup_dist_env_and_memory  # noqa: PLC0415 # after the environment is set
    from vllm.platforms import current_platform  # noqa: PLC0415 # the same

    from vllm import envs  # noqa: PLC0415 # the same

    Engine(Spec(which="plain"), models, {}).shut_down()
    cleanup_dist_env_and_memory()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)  # a second time is as slow
    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"  # workers of several ranks, too
    for module in ("kvbelay.vllm.multi", "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"):
        importlib.import_module(module)
    gc.freeze()  # an engine's start collects garbage five times


@contextlib.contextmanager
def engines(folder: Path, models: Path, ask: Case) -> Iterator[Engines]:
    _prime(models)
    standing = Engines(folder, models, ask)
    try:
        yield standing
    finally:
        standing.close()
