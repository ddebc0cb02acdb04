"""What TCP over loopback gives to a program that does nothing else: ``iperf3 -l 1M``, where it is installed."""

from __future__ import annotations

import shutil
import subprocess
from typing import Annotated

import msgspec

from kvbelay.errors import TransportError
from kvbelay.net.sockets import Listener, parse

SECONDS = 1
"""Of one run: it takes no less."""
LIMIT_S = 15.0
_LOOPBACK = "127.0.0.1"


class _Received(msgspec.Struct):
    bits_per_second: Annotated[float, msgspec.Meta(gt=0)]


class _End(msgspec.Struct):
    sum_received: _Received


class _Report(msgspec.Struct):
    end: _End


def installed() -> bool:
    """Whether it can be run."""
    return shutil.which("iperf3") is not None


def bytes_per_second() -> float:
    """One stream, one second. Raises `TransportError` if it does not run to its end."""
    port = _free_port()
    listen = ["iperf3", "--server", "--one-off", "--forceflush", "--bind", _LOOPBACK, "--port", str(port)]
    with subprocess.Popen(listen, stdout=subprocess.PIPE, text=True) as server:  # noqa: S603  # iperf3
        try:
            for line in server.stdout or ():
                if "listening" in line:
                    break
            client = ["iperf3", "--client", _LOOPBACK, "--port", str(port), "-l", "1M", "-t", str(SECONDS), "--json"]
            said = subprocess.run(client, capture_output=True, timeout=LIMIT_S, check=False)  # noqa: S603  # the same
        finally:
            server.kill()
    try:
        return msgspec.json.decode(said.stdout, type=_Report).end.sum_received.bits_per_second / 8
    except msgspec.MsgspecError as exc:
        raise TransportError("iperf3 measured nothing", operation="iperf3") from exc


def _free_port() -> int:
    listener = Listener(parse(f"tcp://{_LOOPBACK}:0", field="port"), field="port")
    listener.close()
    return listener.address.port
