"""Each feature once with pretrained models: what it took, and whether it did what it should.

    python benchmarks/real_models.py MODELS            # each folder in MODELS that is a model; `make test-real`
    python benchmarks/real_models.py MODELS --features tp export

A small one of some hundred million weights takes about 25 minutes on two cores. Each feature is run by commands, as a
person does, in a folder of its own; its output is kept in `runs/real-models`. Log-probabilities of trainer and engine
must agree, the peak memory of the fullest worker must be within 15 % of the plan's, and no worker may need more than
that above its own. As the plan counts the longest prompts, all of them are as long as a prompt may be. The result is
written after each feature, and the exit code is 1 if one has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent))  # where the documentation reads it

from leaderless.cli.quickstart_project.data import write_rows, write_word_problems
from leaderless.config.layout import LayoutConfig
from leaderless.observability.run_directory import RunDirectory
from real_size import Watch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/real_models.json"
FOLDER = ROOT / "runs/real-models"
COMMAND = [sys.executable, "-m", "leaderless"]
PORT = 8198
DEADLINE_S = 3600.0
MOST_MISMATCH = 1e-3
"""Most by which log-probabilities of trainer and engine may differ, per token on average."""
LEAST_MEMORY, MOST_MEMORY = 0.85, 1.15
"""Least peak memory of the fullest worker, and most of any worker, as multiples of the plan's."""
REWARD = """\
def short(sample):
    return 1.0 / (1 + len(sample.response))
"""
"""A reward that differs between responses, so that each step has a signal for models of any skill."""
Found = dict[str, Any]
NO_REFERENCE = {"algorithm": {"kl": {"coefficient": 0.0}}}
APART = {"layout": {"rollout": {"ranks": "0"}, "advantage": {"ranks": "1"}, "policy": {"ranks": "1"}}}


