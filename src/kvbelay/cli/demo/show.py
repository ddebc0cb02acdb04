"""The demo's run: one request after another through both processes, and the record of what became of each."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import msgspec

from kvbelay.cli.demo.messages import Answered, Loaded, Prefilled, Prompt, Setup, StruckNow, Swallowed
from kvbelay.cli.demo.script import Act, Blow
from kvbelay.cli.demo.stage import ANSWER_S, END_S, Stage
from kvbelay.core.model import Outcome, Result
from kvbelay.errors import KvbelayError


NOT_ASKED = frozenset({"CircuitOpen", "QuarantineFull", "ChildUnavailable"})
"""Kinds of failures of a child that was not even tried."""


class Verdict(Enum):
    """What became of an answer."""

    IDENTICAL = "identical"
    WRONG = "wrong"
    LOST = "lost"


class Row(msgspec.Struct):
    """One request of the run."""

    id: str
    prompt: str
    struck: list[str]
    decided: str = ""
    log: tuple[str, ...] = ()
    result: Result | None = None
    watermark: int = 0
    movable: int = 0
    """Tokens that P/D moves."""
    attempts: int = 0
    nbytes: int = 0
    recomputed: int = 0
    load_s: float = 0.0
    answer_s: float = 0.0
    answer: str = ""
    verdict: Verdict = Verdict.LOST


class Show:
    """Runs the script. ``note`` hears a line whenever something happens."""

    def __init__(self, stage: Stage, decode_setup: Setup, note: Callable[[str], None]) -> None:
        self._stage = stage
        self._note = note
        self._prefill = stage.start("prefill")
        self._decode = stage.start("decode", decode_setup)
        self._restarting = False
        self.swallowed: dict[str, int] = {}
        self.pending = 0
        stage.ready(self._prefill)
        stage.ready(self._decode)

    def perform(self, row: Row, act: Act, prompt: Prompt) -> tuple[int, ...]:
        """One request from prompt to answer; returns the answer's tokens."""
        if act.disk_full:
            self._strike(row, "store full")
        prefilled = self._have_prefilled(msgspec.structs.replace(prompt, disk_full=act.disk_full))
        tickets = prefilled.outcome.tickets if prefilled.outcome is not None else ()
        if act.blow is not Blow.NOTHING:
            self._strike(row, act.blow.value)
        if act.blow is Blow.FREEZE:
            self._prefill.freeze()
        elif act.blow is Blow.KILL:
            self._prefill.kill()
        self._decode.send(msgspec.structs.replace(prompt, tickets=tickets))
        if act.blow is Blow.KILL:
            self._prefill, self._restarting = self._stage.start("prefill"), True
        answered = self._have_decoded(row)
        self._stage.measure()
        return answered.tokens

    def close(self) -> None:
        """Hear what the decode process has to say at the end."""
        self._decode.finish()
        message = self._decode.hear(END_S)
        while not isinstance(message, Swallowed):
            message = self._decode.hear(END_S)
        self.swallowed, self.pending = message.counts, message.pending

    def _have_prefilled(self, prompt: Prompt) -> Prefilled:
        if self._restarting:
            self._stage.ready(self._prefill)
            self._restarting = False
        self._prefill.send(prompt)
        message = self._prefill.hear(ANSWER_S)
        if not isinstance(message, Prefilled):
            msg = f"the prefill process answered with {type(message).__name__}"
            raise KvbelayError(msg)
        return message

    def _have_decoded(self, row: Row) -> Answered:
        while True:
            message = self._decode.hear(ANSWER_S)
            if isinstance(message, StruckNow):
                self._strike(row, f"{message.child}: {message.fault.value}")
            elif isinstance(message, Loaded):
                _record(row, message)
                self._prefill.thaw()
            elif isinstance(message, Answered):
                row.recomputed, row.answer_s = message.recomputed, message.took_s
                return message

    def _strike(self, row: Row, what: str) -> None:
        row.struck.append(what)
        self._note(f"{row.id}  [red]strikes[/red]  {what}")


def _record(row: Row, loaded: Loaded) -> None:
    row.log = loaded.log
    row.nbytes = loaded.nbytes
    outcome = loaded.outcome
    if outcome is None:
        row.decided = "nothing to move"
        return
    row.result, row.watermark = outcome.result, outcome.watermark
    row.attempts, row.load_s = outcome.attempts, outcome.elapsed_s
    row.decided = decided(outcome, row.movable)


def decided(outcome: Outcome, movable: int) -> str:
    """What the layer decided, in words."""
    first = outcome.failures[0].child if outcome.failures else ""
    held = ", its blocks held back" if outcome.held else ""
    if outcome.result is Result.LOADED:
        if not outcome.failures:
            return f"loaded through {outcome.child}"
        if outcome.failures[0].kind in NOT_ASKED:
            return f"{first} left alone, loaded through {outcome.child}"
        if outcome.child == first:
            return f"retried, loaded through {outcome.child}"
        return f"failed over from {first} to {outcome.child}"
    if outcome.result is Result.MISSED:
        return "found nowhere, computed here"
    if outcome.result is Result.RECOMPUTE:
        return f"recomputed from token {outcome.watermark} of {movable}{held}"
    return f"{outcome.result.value}{held}"
