"""Trains with TRL and with this package from the same weights, and compares every step.

Run it in an environment that has `trl` next to this package's dependencies:

    PYTHONPATH=src:. python benchmarks/training_trl.py

A test trains with DPO again, and compares with what is stored.
DPO reads the same pairs in the same order. For GRPO, TRL is given the responses that this package has sampled in each
step, as the noise of sampling is not the same; rewards, advantages, losses and updates are its own. The result is
written to `docs/performance/training_trl.json`.
"""

# ruff: noqa: ANN401 - where types are checked, TRL is not installed
from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from examples.from_trl.rewards import num_unique_letters
from examples.preferences.prepare import prepare
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless import Run
from leaderless.observability.run_directory import RunDirectory

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

STORED = Path(__file__).parents[1] / "docs/performance/training_trl.json"
NUM_STEPS, PAIRS_PER_STEP, RESPONSES = 50, 16, 8
LEARNING_RATE = 1e-3
COMMON: Mapping[str, Any] = {
    "max_steps": NUM_STEPS,
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "constant",
    "optim": "adamw_torch",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
}
"""Settings of both of TRL's trainers; where they say nothing, its defaults are those of a recipe."""


def main() -> None:
    """Compare both workflows, and store the result."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        found = {"dpo": compare_dpo(folder), "grpo": compare_grpo(folder)}
    versions = {package: version(package) for package in ("trl", "torch", "transformers")}
    STORED.write_text(json.dumps({"versions": versions, **found}, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=2))


def compare_dpo(folder: Path) -> dict[str, float]:
    """The differences between both ways to learn from the same pairs."""
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    steps, weights = _ours(folder, dpo_recipe(folder))
    lines = (folder / "some.jsonl").read_text(encoding="utf-8").splitlines()
    config = DPOConfig(
        output_dir=f"{folder}/trl-dpo",
        per_device_train_batch_size=PAIRS_PER_STEP,
        train_sampling_strategy="sequential",
        beta=0.1,
        **COMMON,
    )
    load = AutoModelForCausalLM.from_pretrained
    trainer = DPOTrainer(
        load(folder / "model", dtype=torch.float32),
        ref_model=load(folder / "model", dtype=torch.float32),
        args=config,
        train_dataset=Dataset.from_list([json.loads(line) for line in lines]),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
    )
    losses, norms = _theirs(trainer)
    return _differences(folder, steps, weights, trainer, {"policy/loss": losses, "policy/grad_norm": norms})


def compare_grpo(folder: Path) -> dict[str, float]:
    """The differences between both ways to learn from the same responses."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    recipe = _recipe(folder, "grpo", {"path": f"{folder}/prompts.jsonl"}) | {
        "reward": {f"{num_unique_letters.__module__}:{num_unique_letters.__name__}": 1.0},
        "batch": {"prompts_per_step": len(prompts), "responses_per_prompt": RESPONSES},
        "rollout": {"max_response_tokens": 6},
        "algorithm": {"aggregation": "token_mean", "advantage": {"type": "grpo", "epsilon": 1e-4}},
    }
    steps, weights = _ours(folder, recipe)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    sampled = [_responses(RunDirectory(folder / "runs/grpo"), step + 1, tokenizer) for step in range(NUM_STEPS)]

    def replay(asked: Sequence[str], trainer: Any) -> dict[str, Any]:
        ids = [tokenizer.encode(prompt) for prompt in asked]
        return {"prompt_ids": ids, "completion_ids": sampled[trainer.state.global_step], "logprobs": None}

    config = GRPOConfig(
        output_dir=f"{folder}/trl-grpo",
        per_device_train_batch_size=len(prompts) * RESPONSES,
        num_generations=RESPONSES,
        max_completion_length=6,
        shuffle_dataset=False,
        **COMMON,
    )
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32),
        reward_funcs=num_unique_letters,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=tokenizer,
        rollout_func=replay,
    )
    losses, norms = _theirs(trainer)
    rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
    measured = {"policy/loss": losses, "policy/grad_norm": norms, "reward/mean": rewards}
    return _differences(folder, steps, weights, trainer, measured)