@dataclass
class Trial:
    """One feature with one model.

    Attributes:
        model: Folder of the model.
        folder: Folder in which the commands run.
        prompt_tokens: Most tokens of a prompt.
        found: Measurements, by name.
    """

    model: Path
    folder: Path
    prompt_tokens: int = 96
    found: Found = field(default_factory=dict)

    def command(self, *arguments: str, code: int = 0) -> str:
        """Output of a command that ends with an exit code."""
        done = subprocess.run(
            [*COMMAND, *arguments], cwd=self.folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        with (self.folder / "output.log").open("a", encoding="utf-8") as log:
            log.write(f"$ leaderless {' '.join(arguments)}\n{done.stdout}{done.stderr}")
        assert done.returncode == code, f"exit code {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        return done.stdout

    def write(self, changes: Mapping[str, Any] | None = None) -> None:
        """Write `recipe.yaml`: two steps of GRPO on word problems, but for changed sections; None drops one."""
        data = {"path": "train.jsonl", "prompt": "question", "answer": "answer"}
        recipe: Found = {
            "name": "real",
            "workflow": "grpo",
            "models": {"policy": {"path": str(self.model), "compute_dtype": "float32"}},
            "data": {
                "train": data,
                "evaluation": data | {"path": "test.jsonl"},
                "max_prompt_tokens": self.prompt_tokens,
            },
            "reward": {"exact_match": 1.0, "rewards:short": 0.5},
            "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "micro_batch_tokens": 256},
            "rollout": {"max_response_tokens": 16, "max_sequences": 16},
            "evaluation": {"every_steps": 2, "max_prompts": 8},
            "optimizer": {"learning_rate": 1e-6},
            "checkpoint": {"every_steps": 1, "asynchronous": False},
            "loggers": [],
            "steps": 2,
        }
        sections = {name: section for name, section in (recipe | dict(changes or {})).items() if section is not None}
        (self.folder / "recipe.yaml").write_text(json.dumps(sections), encoding="utf-8")
        (self.folder / "rewards.py").write_text(REWARD, encoding="utf-8")

    def train(self, changes: Mapping[str, Any] | None = None, workers: int = 1) -> Sequence[Mapping[str, float]]:
        """The metrics of each step of a run, whose memory is compared with its plan."""
        self.write(changes)
        plan = json.loads(self.command("plan", "recipe.yaml", f"--world-size={workers}", "--json"))
        watch = self.start("train", "recipe.yaml", f"--workers={workers}")
        watch.wait()
        planned = {
            rank: one["cpu"]
            for one in plan["memory_bytes"]["peaks"]
            for rank in LayoutConfig(ranks=one["ranks"]).ranks_of(workers)
        }
        measured = [watch.peak(rank) for rank in range(workers)]
        self.found["peak_bytes"], self.found["planned_bytes"] = max(measured), plan["memory_bytes"]["cpu"]["peak"]
        if len({*planned.values()}) > 1:
            self.found["of_plan_by_rank"] = [peak / planned[rank] for rank, peak in enumerate(measured)]
        steps = [row for row in RunDirectory(self.folder / "runs/real").read_metrics() if row["step"]]
        assert steps, "no step was trained"
        if "mismatch/abs_mean" in steps[-1]:
            # Samples of earlier weights differ by what the weights have learned since.
            fresh = [row for row in steps if not row.get("rollout/staleness")]
            self.found["mismatch"] = max(row["mismatch/abs_mean"] for row in fresh)
            assert self.found["mismatch"] < MOST_MISMATCH, f"trainer and engine differ by {self.found['mismatch']:.2g}"
        for rank, peak in enumerate(measured):
            least = LEAST_MEMORY * (planned[rank] == self.found["planned_bytes"])
            assert least < peak / planned[rank] < MOST_MEMORY, (
                f"rank {rank} used {peak / 2**30:.2f} GiB, {planned[rank] / 2**30:.2f} GiB were planned"
            )
        return steps

    def start(self, *arguments: str) -> Watch:
        """Start a command whose memory is sampled."""
        log = (self.folder / "output.log").open("ab")
        return Watch(subprocess.Popen([*COMMAND, *arguments], cwd=self.folder, stdout=log, stderr=log))

    def learn(self, changes: Mapping[str, Any], workers: int = 1) -> None:
        """Train, and keep what the last step says of rewards."""
        last = self.train({"algorithm": {"kl": {"coefficient": 0.001}}} | changes, workers)[-1]
        self.found["reward"] = last["reward/mean"]

    def train_pairs(self, workflow: str, role: str) -> None:
        """Train by pairs of a right and a wrong answer."""
        pairs = []
        for line in (self.folder / "train.jsonl").read_text(encoding="utf-8").splitlines()[:64]:
            row = json.loads(line)
            right, wrong = row["answer"], str(int(row["answer"]) + 1)
            pairs.append({"prompt": row["question"], "chosen": right, "rejected": wrong})
        write_rows(self.folder / "pairs.jsonl", pairs)
        data = {"path": "pairs.jsonl", "chosen": "chosen", "rejected": "rejected", "prompt": "prompt"}
        sections = {
            "workflow": workflow,
            "models": {role: {"path": str(self.model), "compute_dtype": "float32"}},
            "data": {
                "train": data,
                "evaluation": data,
                "max_prompt_tokens": self.prompt_tokens,
                "max_response_tokens": 16,
            },
            "batch": {"prompts_per_step": 8, "micro_batch_tokens": 256},
            "reward": None,
            "rollout": None,
            "steps": 4,
        }
        steps = self.train(sections)
        loss = f"{role}/loss"
        self.found["loss"] = [steps[0][loss], steps[-1][loss]]


def template(trial: Trial) -> None:
    described = json.loads(trial.command("template", str(trial.model), "--json"))
    trial.found["append_only"] = described["is_append_only"]


def reward(trial: Trial) -> None:
    trial.write()
    trial.command("reward", "recipe.yaml", "--rows", "2", "--response", "42")


def split_heads(trial: Trial) -> None:
    """Two ranks share the heads of attention, or as few more as divide them."""
    described = json.loads((trial.model / "config.json").read_text(encoding="utf-8"))
    num_heads, num_pairs = described["num_attention_heads"], described["num_key_value_heads"]
    trial.found["tp"] = tp = next(tp for tp in range(2, num_heads + 1) if num_heads % tp == num_pairs % tp == 0)
    trial.learn({"layout": {"policy": {"tp": tp}}}, tp)


def kill_and_resume(trial: Trial) -> None:
    """A run that is killed in its second step continues, with the numbers of one that was not disturbed."""
    trial.write()
    watch = trial.start("train", "recipe.yaml", "--workers=1")
    run, end = trial.folder / "runs/real", time.monotonic() + DEADLINE_S
    while not (run / "checkpoints/step-000001").exists():
        assert watch.process.poll() is None, "the run has ended"
        assert time.monotonic() < end, "the first step takes too long"
        time.sleep(0.2)
    watch.kill()
    trial.command("train", "recipe.yaml", "--workers=1")
    resumed = [row["policy/grad_norm"] for row in RunDirectory(run).read_metrics() if row["step"]]
    shutil.rmtree(run)
    trial.command("train", "recipe.yaml", "--workers=1")
    undisturbed = [row["policy/grad_norm"] for row in RunDirectory(run).read_metrics() if row["step"]]
    assert resumed == undisturbed, (resumed, undisturbed)


def evaluate(trial: Trial) -> None:
    trial.train()
    trial.command("eval", "runs/real")


def export(trial: Trial) -> None:
    """An exported model is loaded by transformers, and differs from the first one by what it has learned."""
    trial.train({"optimizer": {"learning_rate": 1e-4}})
    trial.command("export", "runs/real", "exported")
    import torch
    from transformers import AutoModelForCausalLM

    first, second = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (trial.model, trial.folder / "exported")
    )
    assert first.keys() == second.keys()
    trial.found["moved"] = max(float((first[name] - second[name]).abs().max()) for name in first)
    assert 0 < trial.found["moved"] < 0.1


