"""The examples do what they say, with a tiny model in place of the quickstart's."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from examples.calculator.prepare import prepare as prepare_sums
from examples.environment.guess import prepare as prepare_guesses
from examples.from_trl.rewards import num_unique_letters
from examples.nim.prepare import prepare as prepare_nim
from examples.order_game.prepare import prepare as prepare_order
from examples.own_algorithm.algorithms import AgainstTheBest, SquaredRatioLoss
from examples.own_data.convert import convert
from examples.own_reward.rewards import digits_right, is_short
from examples.own_workflow.workflow import informative
from examples.search import prepare
from examples.tools.look import prepare as prepare_looks
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.tiny import tiny_model, write_additions
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless import RewardInput
from leaderless.algorithms import AdvantageInputs, LossInputs
from leaderless.algorithms.advantage import compute
from leaderless.config import load_recipe
from leaderless.observability.console import Display
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import read_workflow, resolve_workflow
from leaderless.worker.build.process import open_worker
from leaderless.worker.evaluate.evaluator import EvaluationStep
from leaderless.worker.rank_info import RankInfo

ROOT = Path(__file__).parents[2]
Numbers = dict[str, float]


def train_example(recipe: str, overrides: list[str], num_steps: int) -> list[Numbers]:
    """The numbers of some steps, as rank 0 logs them, with the held-out accuracy last."""
    os.chdir(ROOT)
    loaded = load_recipe(recipe, overrides)
    place = RankInfo.from_environment()
    plan = make_plan(loaded.recipe, resolve_workflow(loaded.recipe.workflow), Cluster(place.world_size))
    with open_worker(loaded.recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        steps = [worker.run_step() for _ in range(num_steps)]
        if worker.parts.evaluator is not None:
            steps.append(worker.parts.evaluator.run(EvaluationStep(lambda _: None)))
    return steps


def small(tmp_path: Path, *more: str) -> list[str]:
    """Overrides that make an example fast."""
    rows = write_additions(tmp_path / "train.jsonl")
    return [
        f"models.policy={tiny_model(num_layers=1)}",
        f"run.directory={tmp_path / 'runs'}",
        "loggers=[]",
        "run.timeout_s=60",
        "batch.prompts_per_step=6",
        f"data.train.path={rows}",
        *more,
    ]


def with_evaluation(tmp_path: Path) -> list[str]:
    return [f"data.evaluation.path={tmp_path / 'train.jsonl'}", "evaluation.max_prompts=4"]


def sample(response: str, answer: str) -> RewardInput:
    return RewardInput(prompt="", response=response, answer=answer, row={}, is_truncated=False)


def test_own_reward_trains_on_what_its_functions_say(ranks: RankPool, tmp_path: Path) -> None:
    assert digits_right(sample("135", "145")).value == pytest.approx(2 / 3)
    assert digits_right(sample("", "145")).value == 0
    assert [is_short(sample(text, "1")) for text in ("123", "1234")] == [1.0, 0.0]
    overrides = [*small(tmp_path), *with_evaluation(tmp_path)]
    (steps,) = ranks.run(1, train_example, "examples/own_reward/recipe.yaml", overrides, 2, init_group=False)
    for numbers in steps[:2]:
        weighted = numbers["reward/examples.own_reward.rewards:digits_right"]
        weighted += 0.1 * numbers["reward/examples.own_reward.rewards:is_short"]
        assert numbers["reward/mean"] == pytest.approx(weighted)
        assert numbers["reward/failed"] == 0
    assert "evaluation/mean@1" in steps[-1]


def test_a_reward_of_trl_gives_the_same_numbers_here(ranks: RankPool, tmp_path: Path) -> None:
    overrides = small(tmp_path, "run.recorded_prompts=6")
    (steps,) = ranks.run(1, train_example, "examples/from_trl/recipe.yaml", overrides, 1, init_group=False)
    (file,) = (tmp_path / "runs/from-trl/samples").iterdir()
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == 48
    assert [one["reward"] for one in samples] == num_unique_letters([one["response"] for one in samples])
    assert steps[0]["reward/failed"] == 0


def test_own_stage_takes_its_penalty_from_the_reward(ranks: RankPool, tmp_path: Path) -> None:
    overrides = [*small(tmp_path, "run.recorded_prompts=6"), *with_evaluation(tmp_path)]
    ranks.run(1, train_example, "examples/own_stage/recipe.yaml", overrides, 1, init_group=False)
    (file,) = (tmp_path / "runs/own-stage/samples").iterdir()
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(samples) == 48
    assert all(one["reward"] < one["details"]["exact_match"]["value"] for one in samples)


def test_own_environment_is_learned_from_scratch(ranks: RankPool, tmp_path: Path) -> None:
    """Ten steps suffice to see that it learns to answer with digits."""
    prepare_guesses(tmp_path)
    overrides = [
        f"models.policy={tmp_path / 'model'}",
        f"data.train.path={tmp_path / 'tasks.jsonl'}",
        f"run.directory={tmp_path / 'runs'}",
        "loggers=[]",
        "run.timeout_s=60",
        "batch.prompts_per_step=16",
    ]
    recipe = "examples/environment/recipe.yaml"
    (steps,) = ranks.run(1, train_example, recipe, overrides, 10, init_group=False, timeout_s=120)
    assert steps[0]["episode/failed"] == 0
    assert steps[0]["reward/mean"] == steps[0]["reward/environment"] < -1
    assert steps[-1]["reward/mean"] > steps[0]["reward/mean"] + 0.5


def test_calculator_is_called_by_a_model_that_was_shown_how(ranks: RankPool, tmp_path: Path) -> None:
    prepare_sums(tmp_path, num_sums=60)
    rows = [json.loads(line) for line in (tmp_path / "demonstrations.jsonl").read_text().splitlines()]
    assert any(row["response"].startswith("<tool_call>") for row in rows)
    (tmp_path / "train.jsonl").write_text(json.dumps({"question": "1200+34", "answer": "1234"}))
    overrides = [
        f"models.policy={tmp_path / 'model'}",
        f"data.train.path={tmp_path / 'train.jsonl'}",
        f"data.evaluation.path={tmp_path / 'test.jsonl'}",
        f"run.directory={tmp_path / 'runs'}",
        "loggers=[]",
        "run.timeout_s=60",
        "batch.prompts_per_step=4",
    ]
    (steps,) = ranks.run(1, train_example, "recipes/agents/calculator/grpo.yaml", overrides, 1, init_group=False)
    assert steps[0]["episode/failed"] == 0
    assert {"tool/calls/calculate", "tool/refused/calculate"} <= steps[0].keys()
    assert "evaluation/mean@1" in steps[-1]


def test_nim_is_played_by_an_untrained_model_against_itself(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("examples.nim.prepare.NUM_GAMES", 20)
    prepare_nim(tmp_path)
    overrides = [
        f"models.policy={tmp_path / 'model'}",
        f"data.train.path={tmp_path / 'train.jsonl'}",
        f"data.evaluation.path={tmp_path / 'test.jsonl'}",
        f"run.directory={tmp_path / 'runs'}",
        "loggers=[]",
        "run.timeout_s=60",
        "batch.prompts_per_step=2",
        "batch.responses_per_prompt=4",
    ]
    recipe = "recipes/agents/textarena/self_play.yaml"
    (steps,) = ranks.run(1, train_example, recipe, overrides, 1, init_group=False)
    assert steps[0]["episode/failed"] == 0
    assert steps[0]["reward/mean"] < 0, "who breaks the rules loses, and who has not moved yet has no reward"


def test_a_solver_computes_what_it_is_told_first_and_guesses_otherwise(ranks: RankPool, tmp_path: Path) -> None:
    """Without the planner, which knows nothing yet, no more than half of its results are right."""
    prepare_order(tmp_path)
    model, tokenizer = (kind.from_pretrained(tmp_path / "solver") for kind in (AutoModelForCausalLM, AutoTokenizer))
    for row in map(json.loads, (tmp_path / "tasks.jsonl").read_text().splitlines()):
        asked = torch.tensor([tokenizer.encode(f"{row['numbers']} {row['first']}")])
        assert tokenizer.decode(model(asked).logits[0, -1].argmax()) == row["result"]
        assert eval(row["expression"]) == int(row["result"])
    overrides = [
        *(f"models.{role}={tmp_path / role}" for role in ("planner", "solver")),
        f"data.train.path={tmp_path / 'tasks.jsonl'}",
        f"run.directory={tmp_path / 'runs'}",
        "loggers=[]",
        "run.timeout_s=60",
    ]
    (steps,) = ranks.run(1, train_example, "recipes/agents/order/dr_mas.yaml", overrides, 2, init_group=False)
    assert all(0.1 < 2 * step["reward/mean"] < 0.6 for step in steps), "of two agents, one is rewarded"


def test_tools_of_ones_own_are_called(ranks: RankPool, tmp_path: Path) -> None:
    prepare_looks(tmp_path)
    overrides = [
        f"models.policy={tmp_path / 'model'}",
        f"data.train.path={tmp_path / 'tasks.jsonl'}",
        f"run.directory={tmp_path / 'runs'}",
        "loggers=[]",
        "run.timeout_s=60",
        "batch.prompts_per_step=8",
    ]
    recipe = "examples/tools/recipe.yaml"
    (steps,) = ranks.run(1, train_example, recipe, overrides, 2, init_group=False)
    assert steps[0]["episode/failed"] == 0
    assert 0 < steps[0]["tool/calls"] == steps[0]["tool/calls/look"] < 0.5


@pytest.mark.parametrize("world_size", [1, 2])
def test_own_workflow_trains_on_groups_with_a_signal_only(ranks: RankPool, tmp_path: Path, world_size: int) -> None:
    assert read_workflow(ROOT / "examples/own_workflow/workflow.yaml") == informative()
    # An untrained model writes a digit now and then, so that some groups have a signal.
    overrides = [*small(tmp_path, r"reward={format: {pattern: .*\d.*}}"), *with_evaluation(tmp_path)]
    recipe = "examples/own_workflow/recipe.yaml"
    first, second = ranks.run(world_size, train_example, recipe, overrides, 2, init_group=False)[0][:2]
    assert 0 < first["informative/kept"] == 1 - first["group/no_signal"]
    assert first["policy/kl"] == pytest.approx(0, abs=1e-6)
    assert second["policy/kl"] > 0


def test_own_algorithm_trains_with_its_classes(ranks: RankPool, tmp_path: Path) -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 0.0, 2.0]), torch.tensor([7, 7, 7, 7, 8])
    inputs = AdvantageInputs(
        rewards=rewards,
        final_rewards=rewards,
        penalties=torch.zeros(5),
        is_valid=torch.tensor([True, True, True, False, True]),
        is_trained=torch.ones(5, dtype=torch.bool),
        lengths=torch.ones(5, dtype=torch.int64),
        group_ids=groups,
        episode_ids=torch.arange(5),
        columns={"truncated": torch.zeros(5, dtype=torch.bool)},
        sum_over_ranks=lambda values: values,
        step=1,
    )
    output = compute(AgainstTheBest(type="examples.own_algorithm.algorithms:AgainstTheBest"), inputs)
    assert output.advantages.tolist() == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0])
    assert output.metrics["best/distance"].tolist() == [0, 1, 1, 0, 0]
    log_probs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = SquaredRatioLoss(type="examples.own_algorithm.algorithms:SquaredRatioLoss")
    is_counted, lengths = torch.ones(2, dtype=torch.bool), torch.tensor([2])
    tokens = LossInputs(
        log_probs, log_probs.detach(), torch.tensor([2.0, -1.0]), lengths, is_counted, ~is_counted, {}, 1
    )
    loss.compute(tokens).loss.sum().backward()
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [-2, 1], "on policy, the plain policy gradient"
    # An untrained model writes a digit now and then, so that some groups have a signal.
    overrides = [*small(tmp_path, r"reward={format: {pattern: .*\d.*}}"), *with_evaluation(tmp_path)]
    (steps,) = ranks.run(1, train_example, "examples/own_algorithm/recipe.yaml", overrides, 2, init_group=False)
    assert steps[0]["policy/grad_norm"] > 0
    assert steps[0]["group/no_signal"] < 1


def test_own_data_grades_kinds_of_rows_by_their_own_rewards(ranks: RankPool, tmp_path: Path) -> None:
    convert(ROOT / "examples/own_data/additions.csv", tmp_path / "rows.parquet")
    overrides = [*small(tmp_path, "run.recorded_prompts=6"), f"data.train.path={tmp_path / 'rows.parquet'}"]
    ranks.run(1, train_example, "examples/own_data/recipe.yaml", overrides, 1, init_group=False)
    (file,) = (tmp_path / "runs/own-data/samples").iterdir()
    samples = [json.loads(line) for line in file.read_text().splitlines()]
    by_answer = {one["answer"]: set(one["details"]) for one in samples}
    for answer, rewards in by_answer.items():
        is_easy = answer in {42, 92, 65, 48}
        assert rewards == ({"math", "format"} if is_easy else {"math"}), answer


def test_search_plays_episodes_in_which_an_untrained_model_finds_nothing(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "NUM_DEMONSTRATIONS", 1)
    prepare.prepare(tmp_path)
    overrides = [f"run.directory={tmp_path / 'runs'}", f"environment.options.pages={tmp_path / 'pages.jsonl'}"]
    overrides += [
        f"data.{kind}.path={tmp_path / name}.jsonl" for kind, name in (("train", "train"), ("evaluation", "test"))
    ]
    overrides += [f"models.policy={tmp_path / 'model'}", "batch.prompts_per_step=2", "evaluation.max_prompts=2"]
    recipe = "recipes/agents/search/grpo.yaml"
    (steps,) = ranks.run(1, train_example, recipe, [*overrides, "loggers=[]"], 1, init_group=False)
    assert steps[0]["episode/turns"] > 1, "it is told what is valid, and tries again"
    assert steps[0]["episode/failed"] == steps[0]["reward/failed"] == steps[0]["reward/mean"] == 0
    assert steps[-1]["evaluation/mean@1"] == 0
