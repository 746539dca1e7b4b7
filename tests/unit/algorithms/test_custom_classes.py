"""A class of the user in place of a built-in advantage or loss: what is checked when the recipe is read."""

from __future__ import annotations

from typing import ClassVar

import pytest
from pydantic import Field
from tests.unit.recipes import begin, end, make_recipe, only_problem, plan_of, write_recipe

from leaderless.algorithms import Advantage, AdvantageInputs, AdvantageOutput, LossInputs, LossOutput, PolicyLoss
from leaderless.config import RecipeError, dump_recipe, load_recipe
from leaderless.planner.workflow import stage


class Harmonic(Advantage):
    """An advantage with a setting, and a column of a custom stage."""

    power: float = Field(default=2.0, gt=0)
    """Exponent."""

    reads: ClassVar[tuple[str, ...]] = ("weights", "rows")

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        return AdvantageOutput(inputs.rewards**self.power)


class Weighted(PolicyLoss):
    """A loss that reads a column of a custom stage."""

    reads: ClassVar[tuple[str, ...]] = ("weights", "ref_log_probs")

    def compute(self, inputs: LossInputs) -> LossOutput:
        return LossOutput.without_clipping(-inputs.log_probs * inputs.columns["weights"])


class ReadsRows(Weighted):
    """A loss that wants what has no value for each token."""

    reads: ClassVar[tuple[str, ...]] = ("rows",)


class ReadsTokens(Weighted):
    """A loss that wants tokens of prompts."""

    reads: ClassVar[tuple[str, ...]] = ("prompt_tokens",)


class ReportsEntropy(Weighted):
    """A loss whose metric hides that of every update."""

    metrics: ClassVar[dict[str, str]] = {"entropy": "something else"}


class Unfinished(Advantage):
    """An advantage without its method."""


@stage(reads=["rewards"], writes=["weights"])
def weigh(batch, context):
    """Write a column for the class."""


HERE = __name__


def refused(tmp_path, advantage):
    path = write_recipe(tmp_path, more=f"algorithm:\n  advantage:\n    {advantage}\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    return [(problem.key, problem.message, problem.place.rpartition(":")[2]) for problem in caught.value.problems]


def test_its_settings_come_from_the_recipe_and_are_kept_with_it(tmp_path):
    more = f"algorithm: {{advantage: {{type: '{HERE}:Harmonic', power: 3}}}}\n"
    recipe = load_recipe(write_recipe(tmp_path, more=more)).recipe
    assert recipe.algorithm.advantage == Harmonic(type=f"{HERE}:Harmonic", power=3)
    (tmp_path / "again.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "again.yaml").recipe == recipe
    override = load_recipe(tmp_path / "again.yaml", ["algorithm.advantage.power=4"]).recipe
    assert override.algorithm.advantage == Harmonic(type=f"{HERE}:Harmonic", power=4)
    of_role = ["roles.policy.algorithm.advantage.power=5"]
    assert load_recipe(tmp_path / "again.yaml", of_role).recipe.roles["policy"].algorithm.advantage.power == 5


def test_a_wrong_setting_is_placed_like_a_built_in_one(tmp_path):
    assert refused(tmp_path, f"type: {HERE}:Harmonic\n    powr: 3\n    power: 0") == [
        ("algorithm.advantage.power=0", "must be greater than 0", "12"),
        ("algorithm.advantage.powr", "unknown key (did you mean 'power'?)", "11"),
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:Harmonic", "module 'no_such_module' cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:Harmonc", f"module '{HERE}' has no class 'Harmonc' (did you mean 'Harmonic'?)"),
        (f"{HERE}:Unfinished", f"class '{HERE}:Unfinished' must have the method compute"),
        (f"{HERE}:Weighted", "must be a class derived from leaderless.algorithms.advantage.Advantage"),
        (f"{HERE}:weigh", "must be a class derived from leaderless.algorithms.advantage.Advantage"),
        ("function", "a custom one is a class: give its name, 'package.module:Class', as the type"),
    ],
)
def test_a_name_that_is_no_such_class_is_refused(tmp_path, name, message):
    ((key, text, line),) = refused(tmp_path, f"type: {name}")
    assert (key, line) == (f"algorithm.advantage.type={name!r}", "10")
    assert message in text


CUSTOM = {"advantage": {"type": f"{HERE}:Harmonic"}, "policy_loss": {"type": f"{HERE}:Weighted"}}


def own_workflow():
    workflow = begin().node("reference", run="log_probs", role="reference", after="rollout")
    return end(workflow.node("own", run=f"{HERE}:weigh", after="reward"), ["own", "reference"])


def test_the_planner_provides_the_columns_that_a_class_declares():
    plan = plan_of(own_workflow(), 2, algorithm=CUSTOM)
    assert {"weights", "rows"} <= {*plan["advantage"].reads}
    assert {"weights", "ref_log_probs"} <= {*plan["policy"].reads}


def test_a_column_that_nobody_writes_is_refused():
    with pytest.raises(RecipeError, match=r"'weights'") as caught:
        plan_of("grpo", algorithm=CUSTOM)
    assert only_problem(caught.value).key.startswith("nodes.")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ReadsRows", "reads 'rows': a loss can only read columns with one value for each sample or response token"),
        ("ReadsTokens", "reads 'prompt_tokens': a loss can only read columns"),
        ("ReportsEntropy", "whose metric 'policy/entropy' is reported by every update: give it another name"),
    ],
)
def test_what_a_loss_cannot_have_is_refused(name, message):
    with pytest.raises(RecipeError) as caught:
        plan_of(own_workflow(), algorithm={"policy_loss": {"type": f"{HERE}:{name}"}})
    problem = only_problem(caught.value)
    assert problem.key == "algorithm.policy_loss.type"
    assert message in problem.message


def test_an_advantage_of_another_stage_is_refused():
    with pytest.raises(RecipeError, match="which the stage 'remax' computes, but node 'advantage' runs 'advantage'"):
        plan_of("grpo", algorithm={"advantage": {"type": "remax"}})
    with pytest.raises(RecipeError, match="which the stage 'advantage' computes, but node 'advantage' runs 'remax'"):
        plan_of("remax", algorithm={"advantage": {"type": "grpo"}})


@pytest.mark.parametrize("advantage", [{"type": "grpo"}, {"type": "reinforce_pp", "group_baseline": True}])
def test_a_group_of_one_has_nothing_to_be_compared_with(advantage):
    with pytest.raises(RecipeError, match="compares the responses of a group with each other"):
        plan_of("grpo", algorithm={"advantage": advantage}, batch={"responses_per_prompt": 1})
    assert plan_of("grpo", algorithm={"advantage": {"type": "reinforce_pp"}}, batch={"responses_per_prompt": 1})


def test_a_recipe_in_python_takes_the_class_itself():
    advantage = Harmonic(type=f"{HERE}:Harmonic", power=3)
    assert make_recipe(algorithm={"advantage": advantage}).algorithm.advantage == advantage