def serve(trial: Trial) -> None:
    """The client of OpenAI asks a served model."""
    import openai

    trial.train()
    watch = trial.start("serve", "runs/real", f"--port={PORT}", "--max-context=256")
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{PORT}/v1", api_key="none", max_retries=0)
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                (model,) = client.models.list().data
                break
            except openai.APIConnectionError:
                assert watch.process.poll() is None, "the server has ended"
                assert time.monotonic() < end, "the server does not answer"
                time.sleep(0.5)
        question = {"role": "user", "content": "What is 2 + 3? Answer with the number only."}
        answer = client.chat.completions.create(model=model.id, messages=[question], max_tokens=16, temperature=0)
        parts = client.chat.completions.create(
            model=model.id, messages=[question], max_tokens=16, temperature=0, stream=True
        )
        streamed = "".join(part.choices[0].delta.content or "" for part in parts if part.choices)
        trial.found["answer"] = answer.choices[0].message.content
        assert streamed == trial.found["answer"], (streamed, trial.found["answer"])
    finally:
        watch.process.send_signal(signal.SIGINT)
        watch.process.wait(60)


def use_tool(trial: Trial) -> None:
    """Episodes in which the model may call a calculator, in the format of its own chat template if it has one."""
    environment = {"type": "calculator", "options": {"cost": 0.0}, "max_turns": 2, "max_episode_tokens": 128}
    if not any("tools" in file.read_text(encoding="utf-8") for file in trial.model.glob("*template*")):
        environment["tool_format"] = "hermes"
    steps = trial.train(
        {
            "environment": environment,
            "reward": None,
            "data": {"train": {"path": "train.jsonl"}, "evaluation": {"path": "test.jsonl"}, "max_prompt_tokens": 384},
            "rollout": {"max_response_tokens": 64, "max_sequences": 16},
            "batch": {"prompts_per_step": 4, "responses_per_prompt": 4, "micro_batch_tokens": 512},
        }
    )
    trial.found["calls"] = sum(row.get("tool/calls/calculate", 0.0) for row in steps)
    trial.found["refused"] = sum(row.get("tool/refused/calculate", 0.0) for row in steps)


