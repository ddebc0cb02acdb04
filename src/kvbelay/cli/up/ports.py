"""Ports for the servers."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack
from pathlib import Path

from kvbelay.errors import ConfigError

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
"""Linux: the ports that outgoing connections are given."""
FROM = 10_000
"""Below it stand ports that people remember."""
TRIES = 1000
HOST = "127.0.0.1"


def free_ports(count: int) -> list[int]:
    """Ports of the loopback that nobody has now, and that no outgoing connection will be given.

    A port that the kernel chose can be taken by any connection between this moment and the one when the server listens;
    some servers then hang instead of saying so. So these lie below the range that the kernel chooses from.
    """
    lowest = _lowest_of_the_kernel()
    first = FROM if lowest > 2 * FROM else 1024
    if lowest <= first:
        msg = f"the kernel gives outgoing connections all ports from {lowest} on"
        raise ConfigError(msg, source=str(RANGE), remedy="let the range begin at 32768, as it usually does")
    ports: list[int] = []
    with ExitStack() as probes:
        for _ in range(TRIES):
            if len(ports) == count:
                break
            port = first + secrets.randbelow(lowest - first)
            probe = probes.enter_context(socket.socket())
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            ports.append(port)
    if len(ports) < count:
        msg = f"{TRIES} tries found only {len(ports)} of {count} free ports from {first} to {lowest}"
        raise ConfigError(msg, remedy="end some servers")
    return ports


def require_free(port: int) -> None:
    """Raises `ConfigError` if somebody has the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that are over do not count
        try:
            probe.bind((HOST, port))
        except OSError as exc:
            msg = f"{port} cannot be used: {exc.strerror or exc}"
            raise ConfigError(msg, field="--port", remedy="choose another port") from exc


def _lowest_of_the_kernel() -> int:
    try:
        return int(RANGE.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768  # Linux's default
