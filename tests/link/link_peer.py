"""An engine's links in a process of its own: does what each line of stdin says, and answers each with one line."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import msgspec

from kvbelay.link.events import Source, Told
from kvbelay.link.links import Links
from kvbelay.net.endpoint import Endpoint


def plain(event: Any) -> dict[str, Any]:
    """An event as plain values."""
    if isinstance(event, Told):
        message = event.message
        return {"event": type(message).__name__, "request": message.request}
    told = {name: value for name, value in event._asdict().items() if name != "source"}
    return {"event": type(event).__name__, **told}


def main() -> None:
    spec = json.loads(sys.argv[1])
    links = Links(msgspec.convert(spec["config"], Endpoint), engine=spec["engine"])

    def say(value: Any) -> None:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()

    say(links.source)
    for line in sys.stdin:
        what, *arguments = json.loads(line)
        if what == "take":
            say([plain(event) for event in links.take()])
            continue
        if what == "fork":
            say(os.fork() or signal.pause())
            continue
        if what in {"want", "ended", "state"}:
            arguments[0] = Source(*arguments[0])
        target = links if what in {"want", "ended", "state"} else links.offers
        done = getattr(target, what)(*arguments)
        say(done[0].value if what == "state" else None)
    links.close()


if __name__ == "__main__":
    main()