def dpo_recipe(folder: Path) -> dict[str, Any]:
    """The recipe of DPO, and its file: as many pairs as there are in all steps."""
    lines = (folder / "pairs.jsonl").read_text(encoding="utf-8").splitlines()[: NUM_STEPS * PAIRS_PER_STEP]
    (folder / "some.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    data = {"path": f"{folder}/some.jsonl", "chosen": "chosen", "rejected": "rejected"}
    return _recipe(folder, "dpo", data) | {"batch": {"prompts_per_step": PAIRS_PER_STEP}}


def _recipe(folder: Path, workflow: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipes of both workflows have in common."""
    limits = {"max_prompt_tokens": 4, "max_response_tokens": 6}
    return {
        "name": workflow,
        "workflow": workflow,
        "models": {"policy": {"path": f"{folder}/model", "compute_dtype": "float32"}},
        "data": {"train": {"template": "plain", **data}, "shuffle": False, **limits},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "checkpoint": {"every_steps": NUM_STEPS},
        "run": {"directory": f"{folder}/runs", "recorded_prompts": 4},
        "steps": NUM_STEPS,
    }


def _ours(folder: Path, recipe: Mapping[str, Any]) -> tuple[list[Mapping[str, float]], Mapping[str, Tensor]]:
    """The metrics of each step of a run, and the weights after the last one."""
    run, name = Run(recipe), recipe["name"]
    run.train()
    out = run.export(folder / f"ours-{name}")
    steps = [one for one in RunDirectory(folder / "runs" / name).read_metrics() if one["step"]]
    return steps, AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).state_dict()


def _theirs(trainer: Any) -> tuple[list[float], list[float]]:
    """The loss of each step of TRL's training, which its log rounds, and the norm of each gradient."""
    losses: list[float] = []
    compute = trainer.compute_loss

    def watched(*arguments: Any, **options: Any) -> Any:
        found = compute(*arguments, **options)
        losses.append(float(found[0] if isinstance(found, tuple) else found))
        return found

    trainer.compute_loss = watched
    trainer.train()
    return losses, [one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one]


def _responses(directory: RunDirectory, step: int, tokenizer: Any) -> list[list[int]]:
    """The tokens of all responses of a step, those to a prompt together, in the order of the prompts."""
    (file,) = directory.samples.glob(f"step-{step:06}.*")
    samples = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    samples.sort(key=lambda sample: (sample["group_id"], sample["sample_id"]))
    assert {len(list(some)) for _, some in groupby(samples, lambda sample: sample["group_id"])} == {RESPONSES}
    return [[token for text in sample["tokens"]["text"] for token in tokenizer.encode(text)] for sample in samples]


def _differences(
    folder: Path,
    steps: Sequence[Mapping[str, float]],
    weights: Mapping[str, Tensor],
    trainer: Any,
    measured: Mapping[str, Sequence[float]],
) -> dict[str, float]:
    """The largest difference of each number over all steps, and that of the weights relative to how far they moved."""
    found: dict[str, float] = {"steps": len(steps)}
    for name, theirs in measured.items():
        ours = [step[name] for step in steps]
        assert len(ours) == len(theirs) == NUM_STEPS, (name, len(ours), len(theirs))
        found[f"{name}, first"], found[f"{name}, last"] = ours[0], ours[-1]
        found[f"{name}, difference"] = max(abs(one - other) for one, other in zip(ours, theirs, strict=True))
    begin = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).state_dict()
    end = trainer.model.state_dict()
    moved, apart = (
        torch.cat([(one[name] - end[name]).double().flatten() for name in begin]).norm() for one in (begin, weights)
    )
    found["weights, relative difference"] = float(apart / moved)
    return found


if __name__ == "__main__":
    main()
