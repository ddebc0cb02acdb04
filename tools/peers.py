"""What proofs and peers cost `stream`, on loopback: throughput and handshakes without a proof, with a token, with TLS.

Each kind takes its turn in every round, and the median counts, so that what else the machine does hits all of them
alike. Files for TLS: see docs/stream.md; the certificate has to name 127.0.0.1.

    python tools/peers.py --token-file token --cert node.pem --key node.key --ca authority.pem
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvbelay.connectors.stream import BACKEND, StreamConfig, StreamConnector, TlsConfig
from kvbelay.connectors.stream.frames import Hello
from kvbelay.connectors.stream.pool import Pool
from kvbelay.core.model import BatchId, BlockSpan, Fingerprint, Layout, TransferBatch, chain_prefix
from kvbelay.net.sockets import parse
from kvbelay.runtime.deadline import Until

LAYOUT = Layout(group=0, layers=(0, 1), block_tokens=16, kv_heads=2, head_dim=8, dtype="float32", order="NHD")
FINGERPRINT = Fingerprint(model="tools/peers", revision="1", layouts=(LAYOUT,))
BATCH = BatchId(FINGERPRINT.digest(), 0, 16, (0, 2), chain_prefix(b"", range(16)))
WITHIN_S = 120.0


def batch(nbytes: int, piece: int) -> TransferBatch:
    """A batch of pieces of one size, in memory of its own."""
    region = memoryview(bytearray(nbytes))
    return TransferBatch(BATCH, "peers", 1, (BlockSpan(region, array("Q", range(0, nbytes, piece)), piece),))


def throughput(sources: dict[str, StreamConnector], configs: dict[str, StreamConfig], args: argparse.Namespace) -> None:
    """Print GB/s of each kind, and its ratio to the first."""
    taken: dict[str, list[float]] = {kind: [] for kind in sources}
    put, into = batch(args.nbytes, args.piece), batch(args.nbytes, args.piece)
    readers = {kind: BACKEND.open(configs[kind], child="peers", fingerprint=FINGERPRINT) for kind in sources}
    tickets = {kind: source.put(put, Until(WITHIN_S)) for kind, source in sources.items()}
    for _ in range(args.rounds + 1):
        for kind, reader in readers.items():
            began = time.perf_counter()
            reader.get(into, tickets[kind], Until(WITHIN_S))
            taken[kind].append(time.perf_counter() - began)
    medians = {kind: statistics.median(times[1:]) for kind, times in taken.items()}  # the first one connects
    whole = next(iter(medians.values()))
    for kind, median in medians.items():
        print(f"get    {kind:6} {args.nbytes / median / 1e9:6.2f} GB/s  {whole / median:5.2f} of plain")
    for reader in readers.values():
        reader.close()


def handshakes(kind: str, source: StreamConnector, peers: int) -> None:
    """Print the time of a handshake alone, of all at once, and the memory of a connection, both ends together."""
    peer = parse(source.address or "", field="peer")
    pools = [Pool(Hello(FINGERPRINT, index), source._trust) for index in range(peers)]  # noqa: SLF001  # a tool of ours

    def greet(pool: Pool) -> float:
        began = time.perf_counter()
        with pool.borrow(peer, Until(WITHIN_S).remaining_s) as loan:
            loan.links(1)
            return time.perf_counter() - began

    before = resident_nbytes()
    first = [greet(pool) for pool in pools[: peers // 10]]
    began = time.perf_counter()
    with ThreadPoolExecutor(64) as crowd:
        crowded = list(crowd.map(greet, pools[peers // 10 :]))
    whole = time.perf_counter() - began
    each = (resident_nbytes() - before) / peers / 1024
    print(
        f"greet  {kind:6} {1e3 * statistics.median(first):6.2f} ms alone, {1e3 * statistics.median(crowded):7.2f} ms"
        f" among 64 at a time, {len(crowded) / whole:6.0f} a second; {each:4.0f} KiB each"
    )
    for pool in pools:
        pool.close()


def resident_nbytes() -> int:
    """Of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("--token-file", "--cert", "--key", "--ca"):
        parser.add_argument(name, required=True)
    parser.add_argument("--peers", type=int, default=1000)
    parser.add_argument("--nbytes", type=int, default=64 << 20)
    parser.add_argument("--piece", type=int, default=64 << 10)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    tls = TlsConfig(args.cert, args.key, args.ca)
    configs = {"plain": StreamConfig(), "token": StreamConfig(token_file=args.token_file), "tls": StreamConfig(tls=tls)}
    sources = {
        kind: BACKEND.open(
            StreamConfig(
                listen="tcp://127.0.0.1:0",
                max_clients=args.peers + 8,
                lease_s=3600.0,
                token_file=config.token_file,
                tls=config.tls,
            ),
            child="peers",
            fingerprint=FINGERPRINT,
        )
        for kind, config in configs.items()
    }
    throughput(sources, configs, args)
    for kind, source in sources.items():
        handshakes(kind, source, args.peers)
    for source in sources.values():
        source.close()


if __name__ == "__main__":
    main()
