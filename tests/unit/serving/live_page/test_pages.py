"""Pages about runs: what they show, what is sent when runs go on, and who may see them."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import HTTPCookieProcessor, HTTPRedirectHandler, Request, build_opener, urlopen

import pytest
from tests.live_page import ask, events, served, write_status
from tests.unit.observability.report.runs import (
    EVIL,
    Page,
    metrics_row,
    sample_rows,
    spoil_with,
    write_lines,
    write_run,
)

from leaderless.observability.report.page import render_report, report_values
from leaderless.serving.live_page.app import LEAVING_S, cookie_name
from leaderless.serving.live_page.charts import Board, differences
from leaderless.serving.live_page.metric_table import StepTable
from leaderless.serving.live_page.pages import RunStore
from leaderless.serving.live_page.run_list import GONE_S, TAIL_BYTES, RunIndex, last_records


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("template") / "run")


@pytest.fixture
def run(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(template, tmp_path / "runs/alpha"))


def add_step(run: Path, step: int, **numbers: float) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics_row(step, 40, random.Random(step)) | numbers) + "\n")


def stamped(page: str) -> str:
    """The stamp of a page, for its stream."""
    return next(attributes["data-at"] for _, attributes in Page(page).elements if "data-at" in attributes)


def test_a_live_page_shows_what_the_report_shows(run: Path) -> None:
    spoil_with(run, EVIL)
    live, report = Page(RunStore([run.parent]).run_page("alpha")), Page(render_report(run))
    assert live.data("chart-data") == report.data("chart-data")
    assert live.data("sample-data") == report.data("sample-data")
    for title in ("Failures and restarts", "Worth a look", "Is it learning?", "Where the time goes", "Batch sizes"):
        assert (title in live.text) == (title in report.text), title


def test_a_live_page_of_a_long_run_shows_what_the_report_shows(run: Path) -> None:
    rng = random.Random(0)
    write_lines(run / "metrics.jsonl", [metrics_row(step, 40, rng) for step in range(2200)])
    live, report = (
        Page(RunStore([run.parent]).run_page("alpha")).data("chart-data"),
        Page(render_report(run)).data("chart-data"),
    )
    assert live == report
    (band,) = [card["band"] for card in live.values() if card.get("band")]
    assert len(band["low"]["steps"]) > 1000


def test_a_stream_sends_what_is_new_and_nothing_else(run: Path) -> None:
    write_status(run, 0, doing="rollout")
    write_status(run, 1, doing="policy", waiting_for="the rows of rank 0")
    with served(run.parent) as address:
        _, page, _ = ask(f"{address}/runs/alpha")
        stream = f"{address}/stream?run=alpha&at={stamped(page)}"
        (first,) = events(stream, lambda found: len(found) == 1)
        assert "charts" not in first, "the page has them"
        assert first["doing"] == {"rollout": "0", "policy": "1"}
        assert "the rows of rank 0" in first["now"]
        add_step(run, 41, **{"reward/mean": 0.125, "reward/std": 0.5})

        def is_new(found) -> bool:
            if len(found) == 1:
                add_step(run, 42, **{"reward/mean": 0.25, "reward/std": 0.5})
            return "charts" in found[-1] and len(found) > 1

        *_, last = events(stream, is_new)
        number = [
            card["traces"][0]["name"] for card in Page(page).data("chart-data").values() if card["kind"] == "curves"
        ]
        reward = next(news for news in last["charts"].values() if "band" in news)
        assert reward["traces"] == [{"steps": [42], "values": [0.25]}]
        assert reward["shown"].endswith("→ 0.25")
        assert reward["band"]["low"] == {"steps": [42], "values": [-0.25]}
        assert len(last["charts"]) <= len(number)
        assert len(json.dumps(last["charts"])) < 10_000, "points, not curves"


def test_a_run_that_does_steps_again_or_has_new_metrics_is_shown_anew(run: Path) -> None:
    with served(run.parent) as address:
        _, page, _ = ask(f"{address}/runs/alpha")
        stream = f"{address}/stream?run=alpha&at={stamped(page)}"
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]

        def resumes(found) -> bool:
            if len(found) == 1:
                write_lines(run / "new", [*rows[:30], rows[30] | {"reward/mean": 0.0}])
                (run / "new").rename(run / "metrics.jsonl")
            return "charts" in found[-1]

        *_, last = events(stream, resumes)
        assert all("data" in news for news in last["charts"].values())
        assert max(max(news["data"]["traces"][0]["steps"]) for news in last["charts"].values()) == 30

        def measures(found) -> bool:
            if len(found) == 1:
                add_step(run, 31, **{"custom/new": 1.0})
            return "reload" in found[-1]

        _, page, _ = ask(f"{address}/runs/alpha")
        assert events(f"{address}/stream?run=alpha&at={stamped(page)}", measures)[-1] == {"reload": True}
        assert events(f"{address}/stream?run=alpha&at=0/1.0", len) == [{"reload": True}]


def test_runs_are_laid_over_one_another_with_what_differs(run: Path) -> None:
    other = Path(shutil.copytree(run, run.with_name("beta")))
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("seed: 0", "seed: 7"))
    page = Page(RunStore([run.parent]).compare_page(["alpha", "beta"]))
    charts = page.data("chart-data").values()
    assert all([trace["name"] for trace in chart["traces"]] == ["alpha", "beta"] for chart in charts)
    assert "seed" in page.text
    assert "learning_rate" not in page.text
    assert differences(["a: 1\nb: {c: 2}\n", "a: 1\nb: {c: 3, d: [1]}\n"]) == [("b.c", "2", "3")]
    with served(run.parent) as address:
        assert ask(f"{address}/compare?" + "&".join(f"run={number}" for number in range(17)))[0] == 400
        assert ask(f"{address}/compare?run=alpha&run=nothing")[0] == 404


def test_the_list_tells_running_from_gone_stopped_done_and_empty(run: Path) -> None:
    index = RunIndex([run.parent])

    def state() -> str:
        (line,) = index.lines()
        return line.state

    assert state() == "done"
    write_lines(run / "metrics.jsonl", [{"step": 12, "reward/mean": 0.5}])
    assert state() == "stopped"
    write_status(run, 0)
    assert state() == "running"
    for age_s, expected in ((GONE_S - 5, "running"), (GONE_S + 3 * 2.0 + 5, "gone")):  # it writes every 2 seconds
        long_ago = time.time() - age_s
        os.utime(run / "live/rank-0.json", (long_ago, long_ago))
        assert state() == expected
    (run / "live/rank-0.json").write_text("{half")
    (run / "metrics.jsonl").unlink()
    assert state() == "empty"


def test_a_folder_that_is_half_written_or_of_another_version_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    for name, files in {
        "begun": {"config.yaml": "name: begun\nsteps: 5\n", "live/rank-0.json": "[]"},
        "odd": {
            "config.yaml": "][",
            "plan.json": "[1]",
            "plan.svg": "<svg",
            "metrics.jsonl": '{"step": 1, "a": {"b": 1}}\n{"st',
            "events.jsonl": "7\n{}\n",
            "samples/step-000001.rank-0.jsonl": "{}\n{",
        },
        "metrics": {"metrics.jsonl": ""},
    }.items():
        for path, text in files.items():
            (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / path).write_text(text)
    with served(tmp_path) as address:
        listed = Page(ask(address)[1]).data("run-data")
        assert {line["key"] for line in listed} == {"begun", "odd", "metrics"}
        for key in ("begun", "odd", "metrics"):
            status, text, _ = ask(f"{address}/runs/{key}")
            assert status == 200, text
            events(f"{address}/stream?run={key}&at={stamped(text)}", len)


def test_only_runs_of_the_list_are_read(run: Path, tmp_path: Path) -> None:
    write_run(tmp_path / "secret", 2)
    (run.parent / "link").symlink_to(tmp_path / "secret")
    with served(run.parent) as address:
        for key in ("../secret", "..%2fsecret", "%2e%2e/secret", "link", "alpha/samples", str(tmp_path / "secret"), ""):
            for page in (f"runs/{key}", f"stream?run={key or 'x'}", f"samples?run={key}", f"compare?run={key}"):
                status, text, _ = ask(f"{address}/{page}")
                assert status == 404, page
                assert "there is no run" in text or "Not Found" in text
        assert ask(f"{address}/assets/..%2fpage.html")[0] == 404


def test_a_browser_loads_a_script_once_and_again_when_it_is_another(run: Path) -> None:
    with served(run.parent) as address:
        status, text, headers = ask(f"{address}/assets/live.js")
        assert (status, "EventSource" in text) == (200, True)
        status, text, _ = ask(f"{address}/assets/live.js", If_None_Match=headers["etag"])
        assert (status, text) == (304, "")


def test_a_page_answers_this_machine_alone_or_those_with_the_token(run: Path) -> None:
    with served(run.parent) as address:
        status, text, headers = ask(f"{address}/runs/alpha", Host="evil.example")
        assert status == 403
        assert "host 'evil.example' is not this machine" in text
        status, _, headers = ask(f"{address}/runs/alpha", Host="localhost:1")
        assert status == 200
        assert "script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"].split("script-src")[1].split(";")[0]
    with served(run.parent, token="secret") as address:
        assert ask(address)[0] == 401
        assert ask(f"{address}/?token=wrong")[0] == 401
        assert ask(address, Authorization="Bearer secret", Host="evil.example")[0] == 200
        assert ask(address, Cookie=f"{cookie_name('secret')}=secret")[0] == 200
        assert ask(f"{address}/stop?run=alpha", method="POST", content_type="application/json")[0] == 401


def test_a_run_is_asked_to_stop_by_its_page_alone(run: Path) -> None:
    with served(run.parent) as address:
        stop = f"{address}/stop?run=alpha"
        status, text, _ = ask(stop, method="POST", content_type="application/json")
        assert (status, json.loads(text)) == (409, {"error": "run 'alpha' is not under way"})
        write_status(run, 0)
        assert ask(stop)[0] == 405
        assert ask(stop, method="POST", content_type="text/plain")[0] == 415
        assert not (run / "stop").exists()
        assert ask(stop, method="POST", content_type="application/json")[0] == 200
        assert (run / "stop").exists()
        assert "asked to stop" in ask(f"{address}/runs/alpha")[1]


def test_samples_of_a_run_under_way_are_those_of_its_page(run: Path) -> None:
    desk = RunStore([run.parent])
    write_lines(run / "samples/step-000041.rank-0.jsonl", sample_rows(41, 1.0, random.Random(0)))
    found = json.loads(desk.samples("alpha"))
    assert found["sample-data"] == Page(desk.run_page("alpha")).data("sample-data")
    assert found["sample-data"][-1]["step"] == 41


def test_a_list_of_many_runs_reads_the_ends_of_their_files_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"step": 7, "reward/mean": 0.5, "filler": "x" * 200}) + "\n"
    for number in range(20):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / "config.yaml").write_text("steps: 9\n")
        (folder / "metrics.jsonl").write_text(line * 1000)
    reads: list[Path] = []
    monkeypatch.setattr(
        "leaderless.serving.live_page.run_list.last_records", lambda path: reads.append(path) or last_records(path)
    )
    index = RunIndex([tmp_path])
    for _ in range(3):
        assert {(found.step, found.num_steps) for found in index.lines()} == {(7, 9)}
    assert len(reads) == 20
    with (tmp_path / "run-3/metrics.jsonl").open("a") as file:
        file.write('{"step": 8}\n')
    assert {found.step for found in index.lines()} == {7, 8}
    assert len(reads) == 21
    assert (tmp_path / "run-3/metrics.jsonl").stat().st_size > TAIL_BYTES


def test_the_list_has_tags_accuracy_time_left_and_chosen_columns(run: Path) -> None:
    recipe = (run / "config.yaml").read_text()
    assert "  tags: []\n" in recipe
    (run / "config.yaml").write_text(recipe.replace("  tags: []\n", "  tags:\n  - sweep\n  - 'no: 7'\n"))
    rows, now = [], 0.0
    for step in range(7):
        evaluated = {"evaluation/mean@4": step / 10, "time/evaluate": 500.0} if step % 10 == 0 or step == 4 else {}
        now += (1000.0 if step == 1 else 20.0) + evaluated.get("time/evaluate", 0.0)
        rows.append({"step": step, "time_s": now, "policy/kl": step / 8} | evaluated)
    write_lines(run / "metrics.jsonl", rows)
    wanted = ["policy/kl", "batch.prompts_per_step", "evaluation.temperature", "nothing"]
    store = RunStore([run.parent])
    (line,) = store.list(wanted)
    assert (line["tags"], line["accuracy"], line["accuracy_step"]) == (("sweep", "no: 7"), 0.4, 4)
    assert [line[f"column {name}"] for name in wanted] == [0.75, "32", "1.0", None]
    assert line["left_s"] is None, "it does not run"
    write_status(run, 0)
    # Evaluations come after each 10 of 40 steps; the first step warms up, and the evaluation is no part of step 4.
    assert store.list()[0]["left_s"] == 34 * 20 + 4 * 500
    page = store.index_page(wanted)
    assert "column policy/kl" in page
    with served(run.parent) as address:
        (found,) = events(f"{address}/stream?column=policy/kl", len)[0]
        assert found["column policy/kl"] == 0.75
        assert "batch.responses_per_prompt" in ask(f"{address}/?column=policy/kl")[1], "it can be added"


def test_the_accuracy_of_a_loop_that_is_ahead_is_found(run: Path) -> None:
    write_lines(run / "metrics.jsonl", [{"step": step, "reward/mean": 0.5} for step in range(3)])
    rows = [{"step": step, "evaluation/mean@1": step / 8} for step in (0, 2)]
    write_lines(run / "metrics-evaluation.jsonl", rows)
    with (run / "metrics-evaluation.jsonl").open("a") as file:
        file.write('{"step": 4, "evaluation/mean@1": 0.')  # it is being written
    (line,) = RunIndex([run.parent]).lines()
    assert line.accuracy == (0.25, 2)


def test_a_line_longer_than_the_end_of_its_file_is_found(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "text": "x" * 3 * TAIL_BYTES}) + '\n{"step": 2')
    assert [record["step"] for record in last_records(path)] == [1]
    path.write_text("")
    assert last_records(path) == []


def test_report_values_hold_no_samples_where_none_are_wanted(run: Path) -> None:
    from leaderless.observability.report.run_files import read_run

    assert report_values(read_run(run, budgets=None), [], [])["sample_data"] == "[]"


def test_an_address_with_the_token_keeps_its_other_parts(run: Path) -> None:
    with served(run.parent, token="secret") as address:
        for path in ("/runs/alpha", "/compare?run=alpha&run=a%26b", "/"):
            sign = "&" if "?" in path else "?"
            request = Request(f"{address}{path}{sign}token=secret", headers={"host": "node:1"})
            with pytest.raises(HTTPError) as answer:
                build_opener(NoRedirect).open(request, timeout=60)
            assert answer.value.headers["location"] == path
            assert f"{cookie_name('secret')}=secret" in answer.value.headers["set-cookie"]


def test_two_pages_on_one_host_are_open_in_one_browser(run: Path) -> None:
    browser = build_opener(HTTPCookieProcessor())
    with served(run.parent, token="first") as one, served(run.parent, token="second") as other:
        for address, token in ((one, "first"), (other, "second")):
            assert browser.open(f"{address}/?token={token}", timeout=60).status == 200
        for address in (one, other):
            assert browser.open(address, timeout=60).status == 200


class NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """Let the answer be an error."""


def test_an_address_about_one_run_names_one(run: Path) -> None:
    with served(run.parent) as address:
        for path, method in (("samples", "GET"), ("stop", "POST")):
            status, text, _ = ask(
                f"{address}/{path}?run=alpha&run=beta", method=method, content_type="application/json"
            )
            assert (status, json.loads(text)["error"]) == (400, "2 runs are named: name one")


def test_a_folder_that_cannot_be_written_to_is_named_when_a_run_is_asked_to_stop(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    write_status(run, 0)
    monkeypatch.setattr(Path, "touch", refuse)
    with served(run.parent) as address:
        status, text, _ = ask(f"{address}/stop?run=alpha", method="POST", content_type="application/json")
    assert status == 403
    assert "cannot be written to (Permission denied)" in text
    assert "leaderless stop" in text


def test_a_run_that_cannot_be_read_hides_no_other(run: Path) -> None:
    other = Path(shutil.copytree(run, run.with_name("beta")))
    (other / "metrics.jsonl").unlink()
    (other / "metrics.jsonl").mkdir()  # as unreadable as a file of somebody else
    states = {line.key: line.state for line in RunIndex([run.parent]).lines()}
    assert states == {"alpha": "done", "beta": "empty"}


def test_the_band_of_new_points_has_those_of_no_width(run: Path) -> None:
    table = StepTable(run)
    table.read()
    board = Board({"alpha": table})
    add_step(run, 41, **{"reward/mean": 0.5, "reward/std": 0.0})
    table.read()
    charts, must_reload = board.news()
    assert not must_reload
    (reward,) = [news for news in charts.values() if "band" in news]
    assert reward["band"]["high"] == {"steps": [41], "values": [0.5]}


def test_what_another_loop_says_of_earlier_steps_is_drawn_anew(run: Path) -> None:
    held_out = run / "metrics-evaluation.jsonl"
    held_out.write_text('{"step": 10, "evaluation/late": 0.25}\n')
    table = StepTable(run)
    table.read()
    board = Board({"alpha": table})
    add_step(run, 41)
    with held_out.open("a") as file:
        file.write('{"step": 40, "evaluation/late": 0.5}\n')
    table.read()
    charts, must_reload = board.news()
    assert not must_reload
    (late,) = [news for news in charts.values() if "data" in news]
    assert late["data"]["traces"] == [{"name": "late", "steps": [10, 40], "values": [0.25, 0.5]}]
    assert late["shown"] == "0.25 → 0.5"
    assert board.news() == ({}, False)


def test_a_server_that_stops_ends_the_streams_of_open_pages(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    with served(run.parent) as address:
        streams = [
            urlopen(f"{address}/{path}", timeout=60) for path in ("stream", "stream?run=alpha&at=0/1.0", "stream")
        ]
        for stream in streams:
            assert stream.readline().startswith(b"data: ")
        began = time.monotonic()
    assert time.monotonic() - began < LEAVING_S
    for stream in streams:
        stream.read()
        stream.close()
    assert not caplog.records


def test_a_page_shows_how_busy_accelerators_are(run: Path) -> None:
    write_status(run, 0, device_percent=87.4)
    write_status(run, 1, device_percent=None)
    text = Page(RunStore([run.parent]).run_page("alpha")).text
    assert "87%" in text
    assert "60 GiB of 80 GiB" in text
