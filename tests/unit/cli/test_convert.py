"""Recipes from configurations of verl and TRL."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from leaderless.algorithms.preferences import PREFERENCE_LOSSES
from leaderless.base.named_functions import load_callable
from leaderless.cli.convert_config import trl, trl_preferences, verl, verl_names
from leaderless.cli.convert_config.convert import TABLES, Converted, Framework, convert, guess, read_configuration
from leaderless.cli.convert_config.table import LOGGERS, Row
from leaderless.cli.main import app
from leaderless.config import RecipeError, all_keys, load_recipe
from leaderless.config.layout import LayoutConfig
from leaderless.config.load import own_name
from leaderless.config.models import ModelConfig
from leaderless.observability.loggers.registry import BUILT_IN
from leaderless.rewards.trl_and_verl import math_of_verl
from leaderless.run.run import Run

SCRIPT = """
set -x
MODEL=some/model
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=rows/train.parquet data.val_files="['rows/test.parquet']" \\
    data.train_batch_size=64 data.max_prompt_length=256 data.max_response_length=128 \\
    data.filter_overlong_prompts=True data.truncation='error' \\
    actor_rollout_ref.model.path=$MODEL \\
    actor_rollout_ref.actor.optim.lr=2e-6 actor_rollout_ref.actor.ppo_mini_batch_size=16 \\
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.002 \\
    actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.clip_ratio_high=0.28 \\
    actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=5 \\
    +actor_rollout_ref.rollout.seed=3 \\
    trainer.experiment_name='my_run' trainer.n_gpus_per_node=8 trainer.save_freq=20 trainer.test_freq=5 \\
    trainer.total_training_steps=105 $@
