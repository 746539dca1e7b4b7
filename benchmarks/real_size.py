"""A model of a real size: the memory of every phase of a run, measured and as estimated by `leaderless plan`.

    python benchmarks/real_size.py

A random model of the shape of Qwen2.5-0.5B (494 million parameters, a vocabulary of 151,936, bfloat16 on disk, tied
embeddings) is trained with GRPO for two steps with a checkpoint after each, killed in the third, resumed, evaluated,
exported and served. Only memory that the system cannot take back (`RssAnon` and `RssShmem`) counts; it is sampled in
each worker all the time, and the trace shows the phase that the worker was in. With `--pools`, one worker only
generates and another one trains, for some steps; with `--adapters`, one worker trains adapters, on weights of some
types. `--model FOLDER` takes another model; with `--brief`, adapters are trained for two small steps, and nothing else
is measured.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import psutil

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs/performance/real_size.json"
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "bos_token_id": None,
}
PAUSE_S = 0.02
"""Time between two samples of memory."""
DEADLINE_S = 3600.0
PORT = 8199


@dataclass
class Watch:
    """The memory of a command and of all processes that it starts.

    Attributes:
        process: Command that is watched.
        samples: Time and bytes that the system cannot take back, by process.
        ranks: Rank named by the environment of each process.
    """

    process: subprocess.Popen[bytes]
    samples: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    ranks: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def _sample(self) -> None:
        children: list[int] = []
        turn = 0
        while self.process.poll() is None:
            if turn % 25 == 0:  # looking for processes costs more than reading their memory
                children = _tree(self.process.pid)
            for pid in children:
                memory = _memory(pid)
                if memory:
                    self.samples.setdefault(pid, []).append((time.time(), memory))
                    self.ranks.setdefault(pid, _rank(pid))
            turn += 1
            time.sleep(PAUSE_S)

    def peak(self, rank: int, begin: float = 0.0, end: float = float("inf")) -> int:
        """The most memory of the worker of a rank between two times; of the largest process, if none names a rank."""
        workers = [pid for pid, named in self.ranks.items() if named == rank] or list(self.samples)
        return max((size for pid in workers for at, size in self.samples[pid] if begin <= at <= end), default=0)

    def wait(self) -> None:
        """Wait until the command has succeeded."""
        assert self.process.wait(DEADLINE_S) == 0, self.process.args
        self._thread.join()

    def kill(self) -> None:
        """End all of its processes at once, as the failure of a machine does."""
        for pid in _tree(self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._thread.join()


def _tree(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def _memory(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _rank(pid: int) -> int:
    """The rank that a process was given; -1 if none, as for helpers and for a single worker."""
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        is_worker = b"reward" not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return -1
    found = [int(item.removeprefix(b"RANK=")) for item in variables if item.startswith(b"RANK=")]
    return found[0] if found and is_worker else -1


def make_model(folder: Path) -> None:
    """Write the random model, and a tokenizer of single characters."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from leaderless.models.loading.tiny import write_tiny_model

    write_tiny_model(folder, "0123456789+=-*()# \nabcdefghijklmnopqrstuvwxyz", hidden_size=32, max_positions=32768)
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        AutoModelForCausalLM.from_config(Qwen2Config(**SHAPE)).save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)


