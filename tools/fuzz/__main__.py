"""Fuzz the decoders of foreign bytes: each target in a process of its own, from a seed and for a budget that are given.

``python -m fuzz`` with ``tools`` on the path; see ``make fuzz``. What is found is stored beside the target's corpus,
and the run fails.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fuzz.targets import MODULES, target

HERE = Path(__file__).parent
CORPUS = HERE / "corpus"
FOUND = Path("fuzz-found")
INPUT_S = 10
"""Most seconds for one input."""
MEMORY_MB = 1024
"""Most memory of one target's process, and 256 MB for a single allocation."""


NOISE = ("INFO: ", "WARNING: ", "#", "stat::")


class Budget(NamedTuple):
    """How long to fuzz one target."""

    seconds: int
    short: bool
    """A number of inputs instead, always the same ones."""
    seed: int


def write_seeds() -> None:
    """Put the targets' seeds into the corpus, under the hash of their bytes."""
    for name in MODULES:
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for data in target(name).seeds():
            (folder / f"seed-{hashlib.sha256(data).hexdigest()[:16]}").write_bytes(data)


def fuzz(name: str, budget: Budget, keep: Path | None) -> int:
    """One target. Returns 0 if nothing was found; else tells what, and how to see it again."""
    began = time.monotonic()
    FOUND.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvbelay-fuzz-") as scratch:
        grown = keep / name if keep is not None else Path(scratch) / "corpus"
        grown.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "fuzz.campaign", name, str(grown), str(CORPUS / name)),
            *(f"-seed={budget.seed}", f"-timeout={INPUT_S}", "-max_len=8192", "-print_final_stats=1"),
            *(f"-rss_limit_mb={MEMORY_MB}", "-malloc_limit_mb=256", f"-artifact_prefix={FOUND}/{name}-"),
            f"-runs={target(name).short}" if budget.short else f"-max_total_time={budget.seconds}",
        ]
        environment = {**os.environ, "TMPDIR": scratch, "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    said = done.stdout + done.stderr
    runs = next((line.split()[-1] for line in said.splitlines() if "number_of_executed_units" in line), "?")
    took = time.monotonic() - began
    print(f"{'ok' if done.returncode == 0 else 'FOUND':<5} {name:<16} {runs:>9} inputs {took:6.1f} s", flush=True)
    if done.returncode != 0:
        print("\n".join(line for line in said.splitlines() if not line.startswith(NOISE))[-4000:])
        for path in sorted(FOUND.glob(f"{name}-*")):
            print(f"input: {path}\nagain: PYTHONPATH=tools {Path(sys.executable).name} -m fuzz --again {name} {path}")
    return done.returncode


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(MODULES)}; none: all of them")
    parser.add_argument("--seconds", type=int, default=20, help="for each target")
    parser.add_argument("--short", action="store_true", help="instead, so many inputs as take each about a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="targets at once")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep what was found to reach new code there")
    parser.add_argument("--again", nargs=2, metavar=("TARGET", "FILE"), help="only give this input to the target")
    parser.add_argument("--seeds", action="store_true", help="only write the seeds into the corpus")
    arguments = parser.parse_args()
    if arguments.seeds:
        write_seeds()
        return 0
    if arguments.again:
        target(arguments.again[0]).take(Path(arguments.again[1]).read_bytes())
        print("nothing is wrong with it")
        return 0
    unknown = set(arguments.targets) - set(MODULES)
    if unknown:
        parser.error(f"there is no target {', '.join(sorted(unknown))}")
    budget = Budget(arguments.seconds, arguments.short, arguments.seed or 1)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        ends = list(pool.map(lambda name: fuzz(name, budget, arguments.keep), arguments.targets or MODULES))
    return int(any(ends))


if __name__ == "__main__":
    sys.exit(main())
