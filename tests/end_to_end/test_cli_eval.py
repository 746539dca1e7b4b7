"""`leaderless eval` and `leaderless export`: scores of a trained model, and its use by others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, metrics, run, start, succeed
from tests.tiny import tiny_model, tiny_recipe, write_additions, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import end_tokens, load_tokenizer
from leaderless.rollout.engine import Request, SamplingParams, generate
from leaderless.rollout.native.engine import NativeEngine
from leaderless.run.planned_run import plan_evaluation

PROMPTS = ["1+2=", "3+4=", "7", "9+9=18 1+1="]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Two digits anywhere count as right; an untrained model writes them now and then."""
    held_out = write_additions(tmp_path / "test.jsonl", 13)
    changes = {
        "data.evaluation": {"path": str(held_out), "prompt": "question", "answer": "answer", "template": "plain"},
        "reward": {"format": {"pattern": r".*\d.*\d.*"}},
        "evaluation": {"responses_per_prompt": 4, "temperature": 1.0},
        "optimizer.learning_rate": 3e-3,
        "checkpoint": {"every_steps": 1},
    }
    return write_recipe(tmp_path, tiny_model(num_layers=1), changes)


def scores(output: str) -> dict[str, float]:
    numbers: dict[str, float] = json.loads(output[output.index("{") :])
    return numbers


def test_eval_gives_the_scores_of_training_from_recipe_run_and_checkpoint(
    ranks: RankPool, tmp_path: Path, recipe: Path
) -> None:
    succeed(ranks, tmp_path, "train", recipe, "evaluation.every_steps=1")
    logged = [
        {k: v for k, v in line.items() if k.startswith("evaluation/")} for line in metrics(tmp_path / "runs/tiny")
    ]
    names = "mean@4", "pass@2", "pass@4", "failed", "truncated", "response_tokens"
    assert logged[0].keys() == {f"evaluation/{name}" for name in names}
    assert 0 < logged[0]["evaluation/mean@4"] < logged[0]["evaluation/pass@2"] < logged[0]["evaluation/pass@4"] < 1
    run_folder = tmp_path / "runs/tiny"
    for where, expected in (
        ((recipe,), logged[0]),
        ((run_folder,), logged[2]),
        ((run_folder, "--checkpoint", run_folder / "checkpoints/step-000001"), logged[1]),
        ((recipe, "--checkpoint", run_folder), logged[2]),
    ):
        assert scores(succeed(ranks, tmp_path, "eval", *where, "--json")) == pytest.approx(expected)
    shown = run(ranks, tmp_path, "eval", run_folder)
    assert f"tiny, step-000002 on {tmp_path}/test.jsonl\n" in shown.output
    assert f"loading {run_folder}/checkpoints/step-000002" in shown.errors.replace("\n", "")
    assert tiny_model() not in shown.errors.replace("\n", "")
    assert len({tuple(line.values()) for line in logged}) == 3, "training changes the scores"
    table = succeed(ranks, tmp_path, "eval", recipe)
    assert f"mean@4 │ {logged[0]['evaluation/mean@4']:.4f}" in " ".join(table.split())
    assert f"response_tokens │ {logged[0]['evaluation/response_tokens']:.1f}" in " ".join(table.split())
    cut = logged[0]["evaluation/truncated"]
    assert 0 < cut < 1
    assert f"{cut:.1%} were cut at rollout.max_response_tokens=" in table


def test_eval_does_not_depend_on_the_number_of_workers(ranks: RankPool, tmp_path: Path, recipe: Path) -> None:
    single = scores(succeed(ranks, tmp_path, "eval", recipe, "--json"))
    # More workers than prompts of a step, and a layout for training: neither affects evaluation.
    changes = ("batch.prompts_per_step=1", "layout={rollout: {ranks: 0-1}, policy: {ranks: 2-3}}")
    several = succeed(ranks, tmp_path, "eval", recipe, *changes, "--json", num_ranks=2)
    assert scores(several) == pytest.approx(single)
    outcome = finish(start(tmp_path, "leaderless", "eval", recipe, "--workers", 2, "--json"))
    assert outcome.code == 0, outcome.errors
    assert json.loads(outcome.output) == pytest.approx(single), "nothing but JSON is printed"