def write_recipe(
    folder: Path, model: Path, *, is_asynchronous: bool, changes: Mapping[str, object] | None = None
) -> Path:
    """The recipe, with changes to sections; prompts and responses are as long as may be, as the estimate assumes."""
    rows = [{"question": f"{i % 10} + {i // 10 % 10} = ", "answer": str(i % 10 + i // 10 % 10)} for i in range(64)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"path": str(folder / "rows.jsonl"), "prompt": "question", "answer": "answer", "template": "plain"}
    recipe = {
        "name": "real",
        "workflow": "grpo",
        "models": {"policy": str(model)},
        "data": {"train": data, "evaluation": data, "max_prompt_tokens": 8},
        "reward": {"exact_match": 1.0},
        "batch": {"prompts_per_step": 4, "responses_per_prompt": 8, "updates_per_step": 2, "micro_batch_tokens": 1024},
        "rollout": {"max_response_tokens": 32, "max_sequences": 32},
        "evaluation": {"every_steps": 0, "max_prompts": 4},
        "optimizer": {"learning_rate": 1e-6},
        "checkpoint": {"every_steps": 1, "asynchronous": is_asynchronous},
        "run": {"directory": str(folder / "runs"), "recorded_prompts": 1, "timeout_s": 3600},
        "loggers": [],
        "steps": 3,
        **(changes or {}),
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(recipe))
    return path


def measure(
    folder: Path,
    model: Path,
    num_workers: int,
    *,
    is_asynchronous: bool = True,
    changes: Mapping[str, object] | None = None,
) -> dict[str, dict[str, int]]:
    """Go through the whole life of a run.

    Args:
        folder: Folder for everything that is written.
        model: Folder of the model.
        num_workers: Number of workers on this machine.
        is_asynchronous: Whether checkpoints are written while training continues.
        changes: Sections of the recipe that are others.

    Returns:
        Bytes `measured` in the fullest worker and bytes `planned`, by phase.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recipe = write_recipe(folder, model, is_asynchronous=is_asynchronous, changes=changes)
    run, measured = folder / "runs/real", dict[str, int]()
    planned = json.loads(subprocess.check_output([*COMMAND, "plan", recipe, f"--world-size={num_workers}", "--json"]))
    train = ["train", str(recipe), f"--workers={num_workers}"]
    begin = time.time()
    with _watched(train, folder / "train.log") as watch:
        _await((run / "checkpoints/step-000002").exists, watch)
        watch.kill()
    _by_phase(watch, run, num_workers, begin, "loading", measured)
    begin = time.time()
    with _watched(train, folder / "resume.log") as watch:
        watch.wait()
    _by_phase(watch, run, num_workers, begin, "resume", measured)
    with _watched(["eval", str(run), f"--workers={num_workers}"], folder / "eval.log") as watch:
        watch.wait()
    if num_workers == 1:
        with _watched(["export", str(run), str(folder / "exported")], folder / "export.log") as watch:
            watch.wait()
        measured["export"] = watch.peak(0)
        shutil.rmtree(folder / "exported")
        with _watched(["serve", str(run), f"--port={PORT}", "--max-context=64"], folder / "serve.log") as watch:
            _ask(watch)
            watch.process.send_signal(signal.SIGTERM)
            watch.process.wait(60)
        measured["serve"] = watch.peak(0)
    shutil.rmtree(run)
    totals = planned["memory_bytes"]["cpu"]["totals"]
    phases = {NAMES.get(name, name): size for name, size in totals.items()}
    return {name: {"measured": measured[name], "planned": phases[name]} for name in ORDER if name in measured}


def measure_steps(folder: Path, model: Path, lora: Mapping[str, object]) -> dict[str, dict[str, int]]:
    """Train adapters for two small steps; as `measure`."""
    folder.mkdir(parents=True, exist_ok=True)
    changes: dict[str, object] = {
        "models": {"policy": {"path": str(model), "lora": lora}},
        "batch": {"prompts_per_step": 2, "responses_per_prompt": 4, "micro_batch_tokens": 256},
        "rollout": {"max_response_tokens": 16, "max_sequences": 8},
        "algorithm": {"kl": {"coefficient": 0.01}},
        "checkpoint": {"every_steps": 2},
        "steps": 2,
    }
    recipe, run = write_recipe(folder, model, is_asynchronous=False, changes=changes), folder / "runs/real"
    begin, measured = time.time(), dict[str, int]()
    with _watched(["train", str(recipe), "--workers=1"], folder / "train.log") as watch:
        watch.wait()
    _by_phase(watch, run, 1, begin, "loading", measured)
    planned = _planned_for(recipe, 0, num_ranks=1)
    shutil.rmtree(run)
    return {name: {"measured": measured[name], "planned": planned[name]} for name in ORDER if name in measured}


def measure_pools(folder: Path, model: Path, changes: Mapping[str, object]) -> dict[str, dict[str, int]]:
    """Train for some steps on a rank that only generates and one that trains; as `measure`, by what the rank is for."""
    folder.mkdir(parents=True, exist_ok=True)
    pools = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}
    recipe = write_recipe(folder, model, is_asynchronous=False, changes={"steps": 2, "layout": pools, **changes})
    begin, run = time.time(), folder / "runs/real"
    with _watched(["train", str(recipe), "--workers=2"], folder / "train.log") as watch:
        watch.wait()
    results: dict[str, dict[str, int]] = {}
    for rank, name in enumerate(("generates", "trains")):
        planned, measured = _planned_for(recipe, rank), dict[str, int]()
        for span, since, until in _spans(run / f"trace/rank-{rank}.json"):
            phase = SPANS.get(span, "weights" if span.startswith("weights(") else "")
            if phase and since >= begin:
                goes_on = rank == 0 and "channels" in changes  # it generates in all spans
                peak = watch.peak(rank, since, time.time() if goes_on else until)
                measured[phase] = max(measured.get(phase, 0), peak)
        for phase in (*ORDER, "weights"):
            if phase in measured and phase in planned:
                results[f"{name}: {phase}"] = {"measured": measured[phase], "planned": planned[phase]}
    shutil.rmtree(run)
    return results


def _planned_for(recipe: Path, rank: int, num_ranks: int = 2) -> dict[str, int]:
    """The estimate for a rank that may not be the fullest, by phase."""
    from leaderless.planner import Cluster, make_plan
    from leaderless.planner.memory import estimate as memory
    from leaderless.planner.workflow import load_recipe, resolve_workflow

    loaded = load_recipe(str(recipe)).recipe
    with patch.object(memory, "all_ranks", lambda *_: (rank,)):
        estimate = make_plan(loaded, resolve_workflow(loaded.workflow), Cluster(num_ranks)).memory
    assert estimate is not None, "the size of the model is known"
    return {NAMES.get(name, name): size for name, size in estimate.cpu.totals.items()}


POOLS: Mapping[str, Mapping[str, object]] = {
    "1 + 1": {},
    "1 + 1, continuous": {
        "layout": {"rollout": {"ranks": "0"}, "advantage": {"ranks": "1"}, "policy": {"ranks": "1"}},
        "channels": {"rollout": {"capacity": 1, "mode": "continuous"}},
        "checkpoint": {"every_steps": 2, "asynchronous": False},
    },
}
"""Ways in which one rank generates and another one trains."""
ADAPTERS = {"float32": "1, adapters", "nf4": "1, adapters on nf4"}
"""Runs of one worker that trains adapters, by the type of the weights below them."""
COMMAND = [sys.executable, "-m", "leaderless"]
NAMES = {
    "policy generates": "rollout",
    "policy scores": "log-probs",
    "policy trains": "update",
    "weights of policy travel": "weights",
}
"""Phases of a plan, and their names here."""
ORDER = ("loading", "rollout", "log-probs", "update", "checkpoint", "resume", "export", "serve")
"""Phases, in the order of a run."""
SPANS = {"rollout": "rollout", "old": "log-probs", "policy": "update", "checkpoint": "checkpoint"}
"""Phase of each span of a trace."""


@contextmanager
def _watched(arguments: list[str], log: Path) -> Iterator[Watch]:
    """A command whose memory is sampled. Its output goes to a file, which is shown when it fails."""
    with log.open("wb") as output:
        watch = Watch(subprocess.Popen([*COMMAND, *arguments], stdout=output, stderr=output, cwd=ROOT))
        try:
            yield watch
        except BaseException:
            watch.kill()
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise


def _await(condition: Callable[[], bool], watch: Watch) -> None:
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert watch.process.poll() is None, "the command has ended"
        assert time.monotonic() < end, "the command takes too long"
        time.sleep(0.2)


def _ask(watch: Watch) -> None:
    """Ask a server for a completion, as soon as it answers."""
    body = json.dumps({"model": "real", "prompt": "1 + 2 = ", "max_tokens": 16}).encode()

    def is_answered() -> bool:
        request = urllib.request.Request(
            f"http://127.0.0.1:{PORT}/v1/completions", body, {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=600) as answer:
                return bool(json.loads(answer.read())["choices"])
        except OSError:
            return False

    _await(is_answered, watch)


def _by_phase(watch: Watch, run: Path, num_workers: int, begin: float, first: str, measured: dict[str, int]) -> None:
    """Add the measurements of the phases of one start of the run; what comes before its first step is `first`."""
    for rank in range(num_workers):
        spans = [span for span in _spans(run / f"trace/rank-{rank}.json") if span[1] >= begin]
        peaks = [(first, watch.peak(rank, begin, min(since for _, since, _ in spans)))]
        peaks += [(SPANS[name], watch.peak(rank, since, until)) for name, since, until in spans if name in SPANS]
        for name, size in peaks:
            measured[name] = max(measured.get(name, 0), size)


def _spans(path: Path) -> list[tuple[str, float, float]]:
    """Name, begin and end of each span, in seconds."""
    events = [json.loads(line.rstrip(",")) for line in path.read_text().splitlines() if line.startswith('{"name"')]
    spans = [event for event in events if event["ph"] == "X"]
    return [(span["name"], span["ts"] / 1e6, (span["ts"] + span["dur"]) / 1e6) for span in spans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--pools", nargs="*", choices=POOLS, default=[], help="also measure a rank that only generates")
    parser.add_argument("--adapters", nargs="*", choices=ADAPTERS, default=[], help="also measure training of adapters")
    parser.add_argument("--brief", action="store_true", help="train adapters for two small steps alone")
    parser.add_argument("--model", type=Path, help="folder of another model")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--folder", type=Path, help="folder to keep, with the model and all logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="real-size-") as name:
        folder = options.folder or Path(name)
        if not (model := options.model or folder / "model").exists():
            make_model(model)
        results = json.loads(options.results.read_text()) if options.results.exists() else {}
        of_bases = {ADAPTERS[base]: base for base in options.adapters}
        for workers in (*map(str, options.workers), *options.pools, *of_bases):
            if workers in POOLS:
                results[workers] = measure_pools(folder / "pools", model, POOLS[workers])
            elif workers in of_bases and options.brief:
                lora = {"base_dtype": of_bases[workers]}
                results[workers] = measure_steps(folder / "adapters", model, lora)
            elif workers in of_bases:
                lora = {"base_dtype": of_bases[workers]}
                changes = {"models": {"policy": {"path": str(model), "lora": lora}}}
                results[workers] = measure(folder / "adapters", model, 1, changes=changes)
            else:
                results[workers] = measure(folder / f"workers-{workers}", model, int(workers))
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            for phase, sizes in results[workers].items():
                print(f"{workers} workers, {phase}: {sizes['measured'] / sizes['planned']:.2f} of what was planned")


if __name__ == "__main__":
    main()
