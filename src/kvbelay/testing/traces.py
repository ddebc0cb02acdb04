"""Golden traces: event sequences from the field as text, replayed against gates and a ledger in simulated time.

A trace file begins with a header of ``key: text`` lines (an indented line continues the text), followed by sections
that start with ``== title``. A section is a list of steps; after each stands all that it may cause, so that silence
is checked too. ``#`` starts a comment.

::

    begin load R 0..512 via X Y [beside Z] [within 30]   the host begins; X, then Y; Z acts unasked
    begin save R 0..512 via X Y                          X and Y at once
    say X load R landed [upto 256] [leased] [because PeerLost] [of 2] [on 0]
                                                         also missed, failed, broken, drained; of attempt 2, on rank 0
    cancel load R
    wait 5
    add X [numbered] [unavailable because PeerLost]
    drain X
    lose X
    leftovers 0                                          at the end: all is told, released and forgotten
    leftovers 1                                          the ledger still knows one request
    ranks 2                                              first: this section is for two ranks only

    > start X load R #1 0..512                           an action, with the attempt's epoch; also watch, abort, hold
    > tell load R recompute 256 held: PeerLost           result, watermark, whether held, the failures' kinds
    > tell load R loaded 512 by X
    > release load R
    > at 1.5: abort X load R #1                          the time, where a step lets time pass
    ~ X duplicate [x2]                                   swallowed once on each rank that spoke
    ~ ledger X late                                      swallowed by the ledger
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from importlib import resources

import msgspec

from kvbelay import errors
from kvbelay.core.boundary import Where, fail
from kvbelay.core.model import Action, Do, Failure, Kind, Side, Swallow
from kvbelay.core.policy import Policy
from kvbelay.testing.truthful import Truthful

SIDE = r"(?P<side>load|save) (?P<request>\S+)"
STEPS = {
    "begin": re.compile(
        rf"begin {SIDE} (?P<start>\d+)\.\.(?P<stop>\d+)(?: via (?P<plan>[\w ]+?))?"
        r"(?: beside (?P<beside>[\w ]+?))?(?: within (?P<within>[\d.]+))?"
    ),
    "say": re.compile(
        rf"say (?P<child>\w+) {SIDE} (?P<kind>landed|missed|failed|broken|drained)(?: upto (?P<stop>\d+))?"
        r"(?P<leased> leased)?(?: because (?P<why>\w+))?(?: of (?P<epoch>\d+))?(?: on (?P<ranks>[\d ]+))?"
    ),
    "cancel": re.compile(rf"cancel {SIDE}"),
    "wait": re.compile(r"wait (?P<seconds>[\d.]+)"),
    "add": re.compile(r"add (?P<child>\w+)(?P<numbered> numbered)?(?: unavailable because (?P<why>\w+))?"),
    "drain": re.compile(r"drain (?P<child>\w+)"),
    "lose": re.compile(r"lose (?P<child>\w+)"),
    "leftovers": re.compile(r"leftovers (?P<count>\d+)"),
}


class BadTrace(ValueError):
    """A trace file that cannot be read; the text names file and line."""


class Mismatch(AssertionError):
    """A step did not cause exactly what the trace says."""


class Step(msgspec.Struct, frozen=True):
    """One step and all that it may cause."""

    line: int
    text: str
    expected: tuple[str, ...]


class Section(msgspec.Struct, frozen=True):
    """One order of events."""

    title: str
    ranks: tuple[int, ...]
    steps: tuple[Step, ...]


class Trace(msgspec.Struct, frozen=True):
    """One scenario."""

    name: str
    header: dict[str, str]
    sections: tuple[Section, ...]

    @property
    def policy(self) -> Policy:
        """The header's policy: ``attempts=4 circuit.failures=2``. Raises `BadTrace`."""
        fields: dict[str, object] = {}
        for item in self.header.get("policy", "").split():
            path, _, value = item.partition("=")
            *groups, name = path.split(".")
            place = fields
            for group in groups:
                inner = place.setdefault(group, {})
                place = inner if isinstance(inner, dict) else {}  # what is set twice is refused below
            place[name] = value
        try:
            return msgspec.convert(fields, Policy, strict=False)
        except msgspec.ValidationError as exc:
            msg = f"{self.name}: the policy cannot be used: {exc}"
            raise BadTrace(msg) from exc