def imitate(trial: Trial, **optimizer: object) -> None:
    """Supervised fine-tuning on right answers."""
    data = {"path": "train.jsonl", "prompt": "question", "response": "answer"}
    held_out = {"path": "test.jsonl", "prompt": "question", "answer": "answer"}
    steps = trial.train(
        {
            "workflow": "sft",
            "data": {
                "train": data,
                "evaluation": held_out,
                "max_prompt_tokens": trial.prompt_tokens,
                "max_response_tokens": 16,
            },
            "reward": {"exact_match": 1.0},
            "batch": {"prompts_per_step": 16, "responses_per_prompt": 1, "micro_batch_tokens": 256},
            "optimizer": {"learning_rate": 1e-5, **optimizer},
            "steps": 8,
        }
    )
    trial.found["loss"] = [steps[0]["policy/loss"], steps[-1]["policy/loss"]]
    assert trial.found["loss"][1] < trial.found["loss"][0], trial.found["loss"]


def quantize_states(trial: Trial) -> None:
    """The same with moments of 8 bits, which a package makes that is not installed everywhere."""
    if find_spec("torchao") is None:
        raise RuntimeError("torchao is not installed: pip install --editable '.[adamw-8bit]'")
    imitate(trial, type="adamw_8bit")


def judge(trial: Trial) -> None:
    """The model itself says how good its answers are."""
    path = {"path": str(trial.model), "compute_dtype": "float32"}
    asked = {
        "role": "judge",
        "prompt": "Question: {prompt}\nAnswer: {response}\nRate it from {low} to {high}. Write the number only.",
        "parse": r"([1-5])",
        "scale": [1, 5],
        "max_answer_tokens": 16,
        "max_question_tokens": 192,
        "timeout_s": 600,
    }
    steps = trial.train(
        {
            "models": {"policy": path, "judge": path},
            "reward": {"judge": asked},
            "guards": {"reward_failures_limit": 0.95},  # a small model may not follow the question
        }
        | NO_REFERENCE
    )
    trial.found["reward"] = steps[-1]["reward/mean"]
    trial.found["ungraded"] = max(row["judge/failed_share"] for row in steps)


