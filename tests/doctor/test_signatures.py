"""Every signature has a log in the format of the program that writes it, and is found there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbelay.doctor import finding
from kvbelay.doctor.finding import Finding, Level
from kvbelay.doctor.scan import UNKNOWN, Scanner
from kvbelay.doctor.signatures import TRACEBACK, Rank, Signature, Signatures, _cover, load, rare_pattern
from kvbelay.errors import ConfigError

HERE = Path(__file__).parent
LOGS = HERE / "logs"
DOCS = HERE.parents[1]
ALL = [*load().all, UNKNOWN]
Read = Callable[..., list[Finding]]


def ids_of(findings: list[Finding]) -> list[str]:
    return [found.check.removeprefix("log.") for found in findings]


def test_every_signature_has_a_log_and_every_log_a_signature() -> None:
    """There are as many logs as signatures, by name."""
    assert {path.stem for path in LOGS.glob("*.log")} == {one.id for one in ALL}


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_signature_is_told_of_its_log(one: Signature, read: Read) -> None:
    """What a log is about comes first, and its log has no other first cause."""
    findings = read(one.id)
    ids = ids_of(findings)
    assert one.id in ids
    if one.level is Rank.CAUSE:
        assert findings[0].level is Level.CAUSE
        assert ids[0] == one.id
    else:
        assert Level.CAUSE not in {found.level for found in findings}
        assert ids[0] == one.id


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_each_literal_stands_in_the_log(one: Signature, signatures: Signatures) -> None:
    """No literal is there that the log does not show in a line with this signature."""
    text = (LOGS / f"{one.id}.log").read_bytes()
    for literal in one.literals:
        lines = [line for line in text.splitlines() if literal.encode() in line]
        assert any((signatures.of(line) or (UNKNOWN, ""))[0].id == one.id for line in lines), literal


@pytest.mark.parametrize("one", ALL, ids=lambda one: one.id)
def test_each_finding_says_where_to_read_on(one: Signature) -> None:
    """Cause, remedy and page are filled, and the page has that heading."""
    assert one.cause
    assert one.remedy
    path, _, anchor = one.page.partition("#")
    headings = re.findall(r"^#+ (.+)$", (DOCS / path).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_page_names_tests_that_exist() -> None:
    """Each test file that docs/doctor.md names is there."""
    text = (DOCS / "docs" / "doctor.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]*test_\w+\.py", text))
    assert len(named) > 15
    for name in named:
        places = [DOCS / name] if "/" in name else [HERE / name, DOCS / "tests" / "vllm" / name]
        assert any(path.is_file() for path in places), name


def test_logs_are_clean() -> None:
    """No path or host of a machine stands in a log of the tests."""
    for path in HERE.rglob("*.log"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"/(?:home|root|tmp|work|check|Users)/", text), path


def test_prefilter_finds_every_literal(signatures: Signatures) -> None:
    """A literal, wherever it stands in a line, is in the prefilter's net."""
    for one in signatures.all:
        for literal in one.literals:
            assert signatures.prefilter.search(b"x" * 7 + literal.encode() + b"y"), literal


def test_literals_are_searched_from_rare_bytes(signatures: Signatures) -> None:
    """A new literal does not make reading slow: of what healthy logs hold, few bytes can begin a match. One that fails
    here wants a literal with an upper-case letter, a quotation mark or a q in its front part.
    """
    healthy = b"".join(path.read_bytes() for path in (HERE / "healthy").iterdir())
    literals = {TRACEBACK, *(literal.encode() for one in signatures.all for literal in one.literals)}
    firsts = _cover({one for one in literals if not any(other != one and other in one for other in literals)})
    assert sum(healthy.count(byte) for byte in firsts) < 0.07 * len(healthy), sorted(map(chr, firsts))


def test_prefilter_with_parts_of_one_another() -> None:
    """A literal that begins another one, or is a part of it, is found with it."""
    pattern = rare_pattern([b"NIXL transfer failure: ", b"NIXL transfer failure: handshake", b"transfer failure"])
    assert pattern.search(b"NIXL transfer failure: x")
    assert pattern.search(b"NIXL transfer failure: handshake")
    assert pattern.search(b"a transfer failure")
    assert not pattern.search(b"NIXL transfer")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("signature = 3", "array"),
        ("[[signature]]\nid = 'x'\n", "missing"),
        ("not toml", "Expected"),
        ("{entry}more = 1\n", "more"),
        ("{entry}{entry}", "two signatures"),
        ("{short}", "fewer than 8"),
        ("{entry}regex = '('\n", "cannot be compiled"),
    ],
)
def test_broken_file_is_refused_by_entry(text: str, says: str, tmp_path: Path) -> None:
    """A mistake in a file of signatures is told, with the file."""
    fields = "program = 'p'\nlevel = 'cause'\nwhat = 'w'\ncause = 'c'\nremedy = 'r'\npage = 'p'\n"
    entry = f"[[signature]]\nid = 'x'\nliterals = ['long enough']\n{fields}"
    path = tmp_path / "own.toml"
    path.write_text(text.replace("{entry}", entry).replace("{short}", entry.replace("long enough", "short")))
    with pytest.raises(ConfigError, match=says) as raised:
        load(path)
    assert str(path) in str(raised.value)


def test_exit_codes() -> None:
    """Found is 1, only unchecked is 2, nothing or notes are 0."""
    note = Finding("x", Level.NOTE, "seen")
    dark = finding.unchecked("x", "dark", "no light")
    assert finding.exit_code([]) == 0
    assert finding.exit_code([note]) == 0
    assert finding.exit_code([note, dark]) == 2
    assert finding.exit_code([dark, Finding("x", Level.WARNING, "soon")]) == 1


def test_scanner_keeps_a_line_of_each_kind_once(signatures: Signatures) -> None:
    """The first signature of the file that matches a line is the only one that it counts for."""
    line = b"NIXL transfer failure: notification_failed NIXL_ERR_REMOTE_DISCONNECT"
    scanner = Scanner(signatures, "x")
    scanner._take(line + b"\n", last=True)
    assert [run.signature.id for run in scanner.found.runs] == ["nixl-peer-lost"]
