"""The demo's run: one request after another through the processes, and the record of what became of each."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

import msgspec

from kvbelay.cli.demo.messages import Answered, Ended, FromWorker, Loaded, Prefilled, Prompt, Setup, StruckNow
from kvbelay.cli.demo.script import WORDS, Act, Blow
from kvbelay.cli.demo.stage import Stage, Worker
from kvbelay.core.model import Outcome, Result
from kvbelay.errors import ProtocolViolation

ANSWER_S = 600.0
"""How long a process may say nothing: a prompt that fills the cache takes minutes on a slow machine."""

NOT_ASKED = frozenset({"CircuitOpen", "QuarantineFull", "ChildUnavailable"})
"""Kinds of failures of a child that was not even tried."""

M = TypeVar("M", bound=FromWorker)


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
    """What was decided, step by step."""
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
    """Runs the script. ``note`` hears a request, "strikes" or "mended", and what, whenever something happens."""

    def __init__(self, stage: Stage, decode_setup: Setup, note: Callable[[str, str, str], None]) -> None:
        self._stage = stage
        self._note = note
        self._prefill = stage.start("prefill")
        self._decode = stage.start("decode", decode_setup)
        self._alone = stage.start("alone")
        self._restarting = False
        self._rows: dict[str, Row] = {}
        for worker in (self._prefill, self._decode, self._alone):
            stage.ready(worker)

    def perform(self, row: Row, act: Act, prompt: Prompt) -> tuple[int, ...]:
        """One request from prompt to answer, compared with the one given alone; returns the answer's tokens."""
        self._rows[row.id] = row
        self._alone.send(prompt)
        if act.disk_full:
            self._strike(row, "store full")
        prefilled = self._have_prefilled(row, msgspec.structs.replace(prompt, disk_full=act.disk_full))
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
        _record(row, self._have(self._decode, Loaded))
        if act.blow is Blow.FREEZE:
            self._prefill.thaw()
            self._note(row.id, "mended", "prefill goes on")
        answered = self._have(self._decode, Answered)
        row.recomputed, row.answer_s = answered.recomputed, answered.took_s
        same = answered.tokens == self._have(self._alone, Answered).tokens
        row.verdict = Verdict.IDENTICAL if same else Verdict.WRONG
        self._stage.measure()
        return answered.tokens

    def close(self) -> Ended:
        """What the decode process has to say at the end."""
        self._decode.finish()
        return self._have(self._decode, Ended)

    def _have_prefilled(self, row: Row, prompt: Prompt) -> Prefilled:
        if self._restarting:
            self._stage.ready(self._prefill)
            self._restarting = False
            self._note(row.id, "mended", "prefill runs again")
        self._prefill.send(prompt)
        return self._have(self._prefill, Prefilled)

    def _have(self, worker: Worker, kind: type[M]) -> M:
        while isinstance(message := worker.hear(ANSWER_S), StruckNow):
            self._strike(self._rows[message.id], f"{message.child}: {WORDS[message.fault]}")
        if not isinstance(message, kind):
            msg = f"the {worker.role} process says {type(message).__name__}, not {kind.__name__}"
            raise ProtocolViolation(msg)
        return message

    def _strike(self, row: Row, what: str) -> None:
        row.struck.append(what)
        self._note(row.id, "strikes", what)


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
    held = ", its blocks held back" if outcome.held else ""
    if outcome.result is Result.LOADED:
        return f"{_detour(outcome)}loaded through {outcome.child}"
    if outcome.result is Result.MISSED:
        return "found nowhere, computed here"
    if outcome.result is Result.RECOMPUTE:
        return f"recomputed from token {outcome.watermark} of {movable}{held}"
    return f"{outcome.result.value}{held}"


def _detour(outcome: Outcome) -> str:
    if not outcome.failures:
        return ""
    first = outcome.failures[0]
    if first.kind in NOT_ASKED:
        return f"{first.child} left alone, "
    return "retried, " if first.child == outcome.child else f"{first.child} failed, "
