"""What the processes of a server run.

Servers are forked from one process that has imported vLLM already: importing it costs a core 7 s, and a server has
three processes. From there on they are what ``python -m vllm.entrypoints.openai.api_server`` is.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from multiprocessing.context import ForkServerContext
from pathlib import Path

IMPORTED = [
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.worker.cpu_worker",
    "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector",
]
DIE_WITH_PARENT = 1
"""``PR_SET_PDEATHSIG`` of Linux."""
SOURCE = Path(__file__).parents[2] / "src"


@cache
def forks() -> ForkServerContext:
    """Makes processes that have imported vLLM."""
    os.environ["HF_HUB_OFFLINE"] = os.environ["OMP_NUM_THREADS"] = "1"  # they are looked at when vLLM is imported
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def serve(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, before: Callable[[], None] | None = None
) -> None:
    """Be an API server. ``before`` is done first, in all that its processes have in common."""
    _begin(environment, log)
    gc.freeze()  # what was imported stays shared memory
    from vllm.entrypoints.launchers.api_server.entry import main  # noqa: PLC0415 # not in the tests' process

    sys.path.insert(0, str(SOURCE))
    sys.argv = ["api_server", *arguments]
    _fork_from_here_on()
    _share_the_cores()
    if before is not None:
        before()
    main()


def run(command: Sequence[str], log: Path) -> None:
    """Be another program."""
    _begin({}, log)
    os.execv(command[0], command)  # noqa: S606 # the commands that tests run are their own


def _begin(environment: Mapping[str, str], log: Path) -> None:
    """Have a session and a log of its own, and leave nobody behind when the tests are killed."""
    os.setsid()
    _die_with_parent()
    os.register_at_fork(after_in_child=_die_with_parent)
    for number, path in enumerate((os.devnull, log, log)):
        opened = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.chdir(log.parent)
    os.environ.update(environment)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)


def _fork_from_here_on() -> None:
    """On CPU the host insists on "spawn"; so it looks through a worker's modules before it has loaded any child's."""
    from vllm.platforms import current_platform  # noqa: PLC0415 # see above

    from vllm import envs  # noqa: PLC0415 # see above

    envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = staticmethod(lambda: None)


def _share_the_cores() -> None:
    """Let nobody spin: two cores have to do for nine processes.

    A worker spins on its queue, and is put last by the kernel for each turn that it gives up. NIXL's own thread polls
    without a pause, also in an idle engine.
    """
    from vllm.distributed.device_communicators import shm_broadcast  # noqa: PLC0415 # see above
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker  # noqa: PLC0415 # see above

    agent = base_worker.NixlWrapper

    def made(*args: object) -> object:
        with ThreadPoolExecutor(1, initializer=lambda: os.nice(10)) as pool:  # what it starts is as nice as it is
            return pool.submit(agent, *args).result()

    base_worker.NixlWrapper = made
    shm_broadcast.sched_yield = lambda: time.sleep(1e-4)
