"""A process that measures: started from one of our modules, asked by lines of JSON, gone when its input ends."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from kvbelay.errors import PeerLost

END_S = 5.0

T = TypeVar("T")


class Child(contextlib.AbstractContextManager["Child"]):
    """Ends with the context, whatever it is doing.

    Parameters
    ----------
    module
        Under ``kvbelay.cli.bench``; it calls `serve`.
    setup
        The first line that it reads.
    """

    def __init__(self, module: str, setup: msgspec.Struct) -> None:
        self._name = module
        self._process = subprocess.Popen(  # noqa: S603  # our own module
            [sys.executable, "-m", f"kvbelay.cli.bench.{module}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is ours to hear
        )
        self.pid = self._process.pid
        self._say(setup)

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).close()
        try:
            self._process.wait(END_S if kind is None else 0.1)
        except subprocess.TimeoutExpired:
            self.kill()
        self._pipe(self._process.stdout).close()

    def ask(self, question: object, answer: type[T]) -> T:
        """Its answer. Raises `PeerLost` if it has ended."""
        with contextlib.suppress(BrokenPipeError):
            self._say(question)
        line = self._pipe(self._process.stdout).readline()
        if not line:
            msg = f"the process {self._name!r} ended, with exit code {self._process.wait()}"
            raise PeerLost(msg, remedy="its own words are above; is there enough memory?")
        return msgspec.json.decode(line, type=answer)

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._process.kill()
        self._process.wait()

    def _say(self, message: object) -> None:
        stdin = self._pipe(self._process.stdin)
        stdin.write(msgspec.json.encode(message) + b"\n")
        stdin.flush()

    @staticmethod
    def _pipe(pipe: Any) -> Any:
        if pipe is None:
            raise ValueError("the process was started without pipes")
        return pipe


def serve(setup: type[T], question: Any, start: Callable[[T], contextlib.AbstractContextManager[Any]]) -> None:
    """In the child: read the setup, then answer each question, until the input ends.

    ``start`` returns a context whose value answers: question in, something that becomes JSON out.
    """
    first = sys.stdin.buffer.readline()
    if not first:  # the parent is gone already
        return
    with contextlib.suppress(BrokenPipeError), start(msgspec.json.decode(first, type=setup)) as answer:
        for line in sys.stdin.buffer:
            sys.stdout.buffer.write(msgspec.json.encode(answer(msgspec.json.decode(line, type=question))) + b"\n")
            sys.stdout.buffer.flush()
