"""Messages of guards, restarts and other layouts are at the top of a report."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.observability.report.runs import Page

from leaderless.observability.events import GuardEvent
from leaderless.observability.report.page import render_report
from leaderless.observability.report.run_files import read_run
from leaderless.observability.report.view import MAX_EVENTS
from leaderless.observability.run_directory import RunDirectory


def event(step: int, action: str = "skip", value: float = 5.0) -> GuardEvent:
    return GuardEvent(step, "grad_norm_limit", value, 2.0, action, "policy", "policy", 0)  # type: ignore[arg-type]


def write(run: Path, *events: GuardEvent) -> None:
    for one in events:
        RunDirectory(run).append_event("guard", one.to_json())


def test_events_are_listed_before_the_checks(run):
    write(run, event(3), event(4, value=float("nan")), event(9, "roll_back"))
    text = Page(render_report(run)).text
    assert "Guards have acted: 2 skipped updates, 1 roll-back." in text
    assert text.index("Guards have acted") < text.index("Worth a look")
    assert "not finite" in text


def test_a_run_without_events_has_no_such_section(run):
    (run / "events.jsonl").write_text("")
    assert "Numbers gone bad" not in Page(render_report(run)).text
    assert read_run(run).notes == ()


def test_of_many_events_the_last_are_listed(run):
    write(run, *(event(1000 + step) for step in range(MAX_EVENTS + 1)))
    page = render_report(run)
    assert f"{MAX_EVENTS + 1} skipped updates. The last {MAX_EVENTS} are listed" in Page(page).text
    assert page.count("<td>grad_norm_limit</td>") == MAX_EVENTS
    assert f'<th scope="row">{1000 + MAX_EVENTS}</th>' in page
    assert '<th scope="row">1000</th>' not in page


def test_events_that_are_broken_are_passed_over_and_nothing_in_them_is_executed(run):
    bad = {"event": "guard", "step": [], "guard": "<script>alert(1)</script>", "value": "x", "action": {}}
    (run / "events.jsonl").write_text("{broken\n" + json.dumps(bad) + "\n")
    page = render_report(run)
    assert "<script>alert(1)" not in page
    assert "events.jsonl: skipped lines that are not JSON objects: 1." in read_run(run).notes


def test_restarts_and_stalls_are_listed_first(run):
    directory = RunDirectory(run)
    directory.append_event("stall", {"rank": 1, "cause": "rank 1 has not <moved>", "step": 4})
    directory.append_event("restart", {"rank": 1, "cause": "it hung", "from_step": 3, "lost_steps": 2})
    directory.append_event("resumed", {"from_step": 3, "seconds": 9.5})
    page = render_report(run)
    text = Page(page).text
    assert "Workers were started again 1 time; 2 steps had to be done again." in text
    assert "rank 1 has not <moved>" in text
    assert "<moved>" not in page
    assert "9.5 s" in text
    assert "Guards have acted" not in text


def test_layouts_that_replaced_each_other_are_listed(run):
    facts = {"step": 6, "from": "layout", "to": "<odd>", "now_s": 1.5, "expected_s": 0.75, "seconds": 0.25}
    RunDirectory(run).append_event("switch", facts)
    page = render_report(run)
    text = Page(page).text
    assert "The layout was replaced 1 time while the run went on." in text
    assert all(shown in text for shown in ("<odd>", "1.5 s", "0.75 s", "0.25 s"))
    assert "<odd>" not in page
    assert "Guards have acted" not in text
