"""The memory of a step with what is offloaded: measured, and as `leaderless plan` counts it.

    python benchmarks/offload.py MODEL                 # a folder with a pretrained model
    python benchmarks/offload.py MODEL --only none "optimizer"

Two steps of GRPO with a reference train all weights in float32 on one worker, and differ only in what is offloaded to
the disk. Memory is what the system cannot take back, and next to it pages of files that are mapped, which it can. All
runs must report the same losses, gradients and rewards. The result is written after each run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leaderless.cli.quickstart_project.data import write_word_problems
from real_models import FOLDER, ROOT, Trial, machine_and_packages
from real_size import Watch

RESULTS = ROOT / "docs/performance/offload.json"
OPTIMIZER, FROZEN = {"optimizer": {"offload": "disk"}}, {"training": {"offload_frozen": "disk"}}
CHECKPOINTS: dict[str, object] = {"gradient_checkpointing": True}
INPUTS = CHECKPOINTS | {"offload_activations": True}
CASES: Mapping[str, tuple[dict[str, Any], dict[str, object]]] = {
    "nothing": ({}, {}),
    "optimizer": (OPTIMIZER, {}),
    "optimizer, reference": (OPTIMIZER | FROZEN, {}),
    "nothing, layers are recomputed": ({}, CHECKPOINTS),
    "optimizer, reference, layers are recomputed": (OPTIMIZER | FROZEN, CHECKPOINTS),
    "optimizer, reference, inputs of layers": (OPTIMIZER | FROZEN, INPUTS),
}
"""What is offloaded, as sections of the recipe and settings of the model."""
SAME = ("policy/loss", "policy/grad_norm", "reward/mean")


class PagesWatch:
    """Most memory of mapped files that the worker of a command has had."""

    def __init__(self, watch: Watch) -> None:
        self.peak, self._watch = 0, watch
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        while self._watch.process.poll() is None:
            for pid in [pid for pid, rank in [*self._watch.ranks.items()] if rank == 0]:
                try:
                    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                except OSError:
                    continue
                found = (int(line.split()[1]) << 10 for line in lines if line.startswith("RssFile:"))
                self.peak = max(self.peak, *found, 0)
            self._watch.process.poll()
            threading.Event().wait(0.05)


class WatchedTrial(Trial):
    """A trial that also watches pages of files."""

    def start(self, *arguments: str) -> Watch:
        """Start a command whose memory is sampled."""
        watch = super().start(*arguments)
        self.pages = PagesWatch(watch)
        return watch


def measure(model: Path, name: str) -> dict[str, Any]:
    """Memory and seconds of a run, and its numbers."""
    sections, settings = CASES[name]
    folder = FOLDER / model.name / "offload"
    shutil.rmtree(folder, ignore_errors=True)
    write_word_problems(folder)
    trial = WatchedTrial(model, folder)
    policy = {"path": str(model), "compute_dtype": "float32", **settings}
    optimizer = {"learning_rate": 1e-6} | sections.get("optimizer", {})
    changes = {"models": {"policy": policy}, "optimizer": optimizer, "algorithm": {"kl": {"coefficient": 0.001}}}
    changes |= {"evaluation": None, "batch": BATCH, **{key: one for key, one in sections.items() if key != "optimizer"}}
    steps = trial.train(changes)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    found = {name: trial.found[name] for name in ("peak_bytes", "planned_bytes")}
    numbers = [[step[key] for key in SAME] for step in steps]
    return found | {"pages_bytes": trial.pages.peak, "step_s": steps[-1]["time/step"], "numbers": numbers}


BATCH = {"prompts_per_step": 4, "responses_per_prompt": 8, "micro_batch_tokens": 2048}


def table(results: dict[str, Any]) -> str:
    """A row for each run, in Markdown."""
    lines = [
        "| model | offloaded | measured | of nothing | planned | of planned | pages of files | seconds a step |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for model, runs in results["models"].items():
        for name in [name for name in CASES if name in runs]:
            found, first = runs[name], runs.get("nothing")
            sizes = [f"{found[key] / 2**30:.2f} GiB" for key in ("peak_bytes", "planned_bytes", "pages_bytes")]
            share = f"{found['peak_bytes'] / first['peak_bytes']:.2f}" if first else "–"
            fit = f"{found['peak_bytes'] / found['planned_bytes']:.2f}"
            cells = [model, name, sizes[0], share, sizes[1], fit, sizes[2], f"{found['step_s']:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="folder with a pretrained model")
    parser.add_argument("--only", nargs="*", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for name in options.only:
        found = measure(options.model.resolve(), name)
        known = options.results.exists()
        results = json.loads(options.results.read_text(encoding="utf-8")) if known else {"models": {}}
        results |= machine_and_packages()
        runs = results["models"].setdefault(options.model.name, {})
        runs[name] = found
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(table(results), flush=True)
        differing = [name for name, run in runs.items() if run["numbers"] != found["numbers"]]
        assert not differing, f"{differing} have other numbers"


if __name__ == "__main__":
    main()
