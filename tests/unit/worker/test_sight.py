"""Models that cannot see, be divided or read what a recipe asks for are refused before any is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.pictures import vision_model
from tests.tiny import tiny_model
from tests.unit.recipes import make_recipe, only_problem, plan_of

from leaderless.config import RecipeError
from leaderless.worker.build.instances import check_readers

DATA = {"train": {"path": "a.jsonl", "images": "image"}, "max_prompt_tokens": 32}
PAIRS = DATA | {"train": {"path": "a.jsonl", "images": "image", "chosen": "chosen", "rejected": "rejected"}}
GAE = {"advantage": {"type": "gae"}}


@pytest.mark.parametrize("axis", ["tp", "cp", "pp", "ep"])
@pytest.mark.parametrize("node", ["policy", "critic"])
def test_ranks_divide_a_model_that_reads_both_ways_along_dp_alone(axis: str, node: str) -> None:
    models = {"policy": vision_model("paligemma")}
    assert plan_of("ppo", 2, models=models, data=DATA, algorithm=GAE).instances
    used = {"policy": ("policy", "old"), "critic": ("critic", "values")}[node]
    layout = {name: {axis: 2} for name in used}
    with pytest.raises(RecipeError) as caught:
        plan_of("ppo", 2, models=models, data=DATA, algorithm=GAE, layout=layout)
    problem = only_problem(caught.value)
    assert problem.key in {f"layout.{name}.{axis}" for name in used}
    assert f"ranks divide such a model along dp alone: leave out {axis}" in problem.message


@pytest.mark.parametrize("family", ["cohere2", "cohere2_moe", "cohere"])
def test_windows_that_vllm_makes_longer_are_refused(tmp_path: Path, family: str) -> None:
    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    about = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(about | {"model_type": family}))
    given = {"models": {"policy": str(tmp_path)}, "data": {"train": {"path": "a.jsonl"}, "max_prompt_tokens": 32}}
    settings = {"engine": "vllm", "external": {"python": "/usr/bin/python3"}, "max_response_tokens": 32}
    assert plan_of("grpo", **given, rollout=settings | {"engine": "native"}).instances
    if family == "cohere":
        assert plan_of("grpo", **given, rollout=settings).instances
        return
    with pytest.raises(RecipeError) as caught:
        plan_of("grpo", **given, rollout=settings)
    problem = only_problem(caught.value)
    assert problem.key == "rollout.engine"
    assert "its windows have one token more than those that are trained: set it to native" in problem.message


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_of_one_direction_answer_for_no_model_that_reads_both_ways(engine: str) -> None:
    models = {"policy": vision_model("paligemma")}
    settings = {"engine": engine, "external": {"python": "/usr/bin/python3"}}
    with pytest.raises(RecipeError) as caught:
        plan_of("grpo", models=models, rollout=settings)
    problem = only_problem(caught.value)
    assert problem.key == "rollout.engine"
    assert "set it to native" in problem.message
    trained = {"reward_model": vision_model("paligemma")}
    data = PAIRS | {"max_response_tokens": 8}
    assert plan_of("reward_model", models=trained, data=data, reward={}, rollout={"engine": "vllm"}).instances


@pytest.mark.parametrize(
    ("role", "workflow", "changes"), [("critic", "ppo", {"algorithm": GAE}), ("reward_model", "rlhf", {"reward": {}})]
)
def test_models_give_an_image_the_same_tokens(
    tmp_path: Path, role: str, workflow: str, changes: dict[str, object]
) -> None:
    def check(path: str) -> None:
        plan = plan_of(workflow, models={"policy": vision_model(), role: "/not/here/yet"}, data=DATA, **changes)
        models = {"policy": vision_model(), role: path}
        check_readers(make_recipe(workflow=workflow, models=models, data=DATA, **changes), plan)

    check(vision_model())
    other = shutil.copytree(vision_model(), tmp_path / "other")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    settings["size"] = {**settings["size"], "longest_edge": settings["size"]["longest_edge"] // 2}
    (other / "preprocessor_config.json").write_text(json.dumps(settings))
    with pytest.raises(RecipeError, match=rf"^models.{role}: an image of \d+ x \d+ pixels is .* for 'policy': give bo"):
        check(str(other))
    if role == "critic":
        check(tiny_model())  # it foresees what it can
        return
    with pytest.raises(RecipeError, match=r"^models.reward_model: .* read text alone, so that the reward model would"):
        check(tiny_model())


def test_a_judge_may_see_images_in_other_tokens() -> None:
    def models(judge: str) -> dict[str, object]:
        return {"models": {"policy": vision_model(), "judge": judge}, "data": DATA}

    reward = {"judge": {"role": "judge"}}
    plan = plan_of("grpo", **models("/not/here/yet"), reward=reward)
    check_readers(make_recipe(**models(vision_model("llava")), reward=reward), plan)