def names() -> list[str]:
    """The traces that are shipped."""
    folder = resources.files("kvbelay.testing") / "traces"
    return sorted(file.name.removesuffix(".trace") for file in folder.iterdir() if file.name.endswith(".trace"))


def load(name: str) -> Trace:
    """One of the traces that are shipped."""
    return parse((resources.files("kvbelay.testing") / "traces" / f"{name}.trace").read_text(encoding="utf-8"), name)


def parse(text: str, name: str) -> Trace:
    """Read a trace. Raises `BadTrace`."""
    header: dict[str, str] = {}
    sections: list[tuple[str, list[tuple[int, str, list[str]]]]] = []
    key = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = re.sub(r"(^|\s)#(\s.*|$)", "", raw).rstrip()
        if not line:
            continue
        if line.startswith("== "):
            sections.append((line[3:], []))
        elif not sections and line.startswith(" ") and key:
            header[key] += " " + line.strip()
        elif not sections:
            key, colon, value = line.partition(":")
            if not colon:
                msg = f"{name}, line {number}: a header line is 'key: text'"
                raise BadTrace(msg)
            header[key] = value.strip()
        elif line[0] in ">~":
            if not sections[-1][1]:
                msg = f"{name}, line {number}: nothing can follow before a step"
                raise BadTrace(msg)
            sections[-1][1][-1][2].append(" ".join(line.split()))
        else:
            sections[-1][1].append((number, line, []))
    return Trace(name, header, tuple(_section(name, title, steps) for title, steps in sections))


def _section(name: str, title: str, steps: list[tuple[int, str, list[str]]]) -> Section:
    ranks: tuple[int, ...] = (1, 2)
    if steps and (match := re.fullmatch(r"ranks (\d{1,3}(?: \d{1,3})*)", steps[0][1])):
        ranks = tuple(int(number) for number in match[1].split())
        steps = steps[1:]
    for number, text, _ in steps:
        if not any(pattern.fullmatch(text) for pattern in STEPS.values()):
            msg = f"{name}, line {number}: cannot read {text!r}"
            raise BadTrace(msg)
    return Section(title, ranks, tuple(Step(number, text, tuple(expected)) for number, text, expected in steps))


def play(trace: Trace, section: Section, ranks: int) -> Truthful:
    """Replay one section. Raises `Mismatch`, or `InvariantViolation`, as soon as something is not as it must be."""
    player = _Player(trace, ranks)
    for step in section.steps:
        caused = player.take(step)
        if caused != list(step.expected):
            lines = "\n  ".join(caused) or "nothing"
            wanted = "\n  ".join(step.expected) or "nothing"
            msg = f"{trace.name}, line {step.line}, {ranks} ranks: {step.text}\ncaused\n  {lines}\nand not\n  {wanted}"
            raise Mismatch(msg)
    return player.world


