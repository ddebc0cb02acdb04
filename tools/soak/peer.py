"""The other side, a process of its own that is killed and frozen: saves what it is told and serves it.

Its argument is the scratch folder. A line of JSON on stdin is one request; a line with tickets answers.
"""

from __future__ import annotations

import json
import sys
import threading
from functools import partial
from pathlib import Path

from kvbelay.connectors.file import BACKEND as FILE
from kvbelay.connectors.file import FileConfig
from kvbelay.connectors.stream import BACKEND as STREAM
from kvbelay.connectors.stream import StreamConfig
from kvbelay.core.model import Side
from kvbelay.core.policy import Policy
from kvbelay.core.wire import encode_tickets
from kvbelay.runtime.belay import Belay
from soak.blocks import FINGERPRINT, Blocks, Shape

LEASE_S = 20.0
STORE_NBYTES = 16 << 20


class Kept:
    """Blocks that readers may still read, by request."""

    def __init__(self) -> None:
        self._blocks: dict[str, Blocks] = {}
        self._free: set[str] = set()
        self._lock = threading.Lock()

    def keep(self, request: str, blocks: Blocks) -> None:
        """Until they are released, which may have happened already."""
        with self._lock:
            if request in self._free:
                self._free.remove(request)
            else:
                self._blocks[request] = blocks

    def released(self, request: str, _: Side) -> None:
        """Nobody reads them any more."""
        with self._lock:
            if self._blocks.pop(request, None) is None:
                self._free.add(request)


def main() -> None:
    """Serve until stdin ends."""
    scratch = Path(sys.argv[1])
    kept = Kept()
    layer = Belay(Policy(attempt_s=20.0), released=kept.released)
    for child, listen in (("unix", f"unix://{scratch}/peer"), ("tcp", "tcp://127.0.0.1:0")):
        config = StreamConfig(listen=listen, lease_s=LEASE_S)
        layer.add(child, partial(STREAM.open, config, child=child, fingerprint=FINGERPRINT), digest_in_pass=True)
    store = FileConfig(path=str(scratch / "store"), capacity_nbytes=STORE_NBYTES)
    layer.add("store", partial(FILE.open, store, child="store", fingerprint=FINGERPRINT), digest_in_pass=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        order = json.loads(line)
        blocks = Blocks(order["request"], Shape(*order["shape"])).fill(order["seed"])
        outcome = layer.save(order["request"], blocks.batches, 60.0)
        if outcome.held:
            kept.keep(order["request"], blocks)
        sys.stdout.write(encode_tickets(outcome.tickets).decode() + "\n")
        sys.stdout.flush()
    layer.close()


if __name__ == "__main__":
    main()
