"""The pytest plugin: the verdict by invariant in the terminal summary, and a mark for the kit's checks.

pytest imports this module at every start. It imports nothing of the kit, and does nothing where no test module has.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

NOTE = "kvbelay"
"""The attribute of a report that says what the verdict needs: plain values, which pass between processes."""
KIT = "kvbelay.testing.conformance.kit"


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark, and what gathers the notes."""
    config.addinivalue_line("markers", "kvbelay(*invariants): a check of the conformance kit, and what it proves")
    config.pluginmanager.register(Gather(), "kvbelay-gather")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the checks; if there are any, have notes taken of them."""
    if KIT not in sys.modules:
        return
    from kvbelay.testing.note import is_check, proves  # noqa: PLC0415  # the kit has been imported already

    checks = [item for item in items if is_check(item)]
    for item in checks:
        item.add_marker(pytest.mark.kvbelay(*proves(item)))
    if checks and not config.pluginmanager.has_plugin("kvbelay-watch"):
        config.pluginmanager.register(Watch(), "kvbelay-watch")


class Watch:
    """Puts a note on the report of each check; where tests are run by several processes, in each of them."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Last of all wrappers, since it was registered last."""
        from kvbelay.testing.note import note  # noqa: PLC0415  # as above

        report = yield
        if taken := note(item, call, report):
            report.__dict__[NOTE] = taken
        return report


class Gather:
    """The notes, and the summary."""

    def __init__(self) -> None:
        self._notes: dict[str, dict[str, Any]] = {}
        """By the test's id."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A report, from wherever the test ran."""
        if (taken := report.__dict__.get(NOTE)) is not None:
            self._notes[report.nodeid] = taken

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The verdict on each case."""
        if not self._notes:
            return
        from kvbelay.testing.note import summary  # noqa: PLC0415  # only where there is something to say

        title, text = summary(self._notes.values())
        terminalreporter.section(title)
        for line in text:
            terminalreporter.write_line(line)
