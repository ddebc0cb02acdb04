"""A worker of the demo that does not do what it should: ``ODD`` says how."""

from __future__ import annotations

import os
import sys

from kvbelay.cli.demo.messages import Ready, say


def main() -> None:
    """Speak the beginning of the protocol, and no more."""
    sys.stdin.readline()
    if os.environ["ODD"] == "crash":
        sys.exit("out of luck")
    say(Ready())
    if os.environ["ODD"] == "nonsense":
        print('{"type": "loaded"', flush=True)  # noqa: T201  # its word to the stage
    if os.environ["ODD"] == "wrong kind":
        say(Ready())
    sys.stdin.read()


if __name__ == "__main__":
    main()