def test_eval_says_what_it_misses(ranks: RankPool, tmp_path: Path, recipe: Path) -> None:
    for override, words in (
        ("data.evaluation=null", "must name the held-out prompts"),
        ("reward={}", "must name a reward"),
        ("evaluation.metric=maths", "is not one of the recipe's rewards (format)"),
        ("models={critic: a/b}", "has no model for the role 'policy'"),
        ("evaluation.temperature=0", "greedy decoding gives the same response every time"),
    ):
        outcome = run(ranks, tmp_path, "eval", recipe, override)
        assert outcome.code == 2
        assert words in " ".join(outcome.errors.split())
    outcome = run(ranks, tmp_path, "eval", recipe, "--checkpoint", tmp_path)
    assert outcome.code == 2
    assert "neither a checkpoint nor the folder of a run" in outcome.errors


def native_greedy(folder: str, prompts: list[str]) -> list[str]:
    """The answers of the native engine at temperature 0."""
    config = ModelConfig(path=folder)
    tokenizer = load_tokenizer(config, "policy")
    engine = NativeEngine(
        load_causal_lm(config, "policy"), tokenizer, end_tokens(config, tokenizer), 8, torch.device("cpu")
    )
    requests = [Request(tokenizer.encode(prompt), [number]) for number, prompt in enumerate(prompts)]
    groups = generate(engine, requests, SamplingParams(SamplingConfig(temperature=0), 12, (), 0))
    return [tokenizer.decode(group[0].tokens, skip_special_tokens=True) for group in groups]


@pytest.mark.parametrize(("family", "num_ranks"), [("qwen2", 2), ("qwen3", 1)])
def test_transformers_loads_an_exported_model_and_decodes_the_same_greedy_text(
    ranks: RankPool, tmp_path: Path, recipe: Path, family: str, num_ranks: int
) -> None:
    model = tiny_model(family)  # type: ignore[arg-type]
    succeed(ranks, tmp_path, "train", recipe, f"models.policy.path={model}", num_ranks=num_ranks)
    output = succeed(ranks, tmp_path, "export", tmp_path / "runs/tiny", tmp_path / "out")
    assert f"model: {tmp_path}/out" in output
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    before = AutoModelForCausalLM.from_pretrained(model)
    changed = [not torch.equal(a, b) for a, b in zip(exported.parameters(), before.parameters(), strict=True)]
    assert all(changed), "these are the trained weights"
    texts = []
    for prompt in PROMPTS:
        tokens = tokenizer(prompt, return_tensors="pt")
        answer = exported.generate(**tokens, max_new_tokens=12, do_sample=False)[0, tokens["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(answer, skip_special_tokens=True))
    assert native_greedy(str(tmp_path / "out"), PROMPTS) == texts
    assert len(set(texts)) > 1
    # The exported model gives the answers of the checkpoint.
    by_checkpoint = scores(succeed(ranks, tmp_path, "eval", tmp_path / "runs/tiny", "--json"))
    exported_too = (recipe, f"models.policy.path={tmp_path / 'out'}", "--json")
    assert scores(succeed(ranks, tmp_path, "eval", *exported_too)) == pytest.approx(by_checkpoint)


def test_export_overwrites_nothing_and_names_the_roles_there_are(ranks: RankPool, tmp_path: Path, recipe: Path) -> None:
    succeed(ranks, tmp_path, "train", recipe, "steps=1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    for arguments, words in (
        (("runs/tiny", "full"), "is not empty: name another one"),
        (("runs/tiny", "out", "--role", "critic"), "has no role 'critic' (there are: policy)"),
        (("runs", "out"), "neither a checkpoint nor the folder of a run"),
    ):
        outcome = run(ranks, tmp_path, "export", *arguments)
        assert outcome.code == 2
        assert words in " ".join(outcome.errors.replace("│", " ").split())
        assert "Traceback" not in outcome.errors
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["file"]
    (tmp_path / "empty").mkdir()
    succeed(ranks, tmp_path, "export", "runs/tiny/checkpoints/step-000001", "empty")
    assert (tmp_path / "empty/model.safetensors").exists()


def test_eval_needs_no_reward_where_an_environment_gives_it(tmp_path: Path) -> None:
    held_out = {"path": str(write_additions(tmp_path / "test.jsonl", 13))}
    changes: dict[str, object] = {"data.evaluation": held_out, "reward": {}}
    changes["environment"] = {"type": "reasoning_gym", "options": {"dataset": "chain_sum"}, "max_episode_tokens": 64}
    (node,) = plan_evaluation(tiny_recipe(tmp_path, tiny_model(), changes), None, 1).plan.nodes
    assert node.name == "answer"
    del changes["environment"]
    with pytest.raises(RecipeError, match="must name a reward, or the recipe an environment"):
        plan_evaluation(tiny_recipe(tmp_path, tiny_model(), changes), None, 1)
