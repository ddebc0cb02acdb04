"""The two engines behind one shape: register a region, meet a peer, read pieces from it."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import importlib
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from kvbelay.connectors.port import Deadline
from kvbelay.errors import TransferFailed

LOOPBACK = "127.0.0.1"
MOST_ENTRIES = 1024
"""In one call of Mooncake's, which refuses more than 2,048."""
QUIET = {"UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "ERROR", "MC_LOG_LEVEL": "ERROR"}
"""Environment, where nobody has set it."""


class Engine(Protocol):
    """One of them, with a region that is registered."""

    def address(self) -> str:
        """What a reader needs to meet this one."""
        ...

    def meet(self, peer: str) -> None:
        """Know the peer from now on."""
        ...

    def read(self, here: Sequence[int], there: Sequence[int], sizes: Sequence[int], within: Deadline) -> None:
        """Copy pieces from the peer's addresses to these."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Nixl:
    """NIXL with its UCX backend, as it chooses its transports by itself."""

    def __init__(self, region: memoryview) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        with _silent():
            api: Any = importlib.import_module("nixl._api")  # only where it is installed
            self._agent = api.nixl_agent(secrets.token_hex(8), api.nixl_agent_config(backends=["UCX"]))
            base = _address(region)
            self._registered = self._agent.register_memory([(base, len(region), 0, "")], "DRAM")
        self._peers: dict[str, str] = {}
        self._peer = ""

    def address(self) -> str:
        return base64.b64encode(self._agent.get_agent_metadata()).decode()

    def meet(self, peer: str) -> None:
        if peer not in self._peers:
            self._peers[peer] = self._agent.add_remote_agent(base64.b64decode(peer))
        self._peer = self._peers[peer]

    def read(self, here: Sequence[int], there: Sequence[int], sizes: Sequence[int], within: Deadline) -> None:
        local = self._agent.get_xfer_descs([(at, size, 0) for at, size in zip(here, sizes, strict=True)], "DRAM")
        remote = self._agent.get_xfer_descs([(at, size, 0) for at, size in zip(there, sizes, strict=True)], "DRAM")
        handle = self._agent.initialize_xfer("READ", local, remote, self._peer)
        try:
            state = self._agent.transfer(handle)
            while state == "PROC":
                within.remaining_s()
                state = self._agent.check_xfer_state(handle)
        finally:
            self._agent.release_xfer_handle(handle)
        if state != "DONE":
            msg = f"NIXL says {state}"
            raise TransferFailed(msg)

    def close(self) -> None:
        self._agent.deregister_memory(self._registered)


class Mooncake:
    """Mooncake's transfer engine over TCP, the only transport that it has without other hardware."""

    def __init__(self, region: memoryview) -> None:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        with _silent():
            self._engine: Any = importlib.import_module("mooncake.engine").TransferEngine()
            self._base = _address(region)
            begun = self._engine.initialize(LOOPBACK, "P2PHANDSHAKE", "tcp", "")
            if begun or self._engine.register_memory(self._base, len(region)):
                raise TransferFailed("Mooncake did not start")
        self._peer = ""

    def address(self) -> str:
        return f"{LOOPBACK}:{self._engine.get_rpc_port()}"

    def meet(self, peer: str) -> None:
        self._peer = peer

    def read(self, here: Sequence[int], there: Sequence[int], sizes: Sequence[int], within: Deadline) -> None:
        for start in range(0, len(sizes), MOST_ENTRIES):
            within.remaining_s()
            part = slice(start, start + MOST_ENTRIES)
            if self._engine.batch_transfer_sync_read(
                self._peer, list(here[part]), list(there[part]), list(sizes[part])
            ):
                raise TransferFailed("Mooncake says -1; its own words went to standard error")

    def close(self) -> None:
        self._engine.unregister_memory(self._base)


ENGINES: dict[str, Callable[[memoryview], Engine]] = {"nixl": Nixl, "mooncake": Mooncake}


def _address(region: memoryview) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(region))


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """They greet on standard output and on standard error, past Python."""
    kept = os.dup(1), os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, old in zip((1, 2), kept, strict=True):
            os.dup2(old, number)
            os.close(old)
        os.close(nowhere)
