"""One HTML file about a run: curves, warnings, samples, plan and recipe. It loads nothing and needs no torch."""

from leaderless.observability.report.page import render_report, write_report

__all__ = ["render_report", "write_report"]
