"""What guards have seen and done, where people look first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from leaderless.observability.report.markup import Html, element, format_number
from leaderless.observability.report.run_files import RunFiles
from leaderless.observability.report.untrusted import as_number, as_step, as_text

MAX_EVENTS = 40
"""Events that are listed, the last ones."""
_NOUNS = {"warn": "warning", "skip": "skipped update", "roll_back": "roll-back", "stop": "stop"}


def guard_section(run: RunFiles) -> Html:
    """A table of the events of a run; nothing if there were none.

    Args:
        run: What was read of the run.
    """
    events = [event for event in run.events if event.get("event") == "guard"]
    if not events:
        return Html("")
    actions = Counter(as_text(event.get("action")) for event in events)
    counts = ", ".join(
        f"{actions[action]} {noun}" + "s" * (actions[action] > 1) for action, noun in _NOUNS.items() if actions[action]
    )
    left_out = f" The last {MAX_EVENTS} are listed; all are in events.jsonl." if len(events) > MAX_EVENTS else ""
    head = element("tr", *(element("th", title) for title in ("step", "guard", "seen", "limit", "node", "action")))
    rows = [element("tr", *(element("td", text) for text in _cells(event))) for event in events[-MAX_EVENTS:]]
    return element(
        "section",
        element("h2", "Numbers gone bad", id="guards-title"),
        element("p", f"Guards have spoken: {counts}.{left_out}", class_="seen"),
        element("div", element("table", element("thead", head), element("tbody", *rows)), class_="scroll"),
        id="guards",
        aria_labelledby="guards-title",
    )


def _cells(event: Mapping[str, object]) -> tuple[str, ...]:
    step, value, limit = as_step(event.get("step")), as_number(event.get("value")), as_number(event.get("limit"))
    return (
        "" if step is None else str(step),
        as_text(event.get("guard")),
        "no finite number" if value is None else format_number(value),
        "" if limit is None else format_number(limit),
        as_text(event.get("node")),
        as_text(event.get("action")),
    )
