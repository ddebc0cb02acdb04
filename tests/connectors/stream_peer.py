"""A source in a process of its own: puts what its one argument says, prints the tickets, serves until stdin ends."""

from __future__ import annotations

import json
import sys

import msgspec

from kvbelay.connectors.stream import BACKEND, StreamConfig
from kvbelay.core.model import BatchId, Fingerprint, TransferBatch
from kvbelay.runtime.deadline import Until
from kvbelay.testing.conformance.scattered import Scattered


def main() -> None:
    spec = json.loads(sys.argv[1])
    fingerprint = msgspec.msgpack.decode(bytes.fromhex(spec["fingerprint"]), type=Fingerprint)
    config = msgspec.convert({"listen": spec["listen"], **spec["config"]}, StreamConfig)
    source = BACKEND.open(config, child="near", fingerprint=fingerprint)
    for index, identity in enumerate(spec["ids"]):
        memory = Scattered([tuple(part) for part in spec["shape"]], seed=index)
        memory.fill(spec["seed"] + index)
        batch = TransferBatch(msgspec.msgpack.decode(bytes.fromhex(identity), type=BatchId), "put", 1, memory.spans)
        sys.stdout.write(msgspec.msgpack.encode(source.put(batch, Until(30.0))).hex() + "\n")
        sys.stdout.flush()
    sys.stdin.read()
    source.close()


if __name__ == "__main__":
    main()
