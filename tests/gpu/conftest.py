"""Reasons for failures at once: on a GPU that is lent for minutes, a run may be stopped before its summary."""

from __future__ import annotations

import pytest

FOLDER = "tests/gpu/"


class Reasons:
    """Prints why a test has failed as soon as it has."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the first lines of an error."""
        if report.failed and FOLDER in report.nodeid:
            lines = [line for line in report.longreprtext.splitlines() if line.startswith("E ")]
            reason = " / ".join(text for line in lines[:3] if (text := line[1:].strip()))
            self._terminal.write_line(f"\nFAILS {report.nodeid}: {reason}")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Print reasons."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        config.pluginmanager.register(Reasons(terminal))
