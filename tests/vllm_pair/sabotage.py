"""What goes wrong below a connector: patched into a server's processes before they begin, done when a test says so.

A test writes an order into a file beside the server's log; the worker's process does it, and removes the file.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from server import Server, until

POLL_S = 0.002
WAIT_S = 30.0
GARBAGE = 3.0
BIT = 30
"""Of the exponent of a float32."""


def can_be_told(server: Server, what: str, **more: Any) -> None:
    """Have a server's worker do ``what`` now: ``fill`` or ``flip`` these ``blocks``; ``hold`` all reads that begin from
    now on, and say nothing to anybody, until ``go``; ``lie``: report reads that it does not do, until ``go``.
    """
    path = _orders(server.name, server.log_path.parent)
    draft = path.with_suffix(".new")
    draft.write_text(json.dumps({"what": what, **more}))
    draft.rename(path)
    until(lambda: not path.exists(), f"{server.name} did {what}", WAIT_S, pause_s=POLL_S)


def blocks_of(params: Mapping[str, Any]) -> list[int]:
    """The blocks that the prefill side has offered."""
    return [block for row in params["remote_block_ids"] for block in row]


def saboteur(name: str) -> partial[None]:
    """For `Server`'s ``before``."""
    return partial(_install, name)


def _orders(name: str, folder: Path) -> Path:
    return folder / f"{name}.order"


def _install(name: str) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker  # noqa: PLC0415 # in a server's process

    worker = base_worker.NixlBaseConnectorWorker
    register, folder = worker.register_kv_caches, Path.cwd()

    def registered(self: Any, kv_caches: dict[str, Any]) -> None:
        register(self, kv_caches)
        self.nixl_wrapper = wrapper = _Wrapper(self.nixl_wrapper)
        threading.Thread(target=_obey, args=(_orders(name, folder), kv_caches, wrapper), daemon=True).start()

    worker.register_kv_caches = registered


class _Wrapper:
    """The worker's NIXL agent, most of the time."""

    def __init__(self, agent: Any) -> None:
        self.mode = "go"
        self._agent = agent
        self._held: list[Any] = []
        self._lied: set[Any] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def transfer(self, handle: Any, *args: Any) -> Any:
        if self.mode == "hold":
            self._held.append(handle)
            return "PROC"
        if self.mode == "lie":
            self._lied.add(handle)
            return "DONE"
        return self._agent.transfer(handle, *args)

    def check_xfer_state(self, handle: Any) -> Any:
        if handle in self._lied:
            return "DONE"
        if handle in self._held:
            if self.mode == "hold":
                return "PROC"
            self._held.remove(handle)
            self._agent.transfer(handle)
        return self._agent.check_xfer_state(handle)

    def get_xfer_telemetry(self, handle: Any) -> Any:
        if handle in self._lied:  # it has never begun
            return type("Telemetry", (), dict.fromkeys(_TELEMETRY, 1))()
        return self._agent.get_xfer_telemetry(handle)

    def send_notif(self, *args: Any, **kwargs: Any) -> Any:
        return None if self.mode == "hold" else self._agent.send_notif(*args, **kwargs)


_TELEMETRY = ("startTime", "postDuration", "xferDuration", "totalBytes", "descCount")


def _obey(path: Path, kv_caches: dict[str, Any], wrapper: _Wrapper) -> None:
    while True:
        if path.exists():
            order = json.loads(path.read_text())
            if order["what"] == "fill":
                _fill(kv_caches, order["blocks"])
            elif order["what"] == "flip":
                _flip(kv_caches, order["blocks"][0])
            else:
                wrapper.mode = order["what"]
            path.unlink()
        time.sleep(POLL_S)


def _fill(kv_caches: dict[str, Any], blocks: Sequence[int]) -> None:
    for cache in kv_caches.values():
        for block in blocks:
            cache[block].fill_(GARBAGE)


def _flip(kv_caches: dict[str, Any], block: int) -> None:
    import torch  # noqa: PLC0415 # in a server's process

    cache = list(kv_caches.values())[len(kv_caches) // 2]
    cache[block, 0].view(torch.int32)[-1, -1] ^= 1 << BIT
