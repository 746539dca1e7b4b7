"""A reward model learns an order, is read by other software, and teaches a policy."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from examples.preferences.prepare import prepare
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, run
from tests.preferences import PAIR_DATA
from tests.tiny import tiny_model, write_recipe
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from leaderless.algorithms.loss_terms import bradley_terry
from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.batch import Batch, Jagged
from leaderless.models.value_model import load_value_model
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.preferences import with_ends
from leaderless.worker.checkpoint.shards import read_tensors

RECIPES = ROOT / "recipes/preferences"


def metrics(folder: Path, name: str) -> list[dict[str, float]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def train(ranks: RankPool, folder: Path, recipe: str, *changes: str, num_ranks: int = 1) -> None:
    changes = (*changes, "run.timeout_s=120")
    outcome = run(ranks, folder, "train", RECIPES / recipe, *changes, num_ranks=num_ranks)
    assert outcome.code == 0, outcome.errors


def test_a_reward_model_learns_an_order_and_teaches_a_policy(ranks: RankPool, tmp_path: Path) -> None:
    prepare(tmp_path / "runs/preferences")
    train(ranks, tmp_path, "reward_model.yaml", "steps=20", "checkpoint.every_steps=20")
    learned = metrics(tmp_path, "letters-reward-model")
    assert learned[-1]["evaluation/accuracy"] >= 0.95
    out = tmp_path / "runs/preferences/reward_model"
    exported = run(ranks, tmp_path, "export", "runs/letters-reward-model", out, "--role", "reward_model")
    assert exported.code == 0, exported.errors
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert model.config.num_labels == 1
    with torch.no_grad():
        texts = [f"b:{'a' * count}{'c' * (5 - count)}{tokenizer.eos_token}" for count in range(6)]
        scores = [float(model(torch.tensor([tokenizer.encode(text)])).logits) for text in texts]
    assert all(before < after for before, after in pairwise(scores)), scores
    same = dict(load_value_model(ModelConfig(path=str(out)), "reward_model").model.named_parameters())
    torch.testing.assert_close(same["score.weight"], model.score.weight)
    offset = torch.ones(1)
    (checkpoint,) = (tmp_path / "runs/letters-reward-model/checkpoints").iterdir()
    read_tensors(checkpoint / "reward_model", {"weights.score.bias": offset})
    assert float(offset) == 0, "it has learned no offset that would be lost"
    train(ranks, tmp_path, "rlhf.yaml", "steps=6", "algorithm.reward_model.weight=0.5")
    steps = metrics(tmp_path, "letters-rlhf")
    rewards = [step["reward/reward_model"] for step in steps]
    assert rewards[-1] > rewards[0] + 1
    assert [2 * step["reward/mean"] for step in steps] == pytest.approx(rewards, rel=1e-5)
    pools = 'layout={rollout: {ranks: "0"}, policy: {ranks: "0"}, reward: {ranks: "1"}}'
    changes = ("name=pools", "steps=2", "algorithm.reward_model.weight=0.5", pools)
    train(ranks, tmp_path, "rlhf.yaml", *changes, num_ranks=2)
    for alone, apart in zip(steps[:2], metrics(tmp_path, "pools"), strict=True):
        for key in ("reward/reward_model", "reward/mean", "reward/std", "policy/grad_norm", "policy/entropy"):
            assert apart[key] == pytest.approx(alone[key], rel=1e-4), key


def test_a_reward_model_with_adapters_is_exported_whole(ranks: RankPool, tmp_path: Path) -> None:
    prepare(tmp_path / "runs/preferences")
    adapted = "models.reward_model={path: runs/preferences/model, lora: {rank: 4, alpha: 8}}"
    changes = ("steps=8", "checkpoint.every_steps=8", "evaluation.every_steps=8", "evaluation.max_prompts=12")
    train(ranks, tmp_path, "reward_model.yaml", adapted, *changes)
    name, out = "letters-reward-model", tmp_path / "whole"
    refused = run(ranks, tmp_path, "export", f"runs/{name}", out, "--role", "reward_model")
    assert refused.code == 2
    assert "pass --merge" in refused.errors
    exported = run(ranks, tmp_path, "export", f"runs/{name}", out, "--role", "reward_model", "--merge")
    assert exported.code == 0, exported.errors
    model, tokenizer = AutoModelForSequenceClassification.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    rows = [json.loads(line) for line in (tmp_path / "runs/preferences/held_out.jsonl").read_text().splitlines()[:12]]
    with torch.no_grad():
        scores = [
            [float(model(torch.tensor([tokenizer.encode(f"{row['prompt']}{row[side]}{tokenizer.eos_token}")])).logits)]
            for row in rows
            for side in ("chosen", "rejected")
        ]
    margins = torch.tensor(scores).view(-1, 2) @ torch.tensor([1.0, -1.0])
    assert float(margins.abs().mean()) > 1e-3, "it has learned something"
    assert metrics(tmp_path, name)[-1]["evaluation/margin"] == pytest.approx(float(margins.mean()), abs=1e-5)


@pytest.mark.parametrize(
    ("workflow", "settings", "message"),
    [
        (
            "reward_model",
            PAIR_DATA | {"images": "image"},
            r"models\.reward_model: models of type qwen2 read text alone",
        ),
        ("rlhf", {"path": "a.jsonl", "images": "image"}, r"models\.reward_model: models of type qwen2 read text alone"),
        ("reward_model", {"path": "a.jsonl"}, "the reward model of node 'reward_model' learns from pairs: name chosen"),
    ],
)
def test_data_that_a_reward_model_cannot_use_are_refused(
    tmp_path: Path, workflow: str, settings: Mapping[str, str], message: str
) -> None:
    models = {name: tiny_model() for name in ("policy", "reward_model")}
    models = models if workflow == "rlhf" else {"reward_model": tiny_model()}
    changes = {"workflow": workflow, "models": models, "data.train": settings, "reward": {}}
    changes |= {"batch.micro_batch_tokens": 8192}
    recipe = load_recipe(write_recipe(tmp_path, tiny_model(), changes)).recipe
    with pytest.raises(RecipeError, match=message):
        make_plan(recipe, resolve_workflow(workflow), Cluster(1))


def test_a_reward_model_depends_on_neither_ranks_nor_micro_batches(ranks: RankPool, tmp_path: Path) -> None:
    prepare(tmp_path / "runs/preferences")
    changes = ["steps=2", "evaluation.every_steps=2", "evaluation.max_prompts=21", "checkpoint.every_steps=0"]
    found = []
    for num_ranks, tokens in ((1, 2048), (2, 20)):
        name = f"name=on-{num_ranks}"
        train(
            ranks,
            tmp_path,
            "reward_model.yaml",
            name,
            *changes,
            f"batch.micro_batch_tokens={tokens}",
            num_ranks=num_ranks,
        )
        lines = metrics(tmp_path, f"on-{num_ranks}")
        kept = ("reward_model/", "evaluation/")
        found.append([{key: value for key, value in line.items() if key.startswith(kept)} for line in lines])
    for first, second in zip(*found, strict=True):
        assert second == pytest.approx(first, rel=1e-3, abs=1e-5)


def test_the_loss_is_that_of_bradley_and_terry() -> None:
    chosen, rejected, margins = torch.tensor([[0.5, 2.0], [0.5, -1.0], [0.0, 1.0]], dtype=torch.float64)
    found = bradley_terry(chosen, rejected, margins, centering=0.1)
    expected = [math.log(2) + 0.1, math.log(1 + math.exp(-2.0)) + 0.1]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    assert bradley_terry(chosen[:1], rejected[:1], margins[:1], centering=0.0).item() == pytest.approx(math.log(2))


def test_a_sample_is_scored_at_its_last_token_alone() -> None:
    rows = [[5, 6, 7], [8]]
    tokens = Jagged.from_lists(rows, torch.int64, "tokens")
    mask = Jagged(torch.ones(4, dtype=torch.bool), tokens.lengths, "tokens")
    ended = with_ends(Batch(torch.tensor([1, 2]), {"tokens": tokens, "response_mask": mask}))
    assert ended.jagged("tokens").to_lists() == [[5, 6, 7, 0], [8, 0]]
    assert ended.jagged("response_mask").to_lists() == [[0, 0, 0, 1], [0, 1]]
