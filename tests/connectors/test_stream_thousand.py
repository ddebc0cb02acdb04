"""A thousand peers on one server: all of them served, at bounded cost."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvbelay.connectors.stream.frames import ANSWER, Done, Hello, Ping
from kvbelay.connectors.stream.pool import Pool
from kvbelay.net.clients import DOOR
from kvbelay.net.sockets import parse
from kvbelay.runtime.deadline import Until

PEERS = 1000
RESIDENT_NBYTES = 256 << 10
"""Most memory that a connection may keep in the process, both of its ends and its thread together."""


@pytest.fixture
def descriptors() -> Iterator[None]:
    """Enough for both ends of all connections, as far as the system lets a process have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * PEERS + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"the system allows {hard} descriptors, {wanted} are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def resident_nbytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("kind", ["plain", "token", "tls"])
def test_a_thousand_peers(tcp: Any, kinds: Any, kind: str) -> None:
    """All of a thousand that come at once are served, then again on the same connections; each costs one thread, one
    descriptor a side and little memory, and when they go nothing is left.
    """
    source = tcp.source(max_clients=PEERS, **kinds[kind])
    clients, trust = source._server._clients, source._trust
    peer = parse(source.address, field="peer")
    pools = [Pool(Hello(tcp.fingerprint, index), trust) for index in range(PEERS)]
    threads, resident = threading.active_count(), resident_nbytes()

    def ask(pool: Pool) -> None:
        with pool.borrow(peer, Until(60.0).remaining_s) as loan:
            (link,) = loan.links(1)
            link.send(Ping(), Until(60.0).remaining_s)
            assert isinstance(link.receive(ANSWER, Until(60.0).remaining_s), Done)

    with ThreadPoolExecutor(2 * DOOR) as crowd:
        for _ in range(2):
            list(crowd.map(ask, pools))
            assert clients.known == PEERS
            assert threading.active_count() <= threads + PEERS + 2 * DOOR
    assert threading.active_count() == threads + PEERS
    assert resident_nbytes() - resident < PEERS * RESIDENT_NBYTES
    for pool in pools:
        pool.close()
    until = Until(30.0)
    while len(clients) or threading.active_count() > threads:
        until.sleep(0.01)
