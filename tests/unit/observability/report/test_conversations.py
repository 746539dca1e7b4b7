"""Episodes on the page: as conversations, whatever the journal holds."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path

import pytest
from tests.unit.environments.test_tool_episodes import call, played
from tests.unit.observability.report.runs import EVIL, Page, sample_rows, write_lines
from tests.unit.observability.report.test_browser import browse, needs_browser

from leaderless.observability.report.episodes import conversation
from leaderless.observability.report.page import render_report, write_report
from leaderless.observability.report.run_files import read_run


def journal_lines() -> list[dict[str, object]]:
    """An episode with tools, and one in which a tool fails."""
    texts = [f"Let me count. {call('count', by=2)}{call('cont', by=3)}", "2"]
    found = [json.loads(line) for line in played(texts).journal()]
    failed = [json.loads(line) for line in played([call("hang")], tool_timeout_s=0.05).journal()]
    return [{**line, "id": 7 + number} for number, line in enumerate([*found, *failed])]


def write_episodes(run: Path, lines: list[dict[str, object]], step: int = 40) -> None:
    """Write lines into the journal, and the samples of their episodes in place of those of the step."""
    path = run / f"episodes/step-{step:06d}/played.rank-0.jsonl.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()))
    row = sample_rows(step, 1.0, random.Random(0))[0]
    rows = [row | {"sample_id": line["id"], "joint_id": line["id"], "reward": line["id"]} for line in lines]
    for old in (run / "samples").glob(f"step-{step:06d}*"):
        old.unlink()
    write_lines(run / f"samples/step-{step:06d}.rank-0.jsonl", rows)


def test_an_episode_is_a_conversation_with_its_calls_and_their_results():
    whole, failed = map(conversation, journal_lines())
    messages = whole["messages"]
    assert [message["kind"] for message in messages] == ["told", "said", "tool", "tool", "said"]
    assert messages[1]["text"].strip() == "Let me count."
    assert messages[1]["calls"] == [
        {"name": "count", "arguments": '{"by": 2}'},
        {"name": "cont", "arguments": '{"by": 3}'},
    ]
    assert [(message["who"], message["refusal"]) for message in messages[2:4]] == [
        ("count", ""),
        ("cont", "unknown_tool"),
    ]
    assert (messages[4]["turn"], messages[4]["reward"], messages[4]["tokens"]) == (1, 1.0, 1)
    assert set(whole["seconds"]) == {"model", "environment", "tools"}
    assert (failed["cause"], "hang" in failed["error"]) == ("deadline", True)


def test_a_conversation_tells_that_it_has_drifted_and_what_grading_took(run):
    lines = [line | {"has_drifted": number == 0} for number, line in enumerate(journal_lines())]
    write_episodes(run, lines)
    graded = [{"id": 7, "actor": 0, "seconds": 0.25}, {"id": 7, "actor": 1, "seconds": 1.5}]
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in graded)
    (run / "episodes/step-000040/graded.rank-0.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (step,) = read_run(run).samples.steps
    whole, failed = step.episodes.values()
    assert (whole["has_drifted"], failed["has_drifted"]) == (True, False)
    assert (whole["seconds"]["grading"], failed["seconds"]["grading"]) == (1.75, 0.0)


def test_samples_come_with_the_conversations_of_their_step(run):
    write_episodes(run, journal_lines())
    (step,) = read_run(run).samples.steps
    assert step.step == 40, "of the recorded steps, only those with episodes are shown"
    assert list(step.episodes) == ["7", "8"]
    text = Page(render_report(run)).text
    assert "of those whose episodes are kept" in text


@pytest.mark.parametrize(
    "line",
    [{}, {"nodes": 3}, {"nodes": [{"messages": [{"role": EVIL, "content": {"a": EVIL}}], "said": {"turn": EVIL}}]}],
)
def test_a_journal_may_hold_anything(run, line):
    write_episodes(run, [{"id": 7, **line, "cause": EVIL, "error": ["<b>"], "seconds": {EVIL: "x"}, "agents": None}])
    page = Page(render_report(run))
    assert "alert" not in " ".join(str(attributes) for tag, attributes in page.elements if tag == "script")
    assert page.count("img") == 0
    (run / "episodes/step-000040/played.rank-0.jsonl.gz").write_bytes(b"broken")
    assert any("played.rank-0.jsonl.gz cannot be read" in note for note in read_run(run).notes)


@needs_browser
def test_browser_shows_who_said_what(run, tmp_path):
    lines = journal_lines()
    write_episodes(run, lines)
    write_lines(run / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in (39, 40)])  # few charts
    path = write_report(run)
    page = Page(browse(path, tmp_path / "profile", is_dark=True))
    assert "data-error" not in dict(page.elements)["html"]
    bubbles = [
        attributes["class"] for _, attributes in page.elements if "bubble" in attributes.get("class", "").split()
    ]
    assert bubbles == [
        *("bubble told", "bubble said", "bubble tool", "bubble tool", "bubble said"),
        *("bubble told", "bubble said", "bubble failure"),
    ]
    for words in ("unknown tool", "1 token trained", "left out", "reward +1.000", "failed: deadline"):
        assert words in page.text
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text(encoding="utf-8"))
    narrow = "const i = document.getElementById('reward-from'); i.value = '8'; i.dispatchEvent(new Event('input'));"
    path.write_text(text.replace("</body>", f"<script>{narrow}</script></body>"), encoding="utf-8")
    page = Page(browse(path, tmp_path / "profile", is_dark=False))
    assert "1 of 2 responses to 1 prompt" in page.text
