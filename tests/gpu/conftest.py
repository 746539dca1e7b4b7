"""Outcomes at once, in a file: on a GPU that is lent for minutes, a run may be stopped before its summary."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

VARIABLE = "GPU_TEST_OUTCOMES"
"""Variable that names the file, if outcomes are to be written."""
NAMES_VARIABLE = "GPU_TEST_NAMES"
"""Variable with names of tests in JSON, if only some are to run; a name that is not found changes nothing."""
SLOWEST = ("test_compiled", "whole_run")
"""Parts of the names of tests in which a compiler works; they begin first, since they take the longest."""
FOLDER = Path(__file__).parent


class Outcomes:
    """Writes a line of JSON when a test begins, and another one when it is known how it has ended."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def _write(self, test: str, outcome: str, text: str = "") -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "text": text}) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a test begins."""
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note how a test has ended, or that its setup or its end has failed."""
        if report.failed:
            self._write(report.nodeid, "failed" if report.when == "call" else "error", report.longreprtext)
        elif report.skipped or report.when == "call":
            self._write(report.nodeid, report.outcome)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note that a file cannot be imported."""
        if report.failed:
            self._write(report.nodeid, "error", report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes, in the process that knows all of them."""
    path = os.environ.get(VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Outcomes(Path(path)))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests that are named, and sort them so that the slowest ones begin first."""
    names = json.loads(os.environ.get(NAMES_VARIABLE) or "[]")
    beginnings = tuple(f"{name}{end}" for name in names for end in ("[", "::"))
    left_out = [item for item in items if names and item.nodeid not in names and not item.nodeid.startswith(beginnings)]
    config.hook.pytest_deselected(items=left_out)
    kept = [item for item in items if item not in left_out]
    items[:] = sorted(
        kept, key=lambda item: item.path.parent != FOLDER or not any(part in item.nodeid for part in SLOWEST)
    )
