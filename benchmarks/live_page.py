"""How quick the live page is: a list of many runs, and the page of a long one, on the server and in a browser.

    python benchmarks/live_page.py

`leaderless ui` serves folders that are made first: runs of 20 steps, and a run of 100,000 steps with 40 metrics in each
line and 200 steps with samples. Seconds are those of the clock, and next to them those of the server's processor. An
update is one more line: the work that it takes, and the time until the browser shows it, most of which is the second
between two looks at the files. The browser is Chromium, driven by chromedriver; without it, the rest is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.request import urlopen

import psutil

if TYPE_CHECKING:
    from tests.live_page import Browser

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/performance/live_page.json"
NUM_METRICS = 40
NUM_SAMPLED = 200
NUM_UPDATES = 10
AFTER_FRAME = "await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));"
"""Waits in a page until what was changed has been painted."""


def main() -> None:
    """Measure, and write the results where the guide takes them from."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000, help="Steps of the long run.")
    parser.add_argument("--runs", type=int, default=1_000, help="Runs in the list.")
    parser.add_argument("--output", type=Path, default=RESULTS, help="File of the results.")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as name:
        long, many = Path(name, "long"), Path(name, "many")
        make_long(long / "long", options.steps)
        make_many(many, options.runs)
        results = {
            "steps": options.steps,
            "metrics": NUM_METRICS,
            "runs": options.runs,
            "cores": os.cpu_count(),
            "megabytes": round((long / "long/metrics.jsonl").stat().st_size / 1e6),
            "list": of_the_list(many),
            "page": of_the_page(long),
            "update": of_updates(long),
            "browser": in_a_browser(long, many, Path(name, "profile")),
        }
    options.output.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=2))


