"""What the tests of the link share: engines' links here and in other processes, and conditions that are waited for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest

from kvbelay.link import caller, line
from kvbelay.link.events import Event, Freed, Source, Told
from kvbelay.link.links import Links
from kvbelay.link.messages import Gone, Offer
from kvbelay.net.endpoint import Endpoint
from kvbelay.testing.conformance.leaks import Residue

PEER = Path(__file__).with_name("link_peer.py")
LOOPBACK = "tcp://127.0.0.1:0"
WITHIN_S = 30.0
"""A bound, not a time that anything should take."""


def wait_for(condition: Callable[[], Any]) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come to be"
        time.sleep(0.002)


class Engine:
    """Links in this process, and all that they have heard."""

    def __init__(self, links: Links) -> None:
        self.links = links
        self.heard: list[Event] = []

    @property
    def source(self) -> Source:
        return self.links.source

    @property
    def far(self) -> Source:
        """The same one, as if nobody knew on which host."""
        return self.source._replace(host="")

    def offer(self, request: str, digests: tuple[tuple[int, ...], ...] = ((1, 2),), lease_s: float = 60.0) -> None:
        self.links.offers.promise(request, lease_s)
        self.links.offers.publish(request, 32, ["half"] * len(digests), digests, "" if digests else "it is a test")

    def all(self) -> list[Event]:
        self.heard += self.links.take()
        return self.heard

    def answers(self, request: str) -> list[Offer | Gone]:
        return [event.message for event in self.all() if isinstance(event, Told) and event.message.request == request]

    def answer(self, request: str) -> Offer | Gone:
        """The first one, when it has come."""
        wait_for(lambda: self.answers(request))
        return self.answers(request)[0]

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for event in self.all() if isinstance(event, kind)]

    def event(self, kind: type[Event]) -> Any:
        """The only one of its kind, when it has come."""
        wait_for(lambda: self.events(kind))
        (found,) = self.events(kind)
        return found

    def freed(self) -> list[tuple[str, str]]:
        return [(event.request, event.engine) for event in self.events(Freed)]

    def cut(self) -> None:
        """End the connections of those who have called; both sides live on."""
        for link in list(self.links._clients._known):
            link.shutdown()

    def claims(self, request: str) -> set[int]:
        entry = self.links.offers._entries.get(request)
        return set() if entry is None else set(entry.claims)


class Other:
    """Links in another process."""

    def __init__(self, engine: str, config: dict[str, Any]) -> None:
        spec = json.dumps({"engine": engine, "config": config})
        self.process = subprocess.Popen(
            [sys.executable, str(PEER), spec], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.heard: list[dict[str, Any]] = []
        self.source = Source(*self._line())

    def say(self, what: str, *arguments: Any) -> Any:
        """What it answers."""
        pipe = _pipe(self.process.stdin)
        pipe.write(json.dumps([what, *arguments]) + "\n")
        pipe.flush()
        return self._line()

    def events(self, kind: str) -> list[dict[str, Any]]:
        self.heard += self.say("take")
        return [event for event in self.heard if event["event"] == kind]

    def offer(self, request: str, lease_s: float = 60.0) -> None:
        self.say("promise", request, lease_s)
        self.say("publish", request, 32, ["half"], [[1, 2]], "")

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        _pipe(self.process.stdin).close()
        _pipe(self.process.stdout).close()

    def _line(self) -> Any:
        return json.loads(_pipe(self.process.stdout).readline())


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


class Rig:
    """Opens what a test needs, and closes it."""

    def __init__(self) -> None:
        self._open: list[Links | Other] = []

    def engine(self, name: str = "here", **config: Any) -> Engine:
        links = Links(Endpoint(**{"listen": LOOPBACK, **config}), engine=name)
        self._open.append(links)
        return Engine(links)

    def other(self, name: str = "there", **config: Any) -> Other:
        other = Other(name, {"listen": LOOPBACK, **msgspec.to_builtins(config)})
        self._open.append(other)
        return other

    def linked(self, source: Engine, request: str, *names: str, **config: Any) -> list[Engine]:
        """Engines that have come for an offer, and have been answered."""
        found = [self.engine(name, **config) for name in names]
        for engine in found:
            engine.links.want(source.source, request)
            assert isinstance(engine.answer(request), Offer)
        return found

    def close(self) -> None:
        for opened in self._open:
            opened.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Whatever it has opened, nothing of it is left afterwards: no thread, no descriptor."""
    residue = Residue(tmp_path, ("*",))
    made = Rig()
    yield made
    made.close()
    assert residue.found(5.0) == []


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No time-out ends, and no pause: whatever happens anyway needs none of them."""
    monkeypatch.setattr(line, "PATIENCE_S", 1e6)
    monkeypatch.setattr(caller, "AGAIN_S", 1e6)


@pytest.fixture
def soon() -> Callable[[Callable[[], Any]], None]:
    return wait_for
