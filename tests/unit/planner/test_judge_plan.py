"""Plans with judges that are models of the recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.unit.recipes import make_recipe, only_problem, plan_of, write_model

from leaderless.config import Recipe, RecipeError
from leaderless.planner.graph.judges import as_judged, judge_lines
from leaderless.planner.memory.fit import fit_plan
from leaderless.planner.plan_parts import answering
from leaderless.planner.show.picture import draw_plan

JUDGE = {"role": "judge", "max_answer_tokens": 100}
MODELS = {"policy": "/no/such/model", "judge": "/no/such/judge"}


def test_the_node_that_grades_has_the_judge_where_it_runs() -> None:
    pools = {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "0-1"}, "advantage": {"ranks": "0-1"}}
    sections = {"models": MODELS, "reward": {"judge": JUDGE, "judge-pairs": JUDGE | {"pairwise": {}}}}
    plan = plan_of("grpo", 4, **sections, layout=pools | {"reward": {"ranks": "2-3"}})
    judge = next(one for one in plan.instances if one.is_judge)
    assert (judge.role, judge.layout.ranks, judge.is_trained, judge.generates) == ("judge", (2, 3), False, False)
    assert [edge.kind for edge in plan.edges if (edge.source, edge.target) == ("rollout", "reward")] == ["reshard"]
    assert answering(plan.instances).role == "policy"
    assert "reward, role judge" in draw_plan(plan)
    lines = dict(judge_lines(make_recipe(**sections), plan))
    assert lines["judge"].startswith("role judge: 1,024 questions a step, at most 32 requests at a time, of 2,")


def test_the_engine_of_a_judge_has_room_for_questions_and_answers(tmp_path: Path) -> None:
    models = {name: write_model(tmp_path / name) for name in MODELS}
    pairs = {"role": "judge", "pairwise": {}, "max_requests": 3, "max_answer_tokens": 40}
    sections = {"models": models, "reward": {"judge": JUDGE, "judge-pairs": pairs}}
    sections |= {"data": {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 60}}
    recipe = make_recipe(**sections)
    own = as_judged(recipe, "judge")
    assert own.longest_text() == 60 + 2 * recipe.rollout.max_response_tokens + 1024 + 100
    assert own.rollout.max_sequences == 16
    memory = plan_of("grpo", **sections).memory
    assert memory is not None
    assert memory.cpu.phases["judge judges"]["kv cache"] == 16 * (4096 + 2048) * 4 * 2 * 2 * 16 * 4
    assert "judge weights" in memory.cpu.resident
    assert "judge scores" not in memory.cpu.phases


@pytest.mark.parametrize(
    ("sequences", "remedy"), [(64, "lower reward.judge-pairs.max_requests=50"), (40, "lower rollout.max_sequences=40")]
)
def test_of_two_judges_the_one_that_asks_most_is_named_where_memory_is_short(
    tmp_path: Path, sequences: int, remedy: str
) -> None:
    models = {name: write_model(tmp_path / name) for name in MODELS}
    pairs = JUDGE | {"pairwise": {}, "max_requests": 50, "max_question_tokens": 3900}
    sections = {"models": models, "reward": {"judge": JUDGE | {"max_requests": 3}, "judge-pairs": pairs}}
    sections |= {"rollout": {"max_sequences": sequences, "max_response_tokens": 20}}
    sections |= {"data": {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 20}}
    plan = plan_of("grpo", **sections)
    assert plan.memory is not None
    fit = fit_plan(make_recipe(**sections), plan, plan.memory.cpu.peak, is_cpu=True)
    assert "in its fullest phase, 'judge judges'" in fit.problem
    assert remedy in fit.problem


REFUSED: list[tuple[Mapping[str, object], str, str]] = [
    ({"models": {"policy": "p"}}, "reward.judge.role", "no model of this role: add models.judge"),
    ({"reward": {"judge": JUDGE | {"role": "jugde"}}}, "reward.judge.role", "did you mean 'judge'"),
    ({"reward": {"judge": JUDGE | {"role": "policy"}}}, "reward.judge.role", "node 'rollout' (rollout) uses as well"),
    ({"models": MODELS | {"judge": {"path": "j", "lora": {"rank": 2}}}}, "models.judge.lora", "is not trained"),
    (
        {"roles": {"judge": {"rollout": {"temperature": 0.5}}}},
        "roles.judge.rollout.temperature",
        "set reward.judge.temperature",
    ),
    ({"evaluation": {"role": "judge"}}, "evaluation.role", "is 'judge'"),
    ({"layout": {"reward": {"tp": 2}}}, "layout.reward", "the engine 'native' cannot span ranks along tp"),
]


@pytest.mark.parametrize(("sections", "key", "words"), REFUSED)
def test_a_judge_that_cannot_be_asked_is_refused(sections: Mapping[str, object], key: str, words: str) -> None:
    with pytest.raises(RecipeError) as caught:
        plan_of("grpo", 2, **{"models": MODELS, "reward": {"judge": JUDGE}, **sections})
    problem = only_problem(caught.value)
    assert problem.key == key
    assert words in problem.message


def test_a_judge_that_no_node_asks_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"reward.judge.role: .*no node of the workflow 'rlhf' computes rewards"):
        plan_of("rlhf", models=MODELS | {"reward_model": "/no/such/model"}, reward={"judge": JUDGE})


def test_questions_that_do_not_fit_into_the_context_are_refused(tmp_path: Path) -> None:
    models = MODELS | {"judge": write_model(tmp_path / "judge", max_position_embeddings=1024)}
    with pytest.raises(RecipeError, match=r"reward.judge.max_question_tokens: .*set it to at most 924"):
        plan_of("grpo", models=models, reward={"judge": JUDGE})
    plan_of("grpo", models=models, reward={"judge": JUDGE | {"max_question_tokens": 924}})
    with pytest.raises(RecipeError, match=r"ends at 1,024: lower max_answer_tokens"):
        plan_of("grpo", models=models, reward={"judge": JUDGE | {"max_answer_tokens": 1024}})


def test_the_resolved_recipe_of_a_judge_is_read_again() -> None:
    pairs = {"url": "http://a/v1", "model": "m", "pairwise": {}}
    recipe = make_recipe(models=MODELS, reward={"judge": JUDGE, "judge-pairs": pairs})
    assert Recipe.model_validate(recipe.model_dump(mode="json")) == recipe


def test_a_judge_is_where_ranks_work_together() -> None:
    sections = {"models": MODELS, "reward": {"judge": JUDGE}}
    pools = {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}
    continuous = {"channels": {"rollout": {"capacity": 1, "mode": "continuous"}}, "layout": pools}
    with pytest.raises(RecipeError, match=r"reward.judge.role: .*where ranks generate continuously"):
        plan_of("grpo", 2, **sections, **continuous)
    behind = {
        **continuous,
        "layout": {name: {"ranks": "1"} for name in ("reward", "policy")} | {"rollout": pools["rollout"]},
    }
    plan_of("grpo", 2, **sections, **behind)
    held_out = {"data": {"train": {"path": "a"}, "evaluation": {"path": "b"}}, "evaluation": {"every_steps": 1}}
    with pytest.raises(RecipeError, match=r"reward.judge.role: .*loop 'reward', but held-out prompts"):
        plan_of("grpo", 2, **sections, **behind, **held_out)
