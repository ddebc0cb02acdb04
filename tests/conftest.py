"""For all tests: where continuous integration runs, a test that is skipped has failed."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

Reports = Generator[None, pytest.TestReport, pytest.TestReport]
Collected = Generator[None, pytest.CollectReport, pytest.CollectReport]


def _refuse(report: pytest.TestReport | pytest.CollectReport) -> None:
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason}: with CI=true nothing may be skipped"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Reports:  # noqa: ARG001 # the hook's names
    """A skipped test."""
    report = yield
    _refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Collected:  # noqa: ARG001 # the hook's name
    """A module that is skipped as a whole."""
    report = yield
    _refuse(report)
    return report
