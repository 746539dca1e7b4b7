"""Time of the host for a decoding step over pages: `python benchmarks/host_time.py [--against FOLDER]`.

Nothing is computed: passes are not run, and what they would have drawn is made before, so that all that is left is
what the host does for each step, on one core. Launches, copies and events of a device are not in it. `--against` names
another checkout of this repository, whose engine does the same work in turn with this one: the ratio of two runs next
to each other means something on a machine that is busy with other things.
"""
# ruff: noqa: ANN401, SLF001 - engines are watched from within

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GROUPS, SIBLINGS, PROMPT_TOKENS = 64, 8, 128
END, MEAN_TOKENS, MOST_TOKENS = 1, 256, 512
"""Token that ends a response, tokens of a response on average where it ends at random, and at most."""
PASSES, TOGETHER = 194, 32
"""Passes of a measurement, and those of which the time is taken together."""


def measure() -> dict[str, float]:
    """Milliseconds for each pass, in several ways."""
    import torch

    torch.set_num_threads(1)
    from leaderless.config.rollout import SamplingConfig
    from leaderless.rollout.engine import Request, SamplingParams, generate

    params = SamplingParams(SamplingConfig(), MOST_TOKENS, (), seed=1)
    with torch.no_grad():
        found = dict[str, float]()
        engine = _engine(ends=False)
        for group in range(GROUPS):
            engine.submit(_request(Request, group), params)
        for _ in range(3):
            engine.step()
        found["step(), 512 rows"] = _ms(engine, partial(_passes, engine))
        engine = _engine(ends=True)
        for group in range(6 * GROUPS):  # places that become free are taken again
            engine.submit(_request(Request, group), params)
        _passes(engine)  # until responses of all lengths are in progress
        found["step(), 512 rows that come and go"] = _ms(engine, partial(_passes, engine))
        engine = _engine(ends=False)
        asked = [_request(Request, group) for group in range(GROUPS)]
        found["generate(), 512 rows"] = _ms(engine, lambda: generate(engine, asked, params))
    return found


def _passes(engine: Any) -> None:
    end = engine.passes + PASSES
    while engine.passes < end:
        engine.step()


def _request(make: Callable[..., Any], group: int) -> Any:
    return make(
        [2 + group // 50, 2 + group % 50] + [5] * (PROMPT_TOKENS - 2),
        [group << 16 | sibling for sibling in range(SIBLINGS)],
    )


def _engine(*, ends: bool) -> Any:
    """An engine whose passes draw tokens that were made before."""
    import torch
    from tests.tiny import tiny_model

    from leaderless.config.models import ModelConfig
    from leaderless.models.causal_lm import load_causal_lm
    from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions

    rows, cpu = GROUPS * SIBLINGS, torch.device("cpu")
    model: Any = load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval()
    options = PagedOptions(lambda query, *_: query, 1 << 19, PROMPT_TOKENS + MOST_TOKENS)
    end_tokens = frozenset({END} if ends else {})
    engine: Any = PagedEngine(model, None, end_tokens, rows, cpu, options)  # type: ignore[arg-type]
    draw = random.Random(0)
    drawn = [
        torch.tensor([END if draw.random() < 1 / MEAN_TOKENS else draw.randrange(2, 60) for _ in range(rows)])
        for _ in range(97)
    ]

    def run(key: tuple[int, object], compute: Callable[[], None]) -> None:  # noqa: ARG001
        engine.passes += 1
        engine._staging.drawn(key[0])[0] = drawn[engine.passes % len(drawn)][: key[0]]

    engine._forward = lambda *inputs: torch.zeros(len(inputs[3]), 60)
    engine.passes = 0
    engine._passes.run = run
    return engine


def _ms(engine: Any, work: Callable[[], object]) -> float:
    """Milliseconds of this thread for each pass of some work, but for reading prompts: the median of some passes."""
    reading, read = 0.0, engine._prefill

    def watched() -> None:
        nonlocal reading
        begin = time.thread_time()
        read()
        reading += time.thread_time() - begin

    def stamped(run: Callable[..., None], *pass_: object) -> None:
        stamps.append(time.thread_time() - reading)
        run(*pass_)

    stamps, run = list[float](), engine._passes.run
    engine._prefill, engine._passes.run = watched, partial(stamped, run)
    work()
    engine._prefill, engine._passes.run = read, run
    begins = range(0, len(stamps) - TOGETHER, TOGETHER)
    return 1e3 * median((stamps[begin + TOGETHER] - stamps[begin]) / TOGETHER for begin in begins)


def measured_of(folder: Path) -> dict[str, float]:
    """What the engine of a checkout takes, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--one"]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def table(results: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """A table in Markdown: medians, with the range of the middle half of all ratios."""
    lines = ["| ms for each pass | before | now | now / before |", "| --- | ---: | ---: | ---: |"]
    now, before = results["now"], results.get("before", {})
    for name, times in now.items():
        other = before.get(name, ())
        low, _, high = (
            quantiles(one / two for one, two in zip(times, other, strict=True)) if len(other) > 1 else [0] * 3
        )
        middle = median(one / two for one, two in zip(times, other, strict=True)) if other else 0
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})" if other else ""
        lines.append(f"| {name} | {f'{median(other):.2f}' if other else ''} | {median(times):.2f} | {ratio} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--against", type=Path, help="another checkout, to compare with")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--one", action="store_true", help="measure once, in this process")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure()))
        return
    results: dict[str, dict[str, list[float]]] = {}
    folders = {"before": options.against, "now": ROOT} if options.against else {"now": ROOT}
    for _ in range(options.repeats):
        for name, folder in folders.items():
            for what, value in measured_of(folder.resolve()).items():
                results.setdefault(name, {}).setdefault(what, []).append(round(value, 4))
    if options.results:
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


if __name__ == "__main__":
    main()
