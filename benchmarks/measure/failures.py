"""A pytest plugin that names each failing test at once, so that a run that hangs has reported its failures."""

from __future__ import annotations

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Prints a line for a test, or its set-up, that failed."""
    if report.failed:
        kind = "FAILED" if report.when == "call" else "ERROR"
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        print(f"\n{kind} {report.nodeid} - {reason.splitlines()[0] if reason else ''}", flush=True)