class _Player:
    """Carries out steps and puts into words what they caused."""

    def __init__(self, trace: Trace, ranks: int) -> None:
        self.world = Truthful(trace.policy, ranks=ranks)
        self.simulation = self.world.simulation
        for key, epochs in (("children", False), ("numbered", True)):
            for child in trace.header.get(key, "").split():
                self.world.add(child, epochs=epochs)

    def take(self, step: Step) -> list[str]:
        """Do it; what it caused."""
        verb, given = next(
            (verb, match.groupdict()) for verb, pattern in STEPS.items() if (match := pattern.fullmatch(step.text))
        )
        simulation = self.simulation
        logged = len(simulation.log)
        before = self._counters()
        do: Callable[[dict[str, str]], None] = getattr(self, f"_{verb}")
        do(given)
        actions = [
            f"> at {round(at, 4):g}: {in_words(action)}" if verb == "wait" else f"> {in_words(action)}"
            for at, action in simulation.log[logged:]
        ]
        ledger, *gates = [after - was for after, was in zip(self._counters(), before, strict=True)]
        return actions + self._swallowed(gates, given.get("ranks")) + _counted(ledger, "ledger ")

    def _counters(self) -> list[Counter[tuple[str, Swallow]]]:
        """What was swallowed so far, by the ledger and by each gate."""
        simulation = self.simulation
        return [Counter(simulation.ledger.swallowed), *(Counter(gate.swallowed) for gate in simulation.gates)]

    def _swallowed(self, gates: list[Counter[tuple[str, Swallow]]], spoke: str | None) -> list[str]:
        ranks = [int(rank) for rank in spoke.split()] if spoke else range(len(gates))
        first, *others = [gates[rank] for rank in ranks]
        if any(other != first for other in others):
            return [f"~ unequal: {gates}"]
        return _counted(first, "")

    def _begin(self, given: dict[str, str]) -> None:
        self.simulation.begin(
            Side(given["side"]),
            given["request"],
            int(given["stop"]),
            (given["plan"] or "").split(),
            start=int(given["start"]),
            bystanders=(given["beside"] or "").split(),
            within_s=float(given["within"] or 30),
        )

    def _say(self, given: dict[str, str]) -> None:
        child, side, request = given["child"], Side(given["side"]), given["request"]
        kind, stop = Kind(given["kind"]), int(given["stop"] or 0)
        ranks = [int(rank) for rank in given["ranks"].split()] if given["ranks"] else None
        epoch = int(given["epoch"]) if given["epoch"] else None
        meant = self.world.latest(child, side, request)
        if epoch is not None:
            meant = next((one for one in self.world.started if one.epoch == epoch and one.child == child), None)
        failure = _failure(given["why"], child, side, request, meant.epoch if meant else 0)
        leased = given["leased"] is not None
        if meant is not None:
            self.world.say(meant, kind, ranks=ranks, stop=stop, leased=leased, failure=failure)
        else:
            self.simulation.say(
                child, side, request, kind, ranks=ranks, epoch=epoch, stop=stop, leased=leased, failure=failure
            )

    def _cancel(self, given: dict[str, str]) -> None:
        self.simulation.cancel(Side(given["side"]), given["request"])

    def _wait(self, given: dict[str, str]) -> None:
        self.simulation.wait(float(given["seconds"]))

    def _add(self, given: dict[str, str]) -> None:
        cause = _failure(given["why"], given["child"], Side.LOAD, "", 0)
        self.world.add(given["child"], epochs=given["numbered"] is not None, unavailable=cause)

    def _drain(self, given: dict[str, str]) -> None:
        self.simulation.ledger.children.drain(given["child"])

    def _lose(self, given: dict[str, str]) -> None:
        self.simulation.lose(given["child"])

    def _leftovers(self, given: dict[str, str]) -> None:
        if int(given["count"]) == 0:
            self.world.monitor.over(self.simulation.now, leftovers=self.simulation.leftovers())
        elif len(self.simulation.ledger) != int(given["count"]):
            msg = f"the ledger knows {len(self.simulation.ledger)} requests"
            raise Mismatch(msg)


def in_words(action: Action) -> str:
    """An action as it stands in a trace."""
    whose = f"{action.side.value} {action.request}"
    if action.do in {Do.START, Do.WATCH}:
        return f"{action.do.value} {action.child} {whose} #{action.epoch} {action.start}..{action.stop}"
    if action.do in {Do.ABORT, Do.HOLD}:
        return f"{action.do.value} {action.child} {whose} #{action.epoch}"
    outcome = action.outcome
    if outcome is None:
        return f"{action.do.value} {whose}"
    held = " held" if outcome.held else ""
    by = f" by {outcome.child}" if outcome.child else ""
    causes = ": " + ", ".join(failure.kind for failure in outcome.failures) if outcome.failures else ""
    return f"tell {whose} {outcome.result.value} {outcome.watermark}{held}{by}{causes}"


def _counted(swallowed: Counter[tuple[str, Swallow]], where: str) -> list[str]:
    return sorted(
        f"~ {where}{child or '-'} {reason.value}" + (f" x{count}" if count > 1 else "")
        for (child, reason), count in swallowed.items()
    )


def _failure(why: str | None, child: str, side: Side, request: str, epoch: int) -> Failure | None:
    if why is None:
        return None
    leaf = getattr(errors, why, None)
    if not (isinstance(leaf, type) and issubclass(leaf, errors.KvbelayError)):
        msg = f"{why} is no leaf of kvbelay.errors"
        raise BadTrace(msg)
    operation = "get" if side is Side.LOAD else "put"
    return fail(leaf("as the trace says"), Where(child, operation, request, epoch))