FEATURES: Mapping[str, Callable[[Trial], None]] = {
    "template": template,
    "reward": reward,
    "one worker": lambda trial: trial.learn({}),
    "two workers": lambda trial: trial.learn({}, 2),
    "tp": split_heads,
    "cp 2": lambda trial: trial.learn({"layout": {"policy": {"cp": 2}}}, 2),
    "adapters": lambda trial: trial.learn(
        {"models": {"policy": {"path": str(trial.model), "compute_dtype": "float32", "lora": {"rank": 8}}}}
    ),
    "pools, one step ahead": lambda trial: trial.learn(APART | {"channels": {"rollout": {"capacity": 1}}}, 2),
    "continuous": lambda trial: trial.learn(
        APART | NO_REFERENCE | {"channels": {"rollout": {"capacity": 1, "mode": "continuous"}}}, 2
    ),
    "kill and resume": kill_and_resume,
    "eval": evaluate,
    "export": export,
    "serve": serve,
    "sft": imitate,
    "sft, states in bfloat16": lambda trial: imitate(trial, state_dtype="bfloat16"),
    "sft, states of 8 bits": quantize_states,
    "sft, muon": lambda trial: imitate(trial, type="muon"),
    "sft, sgd": lambda trial: imitate(trial, type="sgd", learning_rate=0.01),
    "a judge": judge,
    "dpo": lambda trial: trial.train_pairs("dpo", "policy"),
    "reward model": lambda trial: trial.train_pairs("reward_model", "reward_model"),
    "a tool": use_tool,
}
"""What is run with each model, by name."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="folder of folders of models")
    parser.add_argument("--only", nargs="*", help="names of folders; all by default")
    parser.add_argument("--features", nargs="*", choices=FEATURES, default=list(FEATURES), metavar="FEATURE")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    models = sorted(path.parent.resolve() for path in options.models.glob("*/config.json"))
    models = [model for model in models if not options.only or model.name in options.only]
    if not models:
        sys.exit(f"{options.models} has no folder with a config.json: name a folder that holds folders of models")
    results = json.loads(options.results.read_text(encoding="utf-8")) if options.results.exists() else {"models": {}}
    results |= machine_and_packages()
    failed = 0
    for model in models:
        for name in options.features:
            found = try_feature(model, name)
            failed += "error" in found
            results["models"].setdefault(model.name, {})[name] = found
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{model.name}, {name}: {line(found)}", flush=True)
    print(table(results))
    sys.exit(1 if failed else 0)


def try_feature(model: Path, name: str) -> Found:
    """What was measured with a feature; `error` if it failed."""
    folder = FOLDER / model.name / name.replace(" ", "-").replace(",", "")
    shutil.rmtree(folder, ignore_errors=True)
    write_word_problems(folder)
    trial, begin = Trial(model, folder, keep_one_length(folder, model)), time.monotonic()
    try:
        FEATURES[name](trial)
    except Exception as error:  # noqa: BLE001 - it is reported, and the other features are tried
        trial.found["error"] = f"{type(error).__name__}: {error}"
    trial.found["seconds"] = time.monotonic() - begin
    for path in ("runs", "exported"):
        shutil.rmtree(folder / path, ignore_errors=True)
    return trial.found


def keep_one_length(folder: Path, model: Path) -> int:
    """Keep the problems whose prompts have the most frequent number of tokens, which is returned."""
    from transformers import AutoTokenizer

    tokenizer, kept = AutoTokenizer.from_pretrained(model), dict[Path, list[tuple[int, dict[str, Any]]]]()
    for path in (folder / "train.jsonl", folder / "test.jsonl"):
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        asked = [[{"role": "user", "content": row["question"]}] for row in rows]
        texts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        lengths = map(len, tokenizer(texts, add_special_tokens=False)["input_ids"])
        kept[path] = [*zip(lengths, rows, strict=True)]
    ((longest, _),) = Counter(length for length, _ in next(iter(kept.values()))).most_common(1)
    for path, measured in kept.items():
        write_rows(path, [row for length, row in measured if length == longest])
    return longest


def machine_and_packages() -> Found:
    """The machine, and the versions of packages."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory().total
    return {
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "machine": f"{cores} cores, {platform.machine()}, {memory >> 30} GiB",
    }


def conditions(results: Found) -> str:
    """The machine and the packages, in a sentence."""
    return f"{results['machine']}; {', '.join(f'{name} {number}' for name, number in results['packages'].items())}."


def line(found: Found) -> str:
    """The figures of a feature in a line."""
    parts = [f"{found['seconds']:.0f} s"]
    if "peak_bytes" in found:
        parts.append(
            f"{found['peak_bytes'] / 2**30:.2f} GiB, {found['peak_bytes'] / found['planned_bytes']:.2f} of the plan"
        )
    if "of_plan_by_rank" in found:
        parts[-1] += f" ({', '.join(f'{share:.2f}' for share in found['of_plan_by_rank'])} by rank)"
    parts += [
        f"{name} {found[name]:.2g}" for name in ("tp", "mismatch", "calls", "refused", "ungraded") if name in found
    ]
    parts += ["loss " + " → ".join(f"{loss:.3f}" for loss in found["loss"])] if "loss" in found else []
    return f"FAILED: {found['error']}" if "error" in found else ", ".join(parts)


def table(results: Found) -> str:
    """A row for each feature and a column for each model, in Markdown."""
    models = list(results["models"])
    lines = [f"| feature | {' | '.join(models)} |", f"| --- |{' --- |' * len(models)}"]
    for name in FEATURES:
        cells = [line(found[name]) if name in found else "not run" for found in results["models"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