def make_long(run: Path, num_steps: int) -> None:
    """Write a run as a healthy one leaves it."""
    from tests.unit.observability.report.runs import sample_rows, write_lines, write_run

    write_run(run, 1)
    rng = random.Random(0)
    with (run / "metrics.jsonl").open("w") as file:
        file.writelines(line_of(step, num_steps, rng) for step in range(1, num_steps + 1))
    shutil.rmtree(run / "samples")
    for number in range(1, NUM_SAMPLED + 1):
        step = max(1, number * num_steps // NUM_SAMPLED)
        rows = sample_rows(step, number / NUM_SAMPLED, rng)
        write_lines(
            run / f"samples/step-{step:06d}.jsonl",
            [row | {"response": f"{row['response']}{' …' * 400}"} for row in rows],
        )


def line_of(step: int, num_steps: int, rng: random.Random) -> str:
    """A line of metrics with as many as there are to be, but for those of held-out prompts."""
    from tests.unit.observability.report.runs import metrics_row

    row = metrics_row(step, num_steps, rng)
    row |= {f"custom/number-{number}": rng.gauss(0, 1) for number in range(NUM_METRICS - len(row) + 2)}
    return json.dumps(row) + "\n"


def make_many(folder: Path, num_runs: int) -> None:
    """Write many short runs."""
    from tests.unit.observability.report.runs import write_run

    template = write_run(folder / "run-0000", 20)
    for number in range(1, num_runs):
        shutil.copytree(template, folder / f"run-{number:04d}")


def last_step(run: Path) -> int:
    """The last step of a run."""
    from leaderless.serving.live_page.run_list import last_record

    return int(str(last_record(run / "metrics.jsonl")["step"]))


@contextmanager
def served(folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of `leaderless ui` about a folder, and its process."""
    command = [sys.executable, "-m", "leaderless", "ui", str(folder), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0], psutil.Process(process.pid)
                break
    finally:
        process.terminate()
        process.wait()


def asked(address: str, server: psutil.Process) -> Mapping[str, float]:
    """Seconds until the first byte of an answer and until its last, seconds of the server's processor, and its size."""
    cpu, began = _cpu_s(server), time.perf_counter()
    with urlopen(address, timeout=600) as answer:
        first = answer.read(1)
        first_s = time.perf_counter() - began
        size = len(first) + len(answer.read())
    whole_s = time.perf_counter() - began
    return {"first_byte_s": first_s, "whole_s": whole_s, "cpu_s": _cpu_s(server) - cpu, "bytes": size}


def of_the_list(folder: Path) -> Mapping[str, object]:
    """The list of all runs, the first time and once more."""
    with served(folder) as (address, server):
        begin = server.memory_info().rss
        return {
            "first": asked(address, server),
            "again": asked(address, server),
            "rss_begin": begin,
            "rss": server.memory_info().rss,
        }


def of_the_page(folder: Path) -> Mapping[str, object]:
    """The page of the long run, the first time and once more."""
    with served(folder) as (address, server):
        page = f"{address}/runs/long"
        return {"first": asked(page, server), "again": asked(page, server), "rss": server.memory_info().rss}


def of_updates(folder: Path) -> Mapping[str, float]:
    """Milliseconds of work for one more line, on one page that is open."""
    from leaderless.serving.live_page.pages import RunReader, RunStore

    run, rng = folder / "long", random.Random(1)
    last = last_step(run)
    reader = RunReader(RunStore([folder]), ["long"], "")
    reader.news()
    took, sizes = [], []
    for number in range(1, NUM_UPDATES + 1):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(line_of(last + number, last, rng))
        began = time.perf_counter()
        news = reader.news()
        took.append(1000 * (time.perf_counter() - began))
        assert "charts" in news, "the new line makes no news"
        sizes.append(len(json.dumps(news["charts"])))
    return {"median_ms": statistics.median(took), "longest_ms": max(took), "bytes": statistics.median(sizes)}


def in_a_browser(long: Path, many: Path, profile: Path) -> Mapping[str, float] | None:
    """What somebody waits for who looks at the pages; None without a browser."""
    from tests.live_page import CHROMEDRIVER, browser

    if CHROMEDRIVER is None:
        return None

    def seconds(page: Browser, address: str, condition: str) -> float:
        began = time.perf_counter()
        page.open(address)
        page.wait(condition)
        return time.perf_counter() - began

    found: dict[str, float] = {}
    is_drawn = "Number(document.documentElement.dataset.drawnCharts) > 0"
    with browser(profile) as page:
        with served(many) as (address, _):
            found["list_s"] = seconds(page, address, "Number(document.documentElement.dataset.shownRuns) > 0")
            search = "const box = document.getElementById('find-runs'); box.value = '99';"
            found["search_runs_ms"] = _responds(page, f"{search} box.dispatchEvent(new Event('input'));")
        with served(long) as (address, _):
            found["page_s"] = seconds(page, f"{address}/runs/long", is_drawn)
            found["page_again_s"] = seconds(page, f"{address}/runs/long", is_drawn)
            page.run("document.getElementById('curves').scrollIntoView()")
            page.wait("document.querySelectorAll('#curves .js-plotly-plot').length > 2")
            found["log_axis_ms"] = _responds(page, "document.querySelector('#curves .tools button').click();")
            smooth = "const bar = document.getElementById('smoothing'); bar.value = '0.9';"
            found["smoothing_ms"] = _responds(page, f"{smooth} bar.dispatchEvent(new Event('input'));")
            found["filter_ms"] = _responds(page, "document.querySelector('input[name=state][value=wrong]').click();")
            find = "const box = document.getElementById('find'); box.value = 'Tuesday';"
            find += "box.dispatchEvent(new Event('input'));"
            marked = "while (!document.querySelector('#groups mark')) await new Promise((done) => setTimeout(done, 1));"
            found["search_samples_ms"] = _responds(page, f"{find} {marked}")
            found["update_s"] = _seen(page, long / "long")
    return found


def _responds(page: Browser, action: str) -> float:
    """Milliseconds from an action to the frame that shows its effect."""
    begin, end = "const began = performance.now();", "return performance.now() - began;"
    return float(page.run(f"return (async () => {{ {begin} {action} {AFTER_FRAME} {end} }})();"))


def _seen(page: Browser, run: Path) -> float:
    """Seconds from one more line in the file to the curve that shows it."""
    last = last_step(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line_of(last + 1, last, random.Random(2)))
    began = time.perf_counter()
    curves = "[...document.querySelectorAll('#curves .js-plotly-plot')]"
    page.wait(f"{curves}.some((one) => one.data.at(-1).x.at(-1) === {last + 1})")
    return time.perf_counter() - began


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


if __name__ == "__main__":
    main()
