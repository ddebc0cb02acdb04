"""A backend's engine in a process of its own: copies into or out of memory that it has mapped, and may freeze midway.

Its one argument is JSON: ``fd`` (inherited) and ``nbytes`` of the memory, ``pieces`` (start and length each), ``seed``
of what it writes (null: it reads), ``freeze``. It prints the hash of what it wrote or read.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import sys


def main() -> None:
    order = json.loads(sys.argv[1])
    pieces = order["pieces"]
    total = sum(nbytes for _, nbytes in pieces)
    content = b"" if order["seed"] is None else random.Random(order["seed"]).randbytes(total)
    moved = bytearray()
    with mmap.mmap(order["fd"], order["nbytes"]) as memory:
        for index, (start, nbytes) in enumerate(pieces):
            if order["freeze"] and index == len(pieces) // 2:
                os.kill(os.getpid(), signal.SIGSTOP)
            if content:
                memory[start : start + nbytes] = content[len(moved) : len(moved) + nbytes]
            moved += memory[start : start + nbytes]
    sys.stdout.write(hashlib.sha256(moved).hexdigest())


if __name__ == "__main__":
    main()
