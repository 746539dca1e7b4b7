"""Mistakes on the command line and in a recipe are reported before anything is started."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from tests.end_to_end.alone import refused, run_alone
from tests.end_to_end.cli import finish, metrics, start
from tests.tiny import tiny_model, write_recipe

FUNCTIONS = """
def two_arguments(sample, other):
    return 1.0
"""
PARTS = """
from leaderless import stage, train_backend

@train_backend(trains=False)
def frozen(setup):
    raise AssertionError("refused before")

@stage(reads=["tokens"], has_effect=True)
def trains_in_secret(batch, context):
    context.role.train_engine.optimizer_step()
    return batch
"""
EVALUATION = [f"data.evaluation.{key}" for key in ("path=train.jsonl", "prompt=question", "answer=answer")]
TORCHRUN = ("torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", 2)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_rewards.py").write_text(FUNCTIONS)
    (tmp_path / "own_parts.py").write_text(PARTS)
    (tmp_path / "own.yaml").write_text(
        "name: own\nbase: grpo\nnodes: {secret: {run: 'own_parts:trains_in_secret', role: policy, after: reward}}\n"
    )
    shutil.copytree(tiny_model(), tmp_path / "other")
    tokenizer = json.loads((tmp_path / "other/tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["0"], vocabulary["1"] = vocabulary["1"], vocabulary["0"]
    (tmp_path / "other/tokenizer.json").write_text(json.dumps(tokenizer))
    (tmp_path / "broken_module.py").write_text("import nothing_of_that_name\n")
    for module in ("own_rewards", "own_parts"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return write_recipe(tmp_path, tiny_model(num_layers=1))


OVERRIDES = {
    "batch.promts_per_step=3": ["batch.promts_per_step", "unknown key", "did you mean 'prompts_per_step'"],
    "optimiser.learning_rate=1": ["unknown key", "did you mean 'optimizer'"],
    "models.policyy=x": ["models.policyy", "did you mean 'policy'"],
    "layout.rolout.ranks=0": ["layout.rolout", "no such node", "did you mean 'rollout'"],
    "workflow=grpoo": ["unknown workflow 'grpoo'", "did you mean 'grpo'"],
    "reward.maths=1": ["no built-in reward", "did you mean 'math'"],
    "optimizer.learning_rate=.nan": ["optimizer.learning_rate=nan", "must be a finite number"],
    "optimizer.learning_rate=.inf": ["must be a finite number"],
    "optimizer.learning_rate=fast": ["optimizer.learning_rate='fast'", "must be a valid number"],
    "optimizer.learning_rate=-1": ["optimizer.learning_rate=-1", "must be greater than 0"],
    "batch.prompts_per_step=-4": ["batch.prompts_per_step=-4", "must be greater than or equal to 1"],
    "batch.prompts_per_step=[6]": ["batch.prompts_per_step", "must be a valid integer"],
    "batch.responses_per_prompt=1": ["batch.responses_per_prompt", "must be at least 2", "advantage"],
    "batch.micro_batch_tokens=1": ["batch.micro_batch_tokens", "is 1, but one sample may have 14 tokens"],
    "rollout.top_p=0": ["rollout.top_p=0", "must be greater than 0"],
    "rollout.top_k=-5": ["rollout.top_k=-5", "must be greater than or equal to 0"],
    "rollout.stop.0=x": ["rollout.stop", "must be a list"],
    "data.max_prompt_tokens=600": ["batch.micro_batch_tokens", "one sample may have 606 tokens"],
    "reward.own_rewards:two_arguments=1": ["two_arguments(sample, other)", "must be callable with 1 positional"],
    "reward.own_rewards:nothing=1": ["module 'own_rewards' has no function 'nothing'"],
    "reward.broken_module:f=1": ["'broken_module' cannot be imported", "No module named 'nothing_of_that_name'"],
    "reward.no_module:f=1": ["module 'no_module' cannot be imported"],
    "reward.exact_match.sources=[a]": ["reward.exact_match", "needs data.train.source"],
    "data.train.path=nowhere.jsonl": ["data.train.path", "file nowhere.jsonl does not exist"],
    "models.policy=./nowhere": ["models.policy", "folder nowhere does not exist"],
    "models.policy=recipe.yaml": ["models.policy", "recipe.yaml is a file, and no GGUF file; name the folder"],
    "models.policy=.": ["models.policy", "holds no config.json"],
    "run.directory=recipe.yaml": ["run.directory", "cannot be written: Not a directory"],
    "run.directory=/proc/runs": ["run.directory", "folder /proc/runs/tiny cannot be written"],
    "name=é": ["name='é'", "must match"],
    "steps": ["an override must look like section.key=value"],
    "steps=": ["steps=None", "must be a valid integer"],
}


@pytest.mark.parametrize("override", OVERRIDES)
def test_a_wrong_setting_is_refused_before_anything_starts(tmp_path: Path, recipe: Path, override: str) -> None:
    errors = refused(tmp_path, "train", recipe, override)
    assert f"override {override}" in errors or str(recipe) in errors, "where it was written"
    for words in OVERRIDES[override]:
        assert words in errors
    assert not (tmp_path / "runs").exists(), "nothing is written"


POOLS = {"rollout": "0", "reward": "0", "advantage": "1", "policy": "1"}
PLANS = {
    "channels that can never begin": (
        ["channels.rollout.capacity=1", "layout.reward.ranks=1", "layout.advantage.ranks=0"],
        [
            "channels.rollout",
            "'advantage' on ranks 0 takes",
            "it would wait for its own iteration",
            "and none could begin",
        ],
    ),
    "a bound on staleness with pools that overlap": (
        ["channels.rollout={capacity: 1, max_staleness: 1}", "layout.policy.ranks=0-1"],
        ["channels.rollout", "'rollout' and 'policy' share rank 0", "give them disjoint ranks under `layout`"],
    ),
    "roles of a node with different vocabularies": (
        ["algorithm.kl.coefficient=0.1", "models.reference=other"],
        [
            "models.",
            "node 'reference'",
            "have different vocabularies",
            "all roles of a node need one tokenizer",
        ],
    ),
    "an engine that cannot span ranks": (
        ["layout={rollout: {ranks: 0-1, tp: 2}, policy: {ranks: 2}}", "--world-size", "3"],
        ["override layout=", "tp=2", "without tp"],
    ),
    "a back end that cannot train": (
        ["training.backend=own_parts:frozen"],
        ["training.backend", "'own_parts:frozen' cannot train models, as role 'policy' needs", "such as fsdp"],
    ),
    "a stage that trains a role without a word": (
        ["workflow=own.yaml"],
        ["nodes.secret.role", "declares no use of a role", '@stage(roles={"policy": "score"})'],
    ),
    "a channel and roll-backs": (
        ["channels.rollout.capacity=1", "guards.non_finite_loss=roll_back"],
        ["guards.non_finite_loss", "is roll_back", "set warn, skip or stop"],
    ),
}


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_cannot_work_is_refused(tmp_path: Path, recipe: Path, case: str) -> None:
    settings, expected = PLANS[case]
    layout = [f"layout.{node}.ranks={ranks}" for node, ranks in POOLS.items()]
    errors = refused(tmp_path, "plan", recipe, "--world-size", 2, *layout, *settings)
    assert "override " in errors or str(recipe) in errors, "where it was written"
    for words in expected:
        assert words in errors


RECIPES = {
    "name: a\nmodels: [": ["x.yaml:2", "is not valid YAML"],
    "name: a\nname: b\n": ["x.yaml:2", "name: is written twice"],
    "name: a\nmodels: {policy: m, policy: n}\n": ["x.yaml:2", "models.policy: is written twice"],
    "- name": ["x.yaml:1", "must be a mapping of sections"],
    "": ["x.yaml:1", "must be a mapping of sections"],
    "name: ünïcode\nmodels: 5\n": ["x.yaml:1: name='ünïcode'", "x.yaml:2: models=5"],
    "nme: a\n": ["x.yaml:1: nme: unknown key (did you mean 'name'?)"],
}


@pytest.mark.parametrize("text", RECIPES)
def test_a_wrong_recipe_is_refused_with_file_and_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.yaml").write_text(text, encoding="utf-8")
    outcome = run_alone(tmp_path, "train", "x.yaml")
    assert outcome.code == 2
    assert "Traceback" not in outcome.errors
    for words in RECIPES[text]:
        assert words in outcome.errors


@pytest.mark.parametrize("target", ["nowhere.yaml", "runs"])
def test_a_recipe_that_is_not_there_is_named(tmp_path: Path, recipe: Path, target: str) -> None:
    assert target in refused(tmp_path, "train", target)


def test_more_ranks_than_prompts_are_refused(tmp_path: Path, recipe: Path) -> None:
    errors = refused(tmp_path, "train", recipe, "--workers", 7)
    assert "batch.prompts_per_step" in errors
    assert "is 6, fewer than the 7" in errors


@pytest.mark.parametrize(
    "arguments",
    [
        ("train",),
        ("trainn", "x"),
        ("train", "x", "--wokers", "2"),
        ("train", "x", "--workers", "-1"),
        ("export", "a", "b"),
    ],
)
def test_a_wrong_command_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    outcome = run_alone(tmp_path, *arguments)
    assert outcome.code == 2
    assert "Traceback" not in outcome.errors


def test_a_finished_run_survives_what_is_wrong_afterwards(tmp_path: Path, recipe: Path) -> None:
    assert run_alone(tmp_path, "train", recipe, "steps=1").code == 0
    run = tmp_path / "runs/tiny"
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    assert "was begun with" in refused(tmp_path, "train", recipe, "steps=2", "seed=5")
    for role in ("critic", "policy/.."):
        assert f"has no role '{role}' (there are: policy)" in refused(
            tmp_path, "export", "runs/tiny", "out", "--role", role
        )
    assert "recipe.yaml is not empty: name another one" in refused(tmp_path, "export", "runs/tiny", recipe)
    family = tmp_path / "family"
    shutil.copytree(tiny_model("qwen3"), family)
    errors = refused(tmp_path, "eval", recipe, *EVALUATION, f"models.policy={family}", "--checkpoint", "runs/tiny")
    assert "does not fit" in errors
    after = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    assert after == before


def test_a_model_that_was_exchanged_is_refused_on_resume(tmp_path: Path) -> None:
    shutil.copytree(tiny_model(), tmp_path / "model")
    recipe = write_recipe(tmp_path, "model")
    assert run_alone(tmp_path, "train", recipe, "steps=1").code == 0
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(tiny_model("qwen3"), tmp_path / "model")
    errors = refused(tmp_path, "train", recipe, "steps=2")
    assert "models.policy" in errors
    assert "runs/tiny/checkpoints/step-000001 does not fit" in errors
    shutil.rmtree(tmp_path / "model")
    shutil.copytree(tiny_model(), tmp_path / "model")
    assert "continuing from step 1" in run_alone(tmp_path, "train", recipe, "steps=2").output


def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one(tmp_path: Path, recipe: Path) -> None:
    assert run_alone(tmp_path, "train", recipe, "steps=2", "checkpoint.every_steps=1").code == 0
    newest = tmp_path / "runs/tiny/checkpoints/step-000002"
    for file in newest.glob("policy/*.safetensors"):
        file.write_bytes(file.read_bytes()[:1000])
    for command in (("export", newest, tmp_path / "out"), ("eval", recipe, "--checkpoint", newest)):
        errors = refused(tmp_path, *command, *(EVALUATION if command[0] == "eval" else ()))
        assert "is damaged" in errors
        assert "has 1,000 bytes, where" in errors
    outcome = run_alone(tmp_path, "train", recipe, "steps=3")
    assert outcome.code == 0
    assert "has 1,000 bytes, where" in outcome.output
    assert "set aside as damaged-step-000002" in outcome.output
    assert "continuing from step 1" in outcome.output
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [1, 2, 3]


def test_torchrun_says_once_what_is_wrong(tmp_path: Path, recipe: Path) -> None:
    command = (*TORCHRUN, "-m", "leaderless", "train", recipe, "batch.promts_per_step=3")
    outcome = finish(start(tmp_path, *command, is_forked=False))
    assert outcome.code != 0
    assert outcome.errors.count("unknown key (did you mean 'prompts_per_step'?)") == 1
