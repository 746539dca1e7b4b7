"""What has befallen the workers of a run, where people look first."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.observability.report.guard_section import MAX_EVENTS
from leaderless.observability.report.markup import Html, element, format_number
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.untrusted import as_number, as_step, as_text

_WHAT = {"restart": "started again", "stall": "nothing moved", "resumed": "back at work"}


def failure_section(run: RunFiles) -> Html:
    """A table of failures, stalls and restarts; nothing if there were none.

    Args:
        run: What was read of the run.
    """
    events = [event for event in run.events if as_text(event.get("event")) in _WHAT]
    if not events:
        return Html("")
    lost = sum(int(as_number(event.get("lost_steps")) or 0) for event in events)
    count = sum(event.get("event") == "restart" for event in events)
    summary = f"Workers were started again {count} time{'s' * (count != 1)}; {lost} steps had to be done again."
    head = element(
        "tr", *(element("th", title) for title in ("time (UTC)", "what", "rank", "why", "from step", "took"))
    )
    rows = [element("tr", *(element("td", text) for text in _cells(event))) for event in events[-MAX_EVENTS:]]
    return element(
        "section",
        element("h2", "Failures and restarts", id="failures-title"),
        element("p", summary, class_="seen"),
        element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll"),
        id="failures",
        aria_labelledby="failures-title",
    )


def _cells(event: Mapping[str, object]) -> tuple[str, ...]:
    rank, step, seconds = as_step(event.get("rank")), as_step(event.get("from_step")), as_number(event.get("seconds"))
    return (
        as_text(event.get("time"))[:19].replace("T", " "),
        _WHAT[as_text(event.get("event"))],
        "" if rank is None else str(rank),
        as_text(event.get("cause")),
        "" if step is None else str(step),
        "" if seconds is None else f"{format_number(seconds)} s",
    )
