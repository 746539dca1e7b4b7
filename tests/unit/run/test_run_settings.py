"""Arguments that a Python program passes to `Run` become a recipe."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from datasets import Dataset
from tests.tiny import tiny_model, write_recipe
from transformers import AutoModelForCausalLM, AutoTokenizer

from leaderless import RewardInput, Run, Workflow
from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.config import RecipeError
from leaderless.config.data import TrainingSetConfig
from leaderless.planner.workflow import read as workflows
from leaderless.planner.workflow import resolve_workflow
from leaderless.run.planned_run import plan_training

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]


def is_right(sample: RewardInput) -> float:
    return float(sample.response == sample.answer)


def make_run(folder: Path, **settings: object) -> Run:
    base = {"name": "mine", "models": {"policy": "m"}, "data": {"train": ROWS}, "reward": {is_right: 1.0}, "steps": 2}
    return Run("grpo", **base | {"run": {"directory": str(folder)}} | settings)


def train_set(run: Run) -> TrainingSetConfig:
    return run.recipe.data.train_sets()["data.train"]


def rows_of(run: Run) -> list[object]:
    return [json.loads(line) for line in Path(train_set(run).path).read_text().splitlines()]


def test_sections_dotted_keys_and_overrides_change_the_settings_that_they_name(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, "m")
    dotted = {"optimizer.learning_rate": 0.5, "models.policy.revision": "v1"}
    run = Run(recipe, "steps=7", batch={"prompts_per_step": 3}, **dotted)
    assert (run.recipe.steps, run.recipe.batch.prompts_per_step, run.recipe.batch.responses_per_prompt) == (7, 3, 4)
    assert run.recipe.optimizer.learning_rate == 0.5
    assert (run.recipe.models["policy"].path, run.recipe.models["policy"].revision) == ("m", "v1")
    assert Run(run.recipe).recipe == run.recipe
    sections = run.recipe.model_dump(mode="json")
    assert Run(sections, steps=8).recipe.steps == 8
    for whole in (sections, run.recipe):
        assert Run(whole, "steps=9").recipe.steps == 9
        assert Run(whole, "steps=9", steps=10).recipe.steps == 10


def test_a_wrong_argument_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"argument batch\.prompts_per_stepp: .*did you mean"):
        Run(write_recipe(tmp_path, "m"), batch={"prompts_per_stepp": 3})
    with pytest.raises(RecipeError, match=r"argument steps: steps=0: must be"):
        make_run(tmp_path, steps=0)


@pytest.mark.parametrize("form", [list, Dataset.from_list])
def test_rows_become_a_file_named_after_their_content(tmp_path: Path, form: type) -> None:
    run = make_run(tmp_path, data={"train": {"path": form(ROWS), "answer": "answer"}, "evaluation": form(ROWS[:2])})
    assert rows_of(run) == ROWS
    assert train_set(run).answer == "answer"
    assert run.recipe.data.evaluation is not None
    again, other = (make_run(tmp_path, **{"data.train": form(rows)}) for rows in (ROWS, ROWS[:3]))
    assert train_set(again).path == train_set(run).path != train_set(other).path
    with pytest.raises(RecipeError, match=r"data\.train\[0\]: column 'image'"):
        make_run(tmp_path, **{"data.train": [{"prompt": "a", "image": object()}]})


def test_functions_are_named_by_their_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path)
    name = f"{__name__}:is_right"
    assert list(run.recipe.reward.options()) == [name]
    assert run.recipe.run.reward_processes == 1
    advantage = make_run(tmp_path, algorithm={"advantage": {"type": AgainstTheMean}}).recipe.algorithm.advantage
    assert isinstance(advantage, AgainstTheMean)
    assert advantage.type == f"{__name__}:AgainstTheMean"
    for function in (lambda _: 1.0, lambda: resolve_workflow("grpo")):
        with pytest.raises(RecipeError, match="must be a function defined with `def` at the top level"):
            make_run(tmp_path, reward={function: 1.0})

    def in_notebook(sample: RewardInput) -> float:
        return 1.0

    in_notebook.__module__, in_notebook.__qualname__ = "__main__", "in_notebook"
    monkeypatch.setattr(sys.modules["__main__"], "in_notebook", in_notebook, raising=False)
    run = make_run(tmp_path, reward={in_notebook: 1.0})
    assert run.recipe.run.reward_processes == 0, "no other process can import it"
    with pytest.raises(RecipeError, match=r"'__main__:in_notebook' is defined in the script or notebook"):
        run.train(workers=2)
    with pytest.raises(RecipeError, match=r"reward processes do not run the script"):
        Run(write_recipe(tmp_path, tiny_model()), reward={in_notebook: 1.0}, **{"run.reward_processes": 1}).train()


class AgainstTheMean(Advantage):
    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        return AdvantageOutput(inputs.rewards)


def test_a_workflow_may_be_an_object(tmp_path: Path) -> None:
    workflow = resolve_workflow("grpo")
    run = make_run(tmp_path, workflow=Workflow("mine", workflow.nodes, workflow.algorithm))
    assert resolve_workflow(run.recipe.workflow).nodes == workflow.nodes


def test_a_model_is_saved_once_with_its_tokenizer(tmp_path: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model()), AutoTokenizer.from_pretrained(tiny_model())
    path = make_run(tmp_path, models={"policy": (model, tokenizer)}).recipe.models["policy"].path
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in Path(path).iterdir()}
    again = make_run(tmp_path, **{"models.policy": {"path": (model, tokenizer), "gradient_checkpointing": True}})
    assert again.recipe.models["policy"].path == path
    next(model.parameters()).data += 1
    assert make_run(tmp_path, models={"policy": (model, tokenizer)}).recipe.models["policy"].path != path
    for wrong in (model, (model, "tokenizer")):
        with pytest.raises(RecipeError, match=r"models\.policy: must .* pair \(model, tokenizer\)"):
            make_run(tmp_path, models={"policy": wrong})


def test_nothing_is_written_for_a_recipe_that_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RecipeError):
        make_run(tmp_path / "runs", steps=-1)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("then", "now", "lora", "continues"),
    [
        (1e-6, None, None, True),  # what was the default of an earlier version
        (None, 1e-6, None, True),
        (1e-6, None, {"rank": 2}, False),  # adapters would be trained ten times as fast
        (1e-5, None, None, False),
    ],
)
def test_a_run_continues_if_a_rate_that_is_left_out_means_the_one_that_it_was_begun_with(
    tmp_path: Path, then: float | None, now: float | None, lora: Mapping[str, int] | None, *, continues: bool
) -> None:
    changes = {"models.policy": {"path": tiny_model(), "lora": lora}}
    folder = tmp_path / "runs/tiny"
    begun = Run(write_recipe(tmp_path, "", {**changes, "optimizer": {"learning_rate": then}}))
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(begun.recipe.model_dump(mode="json")))
    planned = Run(write_recipe(tmp_path, "", {**changes, "optimizer": {"learning_rate": now}}))
    with nullcontext() if continues else pytest.raises(RecipeError, match=f"begun with {then}"):
        plan_training(planned.loaded, 1)._check_same_settings()


def test_a_run_is_planned_with_its_workflow_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for other numbers of workers, and other layouts of the same run."""
    reads: list[Path] = []
    read = workflows.read_yaml
    monkeypatch.setattr(workflows, "read_yaml", lambda path: reads.append(path) or read(path))
    apart = {"rollout": {"ranks": "0%-50%"}, "policy": {"ranks": "50%-100%"}}
    changes = {"schedule": {"replan_every_steps": 1, "layouts": {"apart": apart}}}
    run = Run(write_recipe(tmp_path, tiny_model(), changes))
    assert [plan_training(run.loaded, size).plan.world_size for size in (2, 4)] == [2, 4]
    assert [path.name for path in reads] == ["grpo.yaml"]
