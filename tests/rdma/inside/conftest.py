"""Tests of verbs, for the guest only: they take interfaces down, which no host would thank them for.

tests/rdma/test_guest.py runs them there. What becomes of each is written down as it happens, so that a
guest that had to be killed has still told what was done.
"""

import json
import os
from pathlib import Path

import pytest

IN_GUEST = "MOONSERVE_GUEST" in os.environ
REPORTS = Path("/run/job/reports.jsonl")

collect_ignore_glob = [] if IN_GUEST else ["test_*.py"]


def pytest_collection_finish(session: pytest.Session) -> None:
    for item in session.items:
        _write(item.nodeid, "started", "", 0.0)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _write(report.nodeid, "failed", report.longreprtext, 0.0)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" or not report.passed:
        _write(report.nodeid, report.outcome, report.longreprtext, report.duration)


def _write(nodeid: str, outcome: str, text: str, duration_s: float) -> None:
    if IN_GUEST:
        with REPORTS.open("a") as reports:
            line = {"nodeid": nodeid, "outcome": outcome, "text": text, "duration_s": duration_s}
            reports.write(json.dumps(line) + "\n")
