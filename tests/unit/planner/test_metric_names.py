"""Names of metrics: those that a recipe reports, and those in the report, the documentation and recipes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.recipes import begin, end, make_recipe, only_problem, plan_of

from leaderless.config import RecipeError
from leaderless.observability.console import HEADLINES
from leaderless.observability.known_metrics import METRICS, known_metric
from leaderless.observability.report.charts import CATALOGUE
from leaderless.observability.report.checks import CHECKS
from leaderless.planner.workflow import resolve_workflow, stage
from leaderless.planner.workflow.metrics import metrics_of

ROOT = Path(__file__).parents[3]
EVALUATED = {
    "data": {"train": {"path": "rows.jsonl"}, "evaluation": {"path": "held-out.jsonl"}},
    "evaluation": {"every_steps": 4},
}


def plan_with(metric: str, workflow: str = "grpo", every_steps: int = 2, **sections: object) -> None:
    plan_of(workflow, **{"checkpoint": {"best_metric": metric, "every_steps": every_steps}} | sections)


def refusal_of(metric: str, workflow: str = "grpo", **sections: object) -> str:
    with pytest.raises(RecipeError) as caught:
        plan_with(metric, workflow, **sections)
    problem = only_problem(caught.value)
    assert problem.key == "checkpoint.best_metric"
    return problem.message


def test_a_metric_that_the_recipe_reports_may_choose_the_best_checkpoint():
    plan_with("evaluation/mean@1", **EVALUATED)
    plan_with("reward/math")
    plan_with("critic/explained_variance", "ppo", algorithm={"advantage": {"type": "gae"}})
    plan_with("sampling/kept", "dapo")
    plan_with("mismatch/effective_samples", "dapo")


def test_a_metric_that_does_not_exist_is_refused_with_those_that_do():
    assert refusal_of("evaluation/precision", **EVALUATED).startswith(
        "no metric is called 'evaluation/precision'; it reports evaluation/mean@1, evaluation/failed, "
    )
    assert "(did you mean 'reward/mean'?)" in refusal_of("rewards/mean")
    assert "@stage(metrics=[...])" in refusal_of("mine/score")


@pytest.mark.parametrize(
    ("metric", "sections", "needs"),
    [
        ("evaluation/mean@1", {}, "`evaluation.every_steps` above 0"),
        ("evaluation/mean@4", EVALUATED, "it reports evaluation/mean@1, evaluation/failed"),
        ("policy/kl", {}, "`algorithm.kl.coefficient` above 0"),
        ("reward/kl", {"algorithm": {"kl": {"coefficient": 0.1}}}, "`algorithm.kl.place` set to `reward`"),
        ("critic/explained_variance", {}, "a workflow with a critic"),
        ("sampling/kept", {}, "a workflow that repeats nodes"),
    ],
)
def test_a_metric_that_the_recipe_never_reports_is_refused_with_what_it_needs(metric, sections, needs):
    message = refusal_of(metric, **sections)
    assert message.startswith(f"'{metric}' is not reported by this recipe")
    assert needs in message


@pytest.mark.parametrize("every_steps", [0, 3, 8])
def test_every_step_that_may_be_the_best_has_to_write_a_checkpoint(every_steps):
    with pytest.raises(RecipeError) as caught:
        plan_with("evaluation/mean@1", every_steps=every_steps, **EVALUATED)
    problem = only_problem(caught.value)
    assert problem.key == "checkpoint.every_steps"
    assert "set it to 4" in problem.message
    plan_with("reward/mean", every_steps=every_steps, **EVALUATED)


@stage(reads=["rewards"], writes=["rewards"], metrics=["mine/score"])
def scored(batch, context):
    """Reports a custom metric."""


def test_a_stage_declares_the_metrics_of_its_own():
    workflow = end(begin().node("mine", run=f"{__name__}:scored", after="reward"), "mine")
    plan_of(workflow, checkpoint={"best_metric": "mine/score"})
    with pytest.raises(RecipeError, match="no metric is called 'mine/scores'"):
        plan_of(workflow, checkpoint={"best_metric": "mine/scores"})


@pytest.mark.parametrize("workflow", ["grpo", "ppo", "dapo", "remax", "sft"])
def test_everything_that_built_in_stages_declare_is_documented(workflow):
    algorithm = {"kl": {"coefficient": 0.1, "target": 0.1}, "overlong": {"buffer_tokens": 2}}
    recipe = make_recipe(**EVALUATED | {"algorithm": algorithm | {"correction": {"type": "mask"}}})
    resolved = resolve_workflow(workflow)
    for name in metrics_of(recipe, resolved.nodes, resolved):
        assert known_metric(name) is not None, name


def test_charts_checks_and_the_progress_line_show_metrics_that_exist():
    charted = {
        name for topics in CATALOGUE.values() for topic in topics for name in (*topic.metrics.split(), topic.band)
    }
    shown = charted | {check.metric for check in CHECKS} | {name for name, _, _ in HEADLINES}
    assert [name for name in shown - {None} if not exists(name)] == []


def exists(name: str) -> bool:
    """The metric of this name, or a wildcard metric that includes it."""
    pattern = re.escape(name).replace(r"\*", ".*") + (".*" if name.endswith("@") else "")
    return known_metric(name) is not None or any(re.fullmatch(pattern, metric) for metric in METRICS)


def test_metrics_that_pages_name_exist():
    prefixes = {name.partition("/")[0] for name in METRICS if not name.startswith("<")} | {"policy", "critic"}
    for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]:
        for name in re.findall(r"`([a-z_]+/[\w@<>/*]+)`", page.read_text(encoding="utf-8")):
            example = re.sub(r"@[a-z]$", "@2", name)
            assert name.partition("/")[0] not in prefixes or exists(name) or exists(example), f"{page}: {name}"