"""
TRL = {
    "model_name_or_path": "some/model",
    "dataset_name": "some/rows",
    "reward_funcs": ["accuracy_reward", "my.rewards.short"],
    "reward_weights": [1.0, 0.2],
    "num_generations": 8,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "steps_per_generation": 8,
    "max_steps": 800,
    "learning_rate": "1.0e-5",
    "beta": 0.04,
    "bf16": True,
    "save_steps": 100,
}
PAIRS = {
    "model_name_or_path": "some/model",
    "dataset_name": "some/pairs",
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 2,
    "max_steps": 100,
    "max_length": 600,
}
ROWS = [(name, row) for name, rows in TABLES.items() for row in rows]


def of_verl(**values: Any) -> Converted:
    given = {"algorithm.adv_estimator": "grpo", "data.train_files": "t", "actor_rollout_ref.model.path": "m"}
    return convert(given | {key.replace("__", "."): value for key, value in values.items()}, "verl")


def setting(made: Converted, key: str) -> Any:
    found: Any = made.settings
    for part in key.split("."):
        found = found[part]
    return found


def test_every_key_is_named_once_and_becomes_one_that_exists() -> None:
    known = {*all_keys(), "name", "workflow", "steps", "seed"}
    inside = {"models": ModelConfig, "layout": LayoutConfig}
    for name, rows in TABLES.items():
        assert len({row.theirs for row in rows}) == len(rows), name
        for row in rows:
            for key in filter(None, row.ours.split(", ")):
                if ":" in key or "NAME" in key or key.startswith("or "):
                    continue
                own = re.sub(r"^roles\.\w+\.", "", key)
                section, _, rest = own.partition(".")
                if section in inside:
                    assert rest.split(".")[1] in inside[section].model_fields if "." in rest else rest, key
                elif not own.startswith("rollout.external.arguments."):  # whose names are the engine's
                    assert any(one == own or one.startswith(f"{own}.") for one in known), (row.theirs, key)
            assert row.ours or row.meaning, f"{row.theirs}: a reader wants to know why not"


@pytest.mark.parametrize(("name", "row"), ROWS, ids=lambda value: getattr(value, "theirs", str(value)))
def test_hints_for_misspelled_keys_agree_with_the_table(name: str, row: Row) -> None:
    hint = own_name(row.theirs.split("."))
    if hint is None or not row.ours:
        return
    sections = {key.split(".")[0] for key in row.ours.split(", ")}
    assert hint.split(".")[0] in sections, f"{row.theirs} is {row.ours}, but its hint is {hint}"


def test_a_script_of_verl_becomes_a_recipe_with_the_same_meaning(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    values = read_configuration(script)
    assert guess(values) == "verl"
    made = convert(values, "verl")
    file = tmp_path / "recipe.yaml"
    file.write_text(made.text("run.sh"))
    recipe = load_recipe(file).recipe
    assert (recipe.name, recipe.workflow, recipe.steps) == ("my_run", "grpo", 105)
    assert recipe.models["policy"].path == "some/model"
    assert recipe.models["policy"].gradient_checkpointing, "a default of verl"
    assert (recipe.batch.prompts_per_step, recipe.batch.responses_per_prompt) == (64, 5)
    assert (recipe.batch.updates_per_step, recipe.batch.epochs_per_step) == (4, 1)
    assert (recipe.data.max_prompt_tokens, recipe.rollout.max_response_tokens, recipe.data.overlong) == (
        256,
        128,
        "drop",
    )
    assert recipe.data.evaluation is not None
    assert (recipe.data.evaluation.path, recipe.data.evaluation.source) == ("rows/test.parquet", "data_source")
    kl = recipe.algorithm.kl
    assert (kl.coefficient, kl.place, kl.estimator) == (0.002, "loss", "k3")
    loss = recipe.algorithm.policy_loss.model_dump()
    assert (loss["type"], loss["clip_low"], loss["clip_high"], loss["dual_clip"]) == ("ppo", 0.2, 0.28, 3.0)
    assert recipe.algorithm.aggregation == "token_mean", "a default of verl"
    assert (recipe.optimizer.learning_rate, recipe.optimizer.weight_decay) == (2e-6, 0.01)
    assert (recipe.checkpoint.every_steps, recipe.evaluation.every_steps) == (20, 5)
    assert list(recipe.reward.options()) == [verl.MATH_REWARD]
    assert {left.key for left in made.left} == {
        "actor_rollout_ref.actor.fsdp_config.param_offload",
        "actor_rollout_ref.rollout.seed",
    }
    assert "trainer.n_gpus_per_node" in made.needless
    assert "# not taken over: actor_rollout_ref.rollout.seed=3" in file.read_text()
    assert Run(file, "rollout.engine=native").plan(8).nodes


def test_a_configuration_of_trl_becomes_a_recipe_with_the_same_sizes(tmp_path: Path) -> None:
    made = convert(TRL, guess(TRL), workers=4)
    file = tmp_path / "recipe.yaml"
    file.write_text(made.text("trl.yaml"))
    recipe = load_recipe(file).recipe
    # 4 processes x 4 completions x 8 rounds = 128 completions of 16 prompts, in updates of 4 x 4 x 4 = 64.
    assert (recipe.batch.prompts_per_step, recipe.batch.updates_per_step) == (16, 2)
    assert recipe.steps == 400, "of two updates each"
    assert recipe.checkpoint.every_steps == 50
    assert recipe.data.train_sets()["data.train"].answer == "solution"
    assert {name: one.weight for name, one in recipe.reward.options().items()} == {"math": 1.0, "my.rewards:short": 0.2}
    assert (recipe.algorithm.kl.coefficient, recipe.optimizer.learning_rate) == (0.04, 1e-5)
    assert recipe.algorithm.advantage.model_dump()["epsilon"] == 1e-4, "a constant of TRL"
    assert (recipe.algorithm.aggregation, recipe.optimizer.schedule) == ("token_mean", "linear"), "defaults of TRL"
    assert not made.left


def test_each_trainer_of_preferences_becomes_its_workflow(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    more: Mapping[Framework, Mapping[str, Any]] = {
        "trl-dpo": {"loss_type": ["ipo"], "beta": 0.5, "eval_strategy": "steps"},
        "trl-kto": {"desirable_weight": 1.3, "beta": 0.5},
        "trl-reward": {"center_rewards_coefficient": 0.02, "use_peft": True},
    }
    roles = {"trl-dpo": "policy", "trl-kto": "policy", "trl-reward": "reward_model"}
    for name, given in more.items():
        values = PAIRS | given
        assert guess(values) == name
        made = convert(values, name, workers=4)
        file.write_text(made.text("x"))
        recipe = load_recipe(file).recipe
        assert recipe.models[roles[name]].path == "some/model"
        assert (recipe.batch.prompts_per_step, recipe.batch.updates_per_step, recipe.steps) == (32, 1, 100)
        assert (recipe.data.max_prompt_tokens, recipe.data.max_response_tokens) == (600, 600)
        assert recipe.data.preferences == ("singles" if name == "trl-kto" else "pairs")
        assert recipe.data.shuffle == (name != "trl-kto"), "a default of TRL"
        assert recipe.optimizer.learning_rate == (1e-4 if name == "trl-reward" else 1e-6), "a default of TRL"
        assert Run(file).plan(2).nodes
        assert not made.left
        if name == "trl-dpo":
            assert recipe.data.evaluation is not None
            assert recipe.data.evaluation.chosen == "chosen"
            assert recipe.evaluation.every_steps == 10, "logging_steps, whose default is 10"
            loss = recipe.algorithm.preference_loss.model_dump()
            assert (loss["type"], loss["beta"]) == ("ipo", 0.5)
        elif name == "trl-kto":
            loss = recipe.algorithm.preference_loss.model_dump()
            assert (loss["type"], loss["desirable_weight"], loss["undesirable_weight"]) == ("kto", 1.3, 1.0)
        else:
            assert recipe.algorithm.reward_model.centering == 0.02
            assert recipe.models["reward_model"].lora is not None


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"type": "sigmoid"}),
        ({"loss_type": "hinge"}, {"type": "hinge"}),
        ({"loss_type": "apo_zero"}, {"type": "apo_zero"}),
        ({"loss_type": "sigmoid_norm"}, {"type": "sigmoid", "length_normalized": True}),
        ({"loss_type": "robust", "label_smoothing": 0.2}, {"type": "robust", "label_smoothing": 0.2}),
        ({"loss_type": "robust"}, {"type": "sigmoid", "label_smoothing": 0.0}),
        ({"loss_type": "sigmoid", "label_smoothing": 0.2}, {"type": "sigmoid", "label_smoothing": 0.0}),
        ({"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}, {"type": "sigmoid", "sft_coefficient": 0.3}),
        ({"loss_type": ["sft", "ipo"]}, {"type": "ipo", "sft_coefficient": 1.0}),
    ],
)
def test_losses_of_pairs_keep_their_meaning(
    tmp_path: Path, given: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    made = convert(PAIRS | given, "trl-dpo")
    (tmp_path / "recipe.yaml").write_text(made.text("x"))
    loss = load_recipe(tmp_path / "recipe.yaml").recipe.algorithm.preference_loss.model_dump()
    assert {key: loss[key] for key in expected} == expected
    assert not made.left
    assert {one["type"] for one in trl_preferences.LOSSES.values()} < set(PREFERENCE_LOSSES)


@pytest.mark.parametrize(
    ("framework", "given", "reason"),
    [
        ("trl-dpo", {"loss_type": "bco_pair"}, "there is one for sigmoid, sigmoid_norm, hinge"),
        ("trl-dpo", {"loss_type": ["sigmoid", "ipo"]}, "there is one loss of weight 1"),
        ("trl-dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [0.8, 1.0]}, "scale the weights"),
        ("trl-dpo", {"loss_type": ["sft"]}, "use the workflow sft"),
        ("trl-dpo", {"loss_weights": [1.0, 2.0]}, "2 entries for 1 of loss_type"),
        ("trl-dpo", {"f_divergence_type": "js_divergence"}, "there is one for reverse_kl"),
        ("trl-dpo", {"max_length": None}, "set data.max_prompt_tokens"),
        ("trl-kto", {"loss_type": "apo_zero_unpaired"}, "there is one for kto"),
        ("trl-kto", {"num_generations": 8}, "not known"),
        ("trl-reward", {"eos_token": "<end>"}, "the tokenizer's is used"),
    ],
)
def test_what_trainers_of_preferences_have_and_we_have_not_is_listed(
    framework: Framework, given: Mapping[str, Any], reason: str
) -> None:
    assert [reason in left.reason for left in convert(PAIRS | given, framework).left] == [True]


def test_a_long_row_of_a_pair_has_room_in_a_pass(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(convert(PAIRS | {"max_length": 8000}, "trl-dpo").text("x"))
    assert load_recipe(file).recipe.batch.micro_batch_tokens == "auto"
    assert Run(file).plan(1).nodes


def test_a_file_that_fits_several_trainers_needs_a_word() -> None:
    common = {"model_name_or_path": "m", "dataset_name": "d"}
    with pytest.raises(RecipeError, match="any of trl, trl-dpo, trl-kto, trl-reward: say which with --from"):
        guess(common)
    assert guess(common | {"loss_type": "hinge"}) == "trl-dpo"
    assert guess(common | {"loss_type": "kto"}) == "trl-kto"
    assert guess(common | {"loss_type": "dapo"}) == "trl"


@pytest.mark.parametrize("estimator", verl_names.ESTIMATORS)
def test_every_estimator_of_verl_gives_a_recipe_that_can_be_planned(tmp_path: Path, estimator: str) -> None:
    file = tmp_path / "recipe.yaml"
    extra: Mapping[str, Any] = {"actor_rollout_ref__rollout__n": 4, "algorithm__adv_estimator": estimator}
    file.write_text(of_verl(**extra).text("x"))
    assert Run(file).plan(2).nodes


@pytest.mark.parametrize("loss", verl_names.LOSSES)
def test_every_loss_of_verl_gives_a_valid_recipe(tmp_path: Path, loss: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(of_verl(actor_rollout_ref__actor__policy_loss__loss_mode=loss).text("x"))
    assert load_recipe(file).recipe.algorithm.policy_loss.type == verl_names.LOSSES[loss]["algorithm.policy_loss.type"]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"policy_loss__loss_mode": "dppo_tv", "clip_ratio_low": 0.15, "clip_ratio_high": 0.15, "clip_ratio_c": 20},
            {"type": "dppo", "divergence": "total_variation", "threshold": 0.15, "max_ratio": 20},
        ),
        (
            {"policy_loss__loss_mode": "dppo_kl"},
            {"type": "dppo", "divergence": "kl", "threshold": 0.2, "max_ratio": 3.0},
        ),
        (
            {"policy_loss__loss_mode": "sapo", "tau_neg": 1.2},
            {"type": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.2},
        ),
        (
            {"policy_loss__loss_mode": "clip_cov", "policy_loss__clip_cov_ub": 4.0},
            {"type": "clip_cov", "clip_low": 0.2, "clip_high": 0.2, "fraction": 2e-4, "lowest": 1.0, "highest": 4.0},
        ),
        ({"policy_loss__loss_mode": "kl_cov"}, {"type": "kl_cov", "fraction": 2e-4, "coefficient": 0.1}),
        ({"clip_ratio_high": 0.28}, {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}),
    ],
)
def test_losses_of_verl_keep_their_settings_and_their_defaults(
    tmp_path: Path, given: Mapping[str, Any], expected: Mapping[str, Any]
) -> None:
    made = of_verl(**{f"actor_rollout_ref__actor__{key}": value for key, value in given.items()})
    assert setting(made, "algorithm.policy_loss") == expected
    assert [left.key for left in made.left] == ["steps"]
    (tmp_path / "recipe.yaml").write_text(made.text("x"))
    load_recipe(tmp_path / "recipe.yaml")


def test_advantages_of_verl_keep_their_settings() -> None:
    of: Any = lambda name, **more: of_verl(algorithm__adv_estimator=name, **more)  # noqa: E731
    with_baseline = setting(of("reinforce_plus_plus_baseline", algorithm__gamma=0.9), "algorithm.advantage")
    assert with_baseline == {"type": "reinforce_pp", "group_baseline": True}, "which has no discount in verl"
    discounted = setting(of("reinforce_plus_plus", algorithm__gamma=0.9), "algorithm.advantage")
    assert discounted == {"type": "reinforce_pp", "discount": 0.9}
    made = of("gdpo", algorithm__gdpo_reward_keys=["format", "accuracy"], algorithm__gdpo_reward_weights=[0.5, 1])
    assert setting(made, "algorithm.advantage") == {"type": "gdpo"}
    assert [left.key for left in made.left] == ["algorithm.gdpo_reward_keys", "steps"]
    assert "one for each of format, accuracy, and name them in `reward`" in made.left[0].reason
    assert not [left for left in of("grpo", algorithm__gdpo_reward_keys=["format"]).left if left.key != "steps"]


def test_verl_gives_rewards_to_gdpo_as_they_are(tmp_path: Path) -> None:
    given = {"use_kl_in_reward": True, "norm_adv_by_std_in_grpo": False, "adv_estimator": "gdpo"}
    made = of_verl(
        **{f"algorithm__{key}": value for key, value in given.items()},
        reward_model__overlong_buffer__enable=True,
        reward_model__overlong_buffer__len=64,
        actor_rollout_ref__rollout__n=4,
    )
    assert {left.key for left in made.left} == {
        "algorithm.use_kl_in_reward",
        "algorithm.norm_adv_by_std_in_grpo",
        "reward_model.overlong_buffer.enable",
        "steps",
    }
    (tmp_path / "recipe.yaml").write_text(made.text("x"))
    assert Run(tmp_path / "recipe.yaml").plan(2).nodes


def test_keys_have_other_names_in_newer_releases_of_verl() -> None:
    newer = {
        "custom_reward_function": {"path": "my/score.py", "name": "grade"},
        "reward_manager": {"name": "dapo"},
        "reward_kwargs": {"overlong_buffer_cfg": {"enable": True, "len": 64, "penalty_factor": 0.5}},
        "num_workers": 8,
        "reward_model": {"enable": False, "rollout": {"seed": 42}},
    }
    whole = {f"reward__{key}": value for key, value in flat(newer)} | {"custom_reward_function__path": None}
    made = of_verl(**whole)
    assert setting(made, "reward") == {"my.score:grade": 1.0}
    assert [left.key for left in made.left] == ["reward.reward_kwargs.overlong_buffer_cfg.enable", "steps"]
    made = of_verl(reward__reward_model__enable=True, reward__reward_model__model_path="rm")
    assert setting(made, "models.reward_model.path") == "rm"
    assert guess({"reward.custom_reward_function.path": "my/score.py"}) == "verl"


def flat(settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = []
    for key, value in settings.items():
        inner = flat(value) if isinstance(value, Mapping) else [("", value)]
        found += [(f"{key}__{name}".removesuffix("__"), one) for name, one in inner]
    return found


@pytest.mark.parametrize("loss", trl.LOSSES)
@pytest.mark.parametrize("level", trl.LEVELS)
def test_every_loss_of_trl_gives_a_valid_recipe(tmp_path: Path, loss: str, level: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(convert(TRL | {"loss_type": loss, "importance_sampling_level": level}, "trl").text("x"))
    load_recipe(file)


def test_the_kernel_of_vespo_keeps_its_settings_and_is_left_out_of_other_losses() -> None:
    given = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 3.5, "vespo_lambda_neg": 4.5}
    made = convert(TRL | given | {"loss_type": "vespo"}, "trl")
    assert setting(made, "algorithm.policy_loss") == {
        "type": "vespo",
        "power_positive": 1.5,
        "rate_positive": 2.5,
        "power_negative": 3.5,
        "rate_negative": 4.5,
    }
    assert setting(made, "algorithm.aggregation") == "token_mean"
    assert "power_positive" not in convert(TRL | given | {"loss_type": "dapo"}, "trl").text("x")


@pytest.mark.parametrize("scaling", ["group", "batch", "none"])
def test_rewards_that_trl_normalizes_one_by_one_are_gdpo(tmp_path: Path, scaling: str) -> None:
    given = {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": scaling}
    made = convert(TRL | given, "trl")
    file = tmp_path / "recipe.yaml"
    file.write_text(made.text("x"))
    advantage = load_recipe(file).recipe.algorithm.advantage.model_dump()
    assert (advantage["type"], advantage["epsilon"], advantage["normalize_over_step"]) == ("gdpo", 1e-4, True)
    assert not made.left, "TRL divides by the deviation of each reward whatever scale_rewards is"
    summed = convert(TRL | {"multi_objective_aggregation": "sum_then_normalize"}, "trl")
    assert setting(summed, "algorithm.advantage.type") == "grpo"
    assert not summed.left


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (
            {"actor_rollout_ref__actor__use_kl_loss": True, "actor_rollout_ref__actor__kl_loss_type": "kl+"},
            {"kl.place": "loss", "kl.estimator": "k1", "kl.unbiased_gradient": True},
        ),
        (
            {"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__type": "adaptive"},
            {"kl.target": 0.1, "kl.horizon": 10000, "kl.coefficient": 0.001},
        ),
        (
            {"reward_model__overlong_buffer__enable": True, "reward_model__overlong_buffer__len": 64},
            {"overlong.buffer_tokens": 64},
        ),
        (
            {"algorithm__rollout_correction__rollout_is": "token"},
            {"correction.type": "truncate", "correction.level": "token", "correction.highest": 2.0},
        ),
        ({"algorithm__norm_adv_by_std_in_grpo": False}, {"advantage.normalize_by_std": False}),
    ],
)
def test_parts_of_the_algorithm_of_verl(given: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    made = of_verl(**given)
    assert {key: setting(made, f"algorithm.{key}") for key in expected} == expected
    assert [left.key for left in made.left] == ["steps"]


def test_other_parts_of_verl() -> None:
    made = of_verl(
        algorithm__filter_groups__enable=True,
        actor_rollout_ref__actor__ppo_epochs=2,
        actor_rollout_ref__model__lora_rank=8,
        actor_rollout_ref__rollout__val_kwargs__do_sample=True,
        actor_rollout_ref__rollout__val_kwargs__temperature=0.6,
        actor_rollout_ref__rollout__top_k=-1,
        actor_rollout_ref__actor__optim__lr_warmup_steps_ratio=0.1,
        trainer__total_training_steps=200,
        custom_reward_function__path="my/score.py",
        data__val_files="v",
        actor_rollout_ref__rollout__tensor_model_parallel_size=4,
        actor_rollout_ref__rollout__pipeline_model_parallel_size=2,
        actor_rollout_ref__rollout__expert_parallel_size=1,
        actor_rollout_ref__rollout__max_num_batched_tokens=8192,
        actor_rollout_ref__rollout__enable_chunked_prefill=False,
    )
    assert setting(made, "layout.rollout") == {"tp": 4, "pp": 2}
    given = {"max_num_batched_tokens": 8192, "enable_chunked_prefill": False}
    assert setting(made, "rollout.external.arguments") == given
    assert made.settings["workflow"] == "dapo"
    assert (setting(made, "batch.updates_per_step"), setting(made, "batch.epochs_per_step")) == (8, 2)
    assert setting(made, "models.policy.lora") == {"rank": 8, "alpha": 16.0, "targets": "all-linear"}
    assert (setting(made, "evaluation.temperature"), setting(made, "rollout.top_k")) == (0.6, 0)
    assert setting(made, "optimizer.warmup_updates") == 20 * 8, "of 20 steps with 8 updates each"
    assert setting(made, "reward") == {"my.score:compute_score": 1.0}
    made = of_verl(actor_rollout_ref__actor__optim__lr_warmup_steps=5, trainer__total_training_steps=200)
    assert setting(made, "optimizer.warmup_updates") == 5 * 4


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("algorithm__adv_estimator", "optimal_token_baseline", "has no counterpart; there is one for gae, grpo"),
        ("actor_rollout_ref__actor__ppo_mini_batch_size", 100, "must divide data.train_batch_size=1024"),
        ("data__train_files", ["a", "b"], "names 2 files: put them into one folder"),
        ("data__train_batch_size", "many", "is not a number"),
        ("custom_reward_function__path", "/home/me/score.py", "is not below the folder of the command"),
        ("data__truncation", "left", "prompts are not cut"),
        (
            "actor_rollout_ref__actor__optim__lr_warmup_steps_ratio",
            0.1,
            "of an unknown number: set optimizer.warmup_updates",
        ),
        ("data__train_batchsize", 3, "did you mean data.train_batch_size?"),
        ("actor_rollout_ref__actor__clip_ratio", 0.3, "verl takes clip_ratio_low and clip_ratio_high"),
        ("reward__reward_manager__name", "prime", "there is no counterpart of prime"),
        ("trainer__total_epochs", 15, "100 is a placeholder: epochs x rows / batch.prompts_per_step"),
    ],
)
def test_what_verl_has_and_we_have_not_is_listed_with_a_reason(key: str, value: Any, reason: str) -> None:
    assert any(reason in left.reason for left in of_verl(**{key: value}).left)


def test_estimators_of_verl_that_hold_nothing_in_their_place_are_left_out() -> None:
    made = of_verl(algorithm__use_kl_in_reward=True, algorithm__kl_penalty="low_var_kl")
    assert (setting(made, "algorithm.kl.place"), "estimator" in made.settings["algorithm"]["kl"]) == ("reward", False)
    (reason,) = (left.reason for left in made.left if left.key == "algorithm.kl_penalty")
    assert "only kl has the gradient of the divergence" in reason
    actor = "actor_rollout_ref__actor__"
    made = of_verl(**{f"{actor}use_kl_loss": True, f"{actor}kl_loss_type": "kl"})
    (reason,) = (left.reason for left in made.left if left.key.endswith(".use_kl_loss"))
    assert "has a gradient of 0 on average: use kl+" in reason


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"loss_type": "luspo"}, "has no counterpart"),
        ({"scale_rewards": "batch"}, "there is one for group and none"),
        ({"multi_objective_aggregation": "other"}, "there is one for sum_then_normalize, normalize_then_sum"),
        ({"num_generations": 7}, "must be a multiple of num_generations=7"),
        ({"reward_funcs": ["reasoning_accuracy_reward"], "reward_weights": None}, "name a function as package.module"),
        ({"reward_weights": [1.0]}, "1 entries for 2 reward_funcs"),
        ({"num_train_epochs": 3}, "100 is a placeholder"),
        ({"eval_strategy": "epoch"}, "set evaluation.every_steps"),
        ({"warmup_ratio": 0.1, "max_steps": -1}, "of an unknown number"),
        ({"sync_ref_model": True}, "the reference stays as it is"),
    ],
)
def test_what_trl_has_and_we_have_not_is_listed_with_a_reason(given: Mapping[str, Any], reason: str) -> None:
    assert any(reason in left.reason for left in convert(TRL | given, "trl").left)


def test_other_parts_of_trl() -> None:
    more = {
        "use_peft": True,
        "lora_r": 4,
        "lora_target_modules": ["q_proj"],
        "lora_dropout": 0.1,
        "use_vllm": True,
        "delta": 4.0,
        "epsilon_high": 0.3,
        "eval_strategy": "steps",
        "eval_steps": 20,
        "warmup_ratio": 0.05,
        "dataset_config": "main",
        "save_total_limit": 3,
    }
    made = convert(TRL | more, "trl")
    assert setting(made, "models.policy.lora") == {
        "rank": 4,
        "alpha": 32.0,
        "targets": ["q_proj"],
        "dropout": 0.1,
    }
    by_default = setting(convert(TRL | {"use_peft": True}, "trl"), "models.policy.lora")
    assert by_default == {"rank": 16, "alpha": 32.0, "targets": "all-linear", "dropout": 0.05}
    without = setting(convert(TRL | {"use_peft": True, "lora_dropout": 0.0}, "trl"), "models.policy.lora")
    assert "dropout" not in without
    loss = setting(made, "algorithm.policy_loss")
    assert (loss["clip_low"], loss["clip_high"], loss["dual_clip"]) == (0.2, 0.3, 4.0)
    assert setting(made, "rollout.engine") == "vllm"
    assert setting(made, "data.evaluation") == {"path": "some/rows", "split": "test", "subset": "main"}
    assert (setting(made, "evaluation.every_steps"), setting(made, "checkpoint.keep")) == (10, 3)
    assert setting(made, "optimizer.warmup_updates") == 40
    assert not made.left


@pytest.mark.parametrize(
    ("framework", "key", "given", "expected"),
    [
        ("verl", "trainer.project_name", {"trainer.logger": ["console", "wandb"]}, ["wandb"]),
        ("verl", "trainer.project_name", {"trainer.logger": "console"}, []),
        ("verl", "trainer.project_name", {"trainer.logger": ["mlflow", "tensorboard"]}, ["mlflow", "tensorboard"]),
        ("trl", "project", {"report_to": "trackio"}, ["trackio"]),
        ("trl", "project", {"report_to": ["wandb", "tensorboard"]}, ["wandb", "tensorboard"]),
        ("trl", "project", {"report_to": "none"}, []),
    ],
)
def test_trackers_become_loggers_with_their_project(
    tmp_path: Path, framework: Framework, key: str, given: Mapping[str, Any], expected: list[str]
) -> None:
    options = {"wandb": "project", "mlflow": "experiment", "trackio": "project"}
    file = tmp_path / "recipe.yaml"
    base = TRL if framework == "trl" else {"data.train_files": "t", "actor_rollout_ref.model.path": "m"}
    for project in (None, "mine"):
        made = convert({**base, **given} | ({} if project is None else {key: project}), framework)
        file.write_text(made.text("x"))
        loggers = load_recipe(file).recipe.loggers
        assert [one.type for one in loggers] == expected
        for one in loggers:
            named = {options[one.type]: project} if project is not None and one.type in options else {}
            assert one.options == named
            if named:
                assert LOGGERS[one.type] in inspect.signature(load_callable(BUILT_IN[one.type], "", "class")).parameters
        left = [one.key for one in made.left]
        assert not {key, *given} & {*left}
    unknown = convert({**base, next(iter(given)): ["swanlab"]}, framework)
    assert "there is no logger 'swanlab', but there are tensorboard, wandb" in unknown.left[0].reason + str(
        unknown.left
    )


def test_a_setting_without_trackers_keeps_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(convert(TRL, "trl").text("x"))
    assert [one.type for one in load_recipe(tmp_path / "recipe.yaml").recipe.loggers] == ["tensorboard"]


def test_a_reward_model_of_verl_becomes_one_that_rewards(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    given = {"reward_model__enable": True, "reward_model__model__path": "rm", "actor_rollout_ref__rollout__n": 4}
    made = of_verl(**given)
    file.write_text(made.text("x"))
    recipe = load_recipe(file).recipe
    assert (recipe.workflow, recipe.models["reward_model"].path) == ("rlhf", "rm")
    assert not recipe.reward.options()
    assert [left.key for left in made.left] == ["steps"]
    assert Run(file).plan(2).nodes
    for more, reason in (
        ({"reward_model__model__path": None}, "set models.reward_model"),
        ({"algorithm__adv_estimator": "gae"}, "add a node {run: model_reward, role: reward_model}"),
        ({"algorithm__filter_groups__enable": True}, "add a node {run: model_reward, role: reward_model}"),
        ({"custom_reward_function__path": "my/score.py"}, "the scores of the model are the only reward"),
    ):
        assert any(reason in left.reason for left in of_verl(**{**given, **more}).left), more


def test_the_penalty_of_trl_is_corrected_unless_it_says_otherwise() -> None:
    key = "algorithm.kl.unbiased_gradient"
    assert setting(convert(TRL, "trl"), key) is True, "a default of TRL"
    assert setting(convert(TRL | {"use_bias_correction_kl": False}, "trl"), key) is False
    assert "unbiased_gradient" not in setting(convert(TRL | {"beta": 0.0}, "trl"), "algorithm.kl")


def test_a_whole_configuration_of_verl_has_no_noise(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    whole = {
        "actor_rollout_ref": {
            "actor": {"_target_": "verl.X", "profiler": {"tool": "nsys"}, "rollout_n": "${oc.select:a,1}"},
            "rollout": {"engine_kwargs": {"vllm": {"a": 1}}, "do_not_know": 3},
        },
        "critic": {"optim": {"clip_grad": 1.0}},
        "reward_model": {"enable": False, "num_workers": 8},
        "algorithm": {"adv_estimator": "grpo"},
    }
    file.write_text(yaml.safe_dump(whole))
    keys = [left.key for left in convert(read_configuration(file), "verl").left]
    assert keys == ["actor_rollout_ref.rollout.do_not_know", "steps"]


def test_rows_of_verl_are_graded_as_by_the_reward_for_mathematics() -> None:
    assert math_of_verl("It is #### 42", "42").value == 1
    assert math_of_verl("It is #### 41", "42").value == 0


def command(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["convert", *words])
    error = f" {result.exception}" if result.exception and not isinstance(result.exception, SystemExit) else ""
    return result.exit_code, " ".join((result.output + error).split())


def test_the_command_writes_a_recipe_and_lists_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.sh").write_text(SCRIPT)
    code, output = command(tmp_path, "run.sh")
    assert code == 0, output
    assert "settings of verl taken over" in output
    assert "not taken over" in output
    assert "leaderless plan recipe.yaml" in output
    code, output = command(tmp_path, "run.sh")
    assert code != 0
    assert "recipe.yaml exists already: give another --out" in output


@pytest.mark.parametrize(
    ("name", "text", "words", "message"),
    [
        ("a.yaml", "a: 1\n", (), "no key of verl or TRL is in the file"),
        ("a.yaml", "num_generations: 8\n", ("--from", "trll"), "unknown framework (did you mean 'trl'?)"),
        ("a.sh", "echo hello\n", (), "starts no verl.trainer.main_"),
        ("a.sh", "echo 'hello\n", (), "cannot be read"),
        ("a.yaml", "a: [\n", (), "is not valid YAML"),
        ("a.yaml", "num_generations: 8\n", (), "models.policy"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(text)
    code, output = command(tmp_path, name, *words)
    assert code != 0
    assert message in output


def test_keys_are_shown_whole_on_a_narrow_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    key = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
    Path("a.yaml").write_text(f"actor_rollout_ref.model.path: m\ndata.train_files: t\n{key}: true\n")
    output = CliRunner().invoke(app, ["convert", "a.yaml"]).output
    cells = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    assert key in "".join(cells)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"nothing\.sh cannot be read"):
        read_configuration(tmp_path / "nothing.sh")
