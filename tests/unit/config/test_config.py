from __future__ import annotations

import re
import time
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tests.unit.recipes import make_recipe, only_problem, write_recipe

from leaderless.config import Problem, Recipe, RecipeError, all_keys, dump_recipe, load_recipe, nearest
from leaderless.config.layout import ChannelConfig, LayoutConfig
from leaderless.config.load import _NAMES, own_name
from leaderless.config.models import ModelConfig
from leaderless.config.source import apply_overrides, read_yaml


def problems_of(path, overrides=()):
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


def problem_of(path, overrides=()):
    (problem,) = problems_of(path, overrides)
    return problem


# What is written


def test_a_recipe_reads_back_what_was_written(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path)).recipe
    assert recipe.name == "tiny"
    assert recipe.models["policy"].path == "some/model"
    assert recipe.reward.options() == {"math": recipe.reward.math}
    assert recipe.batch.responses_per_prompt == 8


@pytest.mark.parametrize(
    ("short", "long"),
    [
        ({"models": {"policy": "a/b"}}, {"models": {"policy": {"path": "a/b"}}}),
        ({"reward": {"math": 2}}, {"reward": {"math": {"weight": 2.0}}}),
        ({"reward": {"exact_match": 0.5}}, {"reward": {"exact_match": {"weight": 0.5}}}),
        ({"reward": {"my.module:f": 0.5}}, {"reward": {"my.module:f": {"weight": 0.5}}}),
        ({"layout": {"policy": {"ranks": 3}}}, {"layout": {"policy": {"ranks": "3"}}}),
    ],
)
def test_shorthand_means_the_long_form(short, long):
    assert make_recipe(**short) == make_recipe(**long)


def test_a_number_may_be_written_as_yaml_1_1_reads_it_as_text(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path, more="optimizer: {learning_rate: 1e-6}\n")).recipe
    assert recipe.optimizer.learning_rate == 1e-6


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValidationError, match="frozen"):
        make_recipe().steps = 5


@pytest.mark.parametrize("role", ["reference", "critic"])
def test_the_reference_and_the_critic_are_the_policy_unless_they_are_named(role):
    recipe = make_recipe(models={"policy": "p"})
    assert recipe.model_of(role) == recipe.models["policy"]
    assert recipe.model_of("judge") is None
    recipe = make_recipe(models={"policy": "p", role: "r"})
    assert recipe.model_of(role).path == "r"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("all", (0, 1, 2, 3)), ("2", (2,)), ("0-2", (0, 1, 2)), ("3,0-1", (0, 1, 3)), ("3-3", (3,)), ("50%-100%", (2, 3))],
)
def test_ranks_are_read_as_ranges(ranks, expected):
    assert LayoutConfig(ranks=ranks).ranks_of(4) == expected


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("3-1", "runs backwards"),
        ("0-2,2", "names a rank twice"),
        ("0-9999999999", "there are 4"),
        ("0,4", "names rank 4"),
        ("50%-50%", "must begin before it ends"),
        ("0%-101%", "at 100% or before"),
        ("0%-40%", "40% of 4 ranks is no whole number"),
    ],
)
def test_ranks_that_make_no_sense_are_refused(ranks, message):
    with pytest.raises(ValueError, match=message):
        LayoutConfig(ranks=ranks).ranks_of(4)


@pytest.mark.parametrize("ranks", ["", "a", "1-", "-1", "1,", "0.5", "50%", "0%-50%,3"])
def test_ranks_that_cannot_be_read_are_refused(ranks):
    with pytest.raises(ValidationError, match="'0-3,8-11'"):
        LayoutConfig(ranks=ranks)


# What is wrong, and where


def test_an_unknown_key_is_placed_and_the_nearest_is_named(tmp_path):
    path = write_recipe(tmp_path, more="batch:\n  prompt_per_step: 4\n")
    problem = problem_of(path)
    assert problem == Problem("batch.prompt_per_step", "unknown key (did you mean 'prompts_per_step'?)", f"{path}:9")


@pytest.mark.parametrize(
    ("more", "key", "hint"),
    [
        ("stepz: 3", "stepz", "did you mean 'steps'?"),
        ("prompts_per_step: 3", "prompts_per_step", "did you mean 'batch.prompts_per_step'?"),
        ("response_per_prompt: 4", "response_per_prompt", "did you mean 'batch.responses_per_prompt'?"),
        ("batc: {prompts_per_step: 4}", "batc", "did you mean 'batch'?"),
        ("kl: {coefficient: 0.1}", "kl.coefficient", "did you mean 'algorithm.kl.coefficient'?"),
        ("optimizer: {warmup_steps: 1}", "optimizer.warmup_steps", "did you mean 'optimizer.warmup_updates'?"),
        ("critic: {warmup_steps: 1}", "critic.warmup_steps", "did you mean 'algorithm.critic.warmup_steps'?"),
        ("rollout: {n: 8}", "rollout.n", "did you mean 'batch.responses_per_prompt'?"),
        (
            "evaluation: {max_response_tokens: 9}",
            "evaluation.max_response_tokens",
            "did you mean 'rollout.max_response_tokens'?",
        ),
        ("num_generations: 8", "num_generations", "did you mean 'batch.responses_per_prompt'?"),
        ("actor: {lr: 1.0e-6}", "actor.lr", "did you mean 'optimizer.learning_rate'?"),
        ("critic: {optim: {lr: 1}}", "critic.optim.lr", "did you mean 'roles.critic.optimizer.learning_rate'?"),
        ("kl_coef: 0.1", "kl_coef", "did you mean 'algorithm.kl.coefficient'?"),
        ("max_completion_length: 9", "max_completion_length", "did you mean 'rollout.max_response_tokens'?"),
        ("wholly: {unknown: 1}", "wholly", "unknown key"),
        ("checkpoint: {zzz: 1}", "checkpoint.zzz", "known: asynchronous, best_is, best_metric, every_minutes"),
        ("layout: {policy: {ragns: 0}}", "layout.policy.ragns", "did you mean 'ranks'?"),
        ("evaluation: {temperatur_: 1}", "evaluation.temperatur_", "did you mean 'temperature'?"),
    ],
)
def test_an_unknown_key_gets_a_hint(tmp_path, more, key, hint):
    problem = problem_of(write_recipe(tmp_path, more=more))
    assert (problem.key, hint in problem.message) == (key, True), problem


def test_each_key_of_another_framework_s_section_gets_its_hint(tmp_path):
    path = write_recipe(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path, ["actor_rollout_ref.actor.optim.lr=1e-6", "actor_rollout_ref.rollout.n=5"])
    assert [(p.key, p.message, p.place) for p in caught.value.problems] == [
        (key, f"unknown key (did you mean '{meant}'?)", f"override {override}")
        for key, meant, override in (
            ("actor_rollout_ref.actor.optim.lr", "optimizer.learning_rate", "actor_rollout_ref.actor.optim.lr=1e-6"),
            ("actor_rollout_ref.rollout.n", "batch.responses_per_prompt", "actor_rollout_ref.rollout.n=5"),
        )
    ]


def test_the_page_on_recipes_shows_what_is_said_of_other_frameworks_names(tmp_path):
    page = (Path(__file__).parents[3] / "docs/concepts/recipe.md").read_text(encoding="utf-8")
    more = "num_generations: 8\nrollout: {n: 8}\nactor: {optim: {lr: 1.0e-6}}\n"
    path = write_recipe(tmp_path, more=more)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert str(caught.value).replace(str(path), "recipes/x.yaml") in page


def test_other_frameworks_names_lead_to_settings_that_exist():
    names = {key: key for key in all_keys()} | {key.partition(".")[0]: key for key in all_keys()}
    for key in _NAMES:
        fixed = re.sub(r"^roles\.\w+\.", "", key)
        section, _, rest = fixed.partition(".")
        if section in {"models", "layout"}:
            model = ModelConfig if section == "models" else LayoutConfig
            assert rest.partition(".")[2] in {"", *model.model_fields}, key
        else:
            assert fixed in names, key
    assert all(own_name(name.split(".")) == key for key, others in _NAMES.items() for name in others.split())


def test_an_unknown_option_of_a_model_or_reward_gets_a_hint(tmp_path):
    path = write_recipe(tmp_path, ("{policy: some/model}", "{policy: {path: a, revisions: b}}"))
    assert "did you mean 'revision'?" in problem_of(path).message
    path = write_recipe(tmp_path, ("{math: 1.0}", "{math: {weights: 1}}"))
    assert "did you mean 'weight'?" in problem_of(path).message
    path = write_recipe(tmp_path, ("{math: 1.0}", "{'a.b:f': {weights: 1}}"))
    assert "did you mean 'weight'?" in problem_of(path).message


@pytest.mark.parametrize(
    ("override", "key", "message"),
    [
        ("reward.math=false", "reward.math=False", "must be a number (its weight) or a section of settings"),
        ("reward.math=heavy", "reward.math='heavy'", "must be a number (its weight) or a section of settings"),
        ("reward.math=[1]", "reward.math", "must be a number (its weight) or a section of settings"),
        ("reward.format=true", "reward.format=True", "must be a section of settings"),
        ("models.policy=123", "models.policy=123", "must be text (its path) or a section of settings"),
        ("layout.rollout.ranks=[0, 1]", "layout.rollout.ranks", 'must be text: write "0-1" or "0,1"'),
        ("layout.rollout.groups=split", "layout.rollout.groups='split'", "must be 'auto' or 'whole'"),
        ("batch.responses_per_prompt=65537", "batch.responses_per_prompt=65537", "must be less than or equal to 65536"),
        ("batch=&b {x: *b}", "batch", "holds itself through an alias: write out what is meant"),
    ],
)
def test_a_value_of_the_wrong_form_is_told_what_it_may_be(tmp_path, override, key, message):
    problem = problem_of(write_recipe(tmp_path), [override])
    assert (problem.key, problem.message, problem.place) == (key, message, f"override {override}")


def test_numbers_that_yaml_takes_for_text_are_weights(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path), ["reward.math=1e-1", "reward.a.b:f=-2e0"]).recipe
    assert {name: options.weight for name, options in recipe.reward.options().items()} == {"math": 0.1, "a.b:f": -2.0}


def test_the_former_limit_of_held_out_rows_is_refused_with_the_name_of_the_other(tmp_path):
    problem = problem_of(write_recipe(tmp_path), ["data.evaluation={path: rows.jsonl, limit: 4}"])
    assert (problem.key, problem.message) == (
        "data.evaluation.limit",
        "unknown key (did you mean 'evaluation.max_prompts'?)",
    )


TENFOLD = "".join(f"{name}: &{name} [{', '.join([f'*{part}'] * 10)}]\n" for part, name in pairwise("abcdefghij"))
CHAIN = "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 3000))


@pytest.mark.parametrize(
    ("more", "line", "message"),
    [
        (f"a: &a {list(range(10))}\n{TENFOLD}", 11, "has more than 10,000 values through its aliases: use fewer"),
        (f"a0: &a0 [x]\n{CHAIN}", 108, "has more than 100 mappings and lists within each other: write fewer levels"),
        ("x: " + "[" * 3000 + "]" * 3000, 8, "has more than 100 mappings and lists within each other"),
        ("x: " + "[" * 3000, 8, "has more than 100 mappings and lists within each other"),
        ("x: " + "{a: " * 200 + "}" * 200, 8, "has more than 100 mappings and lists within each other"),
        ("x:\n  " + "- " * 3000, 9, "has more than 100 mappings and lists within each other"),
    ],
)
def test_a_recipe_that_is_too_deep_or_stands_for_too_much_is_refused_at_once(tmp_path, more, line, message):
    path = write_recipe(tmp_path, more=more)
    begin = time.process_time()
    problem = problem_of(path)
    assert time.process_time() - begin < 30
    assert (problem.place, message in problem.message) == (f"{path}:{line}", True)


def test_a_long_list_is_written_out_and_may_be_long(tmp_path):
    path = write_recipe(tmp_path, more=f"algorithm: {{x: [{', '.join(['1'] * 20_000)}]}}")
    assert "unknown key" in problem_of(path).message


@pytest.mark.parametrize(
    ("more", "line", "message"),
    [
        ("batch: &b {x: *b}", 8, "holds itself through an alias: write out what is meant"),
        ("batch:\n  x: &b [1, {y: *b}]", 9, "holds itself through an alias"),
        ("on: 1", 8, "a key must be text; put it in quotes"),
        ("batch:\n  ~: 1", 9, "a key must be text; put it in quotes"),
        ("batch:\n  0x10: 1", 9, "a key must be text; put it in quotes"),
        ("batch:\n  yes: 1\n  on: 2", 10, "is written twice"),
    ],
)
def test_what_yaml_can_hold_but_no_recipe_is_placed(tmp_path, more, line, message):
    path = write_recipe(tmp_path, more=more)
    problem = problem_of(path)
    assert problem.place == f"{path}:{line}"
    assert message in problem.message


def test_an_unknown_reward_is_placed_at_its_own_line(tmp_path):
    path = write_recipe(tmp_path, ("{math: 1.0}", "\n  math: 1.0\n  formats: 1.0"))
    problem = problem_of(path)
    assert problem.place == f"{path}:8"
    assert "reward.formats is no built-in reward (did you mean 'format'?)" in problem.message


def test_all_problems_are_named_at_once(tmp_path):
    path = write_recipe(tmp_path, ("steps: 3", "steps: 0"), ("name: tiny", "name: a b"), more="foo: 1\n")
    assert {problem.place for problem in problems_of(path)} == {f"{path}:{line}" for line in (1, 7, 8)}


def test_a_setting_that_must_be_given_is_named_with_its_section(tmp_path):
    path = write_recipe(tmp_path, ("{path: rows.jsonl}", "{}"), ("steps: 3\n", ""))
    missing = {(problem.key, problem.place) for problem in problems_of(path)}
    assert missing == {("data.train.path", f"{path}:5"), ("steps", str(path))}
    assert all("must be given" in problem.message for problem in problems_of(path))


@pytest.mark.parametrize(
    ("more", "key", "rule"),
    [
        ("seed: x", "seed='x'", "must be a valid integer"),
        ("seed: 1.5", "seed=1.5", "must be a valid integer"),
        ("seed: yes", "seed=True", "must be a number"),
        ("optimizer: {learning_rate: on}", "optimizer.learning_rate=True", "must be a number"),
        ("optimizer: {learning_rate: .nan}", "optimizer.learning_rate=nan", "must be a finite number"),
        ("evaluation: {max_prompts: true}", "evaluation.max_prompts=True", "must be a number"),
        ("batch: {prompts_per_step: 0}", "batch.prompts_per_step=0", "must be greater than or equal to 1"),
        ("batch: 4", "batch=4", "must be a section of settings"),
        ("batch:", "batch=None", "must be a section of settings"),
        ("layout: 4", "layout=4", "must be a section of settings"),
        ("layout: {policy: 4}", "layout.policy=4", "must be a section of settings"),
        ("layout: {policy: {ranks: 0,1}}", "layout.policy.1=1", "must be text"),
        ("rollout: {stop: x}", "rollout.stop='x'", "must be a list"),
        ("rollout: {stop: [x, 1]}", "rollout.stop.1=1", "must be a valid string"),
        ("optimizer: {schedule: x}", "optimizer.schedule='x'", "must be 'constant', 'linear' or 'cosine'"),
        ("rollout: {top_p: 0}", "rollout.top_p=0", "must be greater than 0"),
        ("checkpoint: {keep: [1]}", "checkpoint.keep", "must be a valid integer"),
    ],
)
def test_a_wrong_value_is_shown_with_the_rule(tmp_path, more, key, rule):
    path = write_recipe(tmp_path, more=more)
    problem = problems_of(path)[-1]
    assert (problem.key, problem.place) == (key, f"{path}:8")
    assert rule in problem.message


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (("name: tiny", "name: a/b"), "must match pattern"),
        (("name: tiny", "name: 2024-01-01"), "must be a valid string"),
        (("workflow: grpo", "workflow: ' '"), "must name a workflow"),
        (("some/model", "''"), "path must be a folder, or the name of a model on the hub"),
        (("{policy: some/model}", "{policy: 3}"), "must be text (its path) or a section of settings"),
        (("{math: 1.0}", "{math: yes}"), "must be a number (its weight) or a section of settings"),
        (("{math: 1.0}", "{format: 1.0}"), "must be given"),
        (("{math: 1.0}", "{format: {pattern: '('}}"), "is no regular expression"),
        (("rows.jsonl}", "rows.jsonl, template: chta}"), "must be 'auto', 'chat', 'plain' or a text with"),
    ],
)
def test_a_value_that_breaks_a_rule_of_its_own_is_refused(tmp_path, change, rule):
    assert rule in problem_of(write_recipe(tmp_path, change)).message


@pytest.mark.parametrize(
    ("more", "line", "message"),
    [
        ("evaluation:\n  every_steps: 2\n", 9, "needs data.evaluation"),
        (
            "evaluation:\n  metric: formats\n",
            9,
            "evaluation.metric='formats' is not one of the recipe's rewards (math)",
        ),
        ("evaluation:\n  responses_per_prompt: 4\n", 9, "needs evaluation.temperature > 0"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path, more, line, message):
    path = write_recipe(tmp_path, more=more)
    problem = problem_of(path)
    assert problem.place == f"{path}:{line}"
    assert message in problem.message


def test_evaluation_needs_a_reward(tmp_path):
    path = write_recipe(
        tmp_path, ("reward: {math: 1.0}\n", ""), ("rows.jsonl}", "rows.jsonl}\n  evaluation: {path: b}")
    )
    assert "needs a reward" in problem_of(path, ["evaluation.every_steps=1"]).message


def test_a_key_written_twice_is_refused_in_any_section(tmp_path):
    path = write_recipe(tmp_path, more="name: other\nbatch:\n  prompts_per_step: 1\n  prompts_per_step: 2\n")
    assert [(problem.key, problem.place) for problem in problems_of(path)] == [
        ("name", f"{path}:8"),
        ("batch.prompts_per_step", f"{path}:11"),
    ]


def test_a_section_may_take_over_another_and_set_some_keys_itself(tmp_path):
    models = "{policy: &policy {path: some/model, revision: a}, reference: {<<: *policy, revision: b}}"
    path = write_recipe(tmp_path, ("{policy: some/model}", models))
    reference = load_recipe(path).recipe.models["reference"]
    assert (reference.path, reference.revision) == ("some/model", "b")
    more = "rollout:\n  <<: {top_kk: 1}\n  max_sequences: 4"
    assert problem_of(write_recipe(tmp_path, more=more)).place == f"{path}:8"


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("a: [1\n", 2, "is not valid YAML"),
        ("a: 1\n\tb: 2\n", 2, "is not valid YAML"),
        ("a: 1\nb:\t2\n", 2, "found character '\\t' that cannot start any token"),
        ("a: !!python/object/apply:os.getcwd []\n", 1, "could not determine a constructor"),
        ("? [a]\n: 1\n", 1, "unhashable key"),
        ("a: 2024-13-45\n", None, "month must be in 1..12"),
        ("a: \x00\n", None, "special characters are not allowed"),
        ("- a\n", 1, "must be a mapping of sections"),
        ("", 1, "must be a mapping of sections"),
    ],
)
def test_what_is_no_yaml_mapping_is_refused(tmp_path, text, line, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    problem = problem_of(path)
    assert problem.place == (f"{path}:{line}" if line else str(path))
    assert message in problem.message


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    for path in (tmp_path / "missing.yaml", tmp_path):
        assert problem_of(path).place == str(path)
        assert "cannot be read" in problem_of(path).message
    (tmp_path / "latin.yaml").write_bytes("name: grün\n".encode("latin-1"))
    assert "'utf-8' codec can't decode" in problem_of(tmp_path / "latin.yaml").message


# Overrides


def test_overrides_are_applied_in_order_on_top_of_the_file(tmp_path):
    path = write_recipe(tmp_path, more="batch: {prompts_per_step: 4}\n")
    overrides = ["batch.prompts_per_step=8", "batch.prompts_per_step=16", "rollout.stop=[a, b]", "seed=3"]
    recipe = load_recipe(path, overrides).recipe
    assert recipe.batch.prompts_per_step == 16
    assert recipe.rollout.stop == ("a", "b")
    assert recipe.seed == 3


def test_overrides_leave_what_was_read_as_it_was(tmp_path):
    source = read_yaml(write_recipe(tmp_path, more="batch: {prompts_per_step: 4}\n"))
    changed = apply_overrides(source, ["batch.prompts_per_step=8", "seed=1"])
    assert changed.settings["batch"] == {"prompts_per_step": 8}
    assert source.settings["batch"] == {"prompts_per_step": 4}
    assert "seed" not in source.settings


def test_an_override_reaches_inside_a_shorthand(tmp_path):
    path = write_recipe(tmp_path, ("{math: 1.0}", "{math: 2.0, 'my.module:f': 3.0}"))
    overrides = ["models.policy.compute_dtype=bfloat16", "reward.math.timeout_s=1", "reward.my.module:f.timeout_s=2"]
    recipe = load_recipe(path, overrides).recipe
    assert (recipe.models["policy"].path, recipe.models["policy"].compute_dtype) == ("some/model", "bfloat16")
    options = recipe.reward.options()
    assert (options["math"].weight, options["math"].timeout_s) == (2.0, 1.0)
    assert (options["my.module:f"].weight, options["my.module:f"].timeout_s) == (3.0, 2.0)


def test_an_override_may_add_a_reward_of_ones_own(tmp_path):
    recipe = load_recipe(write_recipe(tmp_path), ["reward.my.module:f=2"]).recipe
    assert recipe.reward.options()["my.module:f"].weight == 2


def test_the_place_of_a_wrong_override_is_the_override(tmp_path):
    path = write_recipe(tmp_path, more="batch:\n  prompts_per_step: 4\n")
    assert problem_of(path, ["batch.prompts_per_step=0"]).place == "override batch.prompts_per_step=0"
    section = "batch={prompts_per_step: 0}"
    assert problem_of(path, [section]).place == f"override {section}"
    assert problem_of(path, ["evaluation.every_steps=1"]).place == "override evaluation.every_steps=1"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("steps", "must look like section.key=value"),
        ("=3", "must look like section.key=value"),
        ("batch..x=3", "must look like section.key=value"),
        ("steps=[1", "the value is not valid YAML"),
        ("steps=2024-13-45", "the value is not valid YAML"),
        ("steps.x=3", "is 3, not a section"),
        ("steps=x", "must be a valid integer"),
    ],
)
def test_an_override_that_makes_no_sense_is_refused(tmp_path, override, message):
    problem = problem_of(write_recipe(tmp_path), [override])
    assert problem.place == f"override {override}"
    assert message in problem.message


def test_an_error_found_later_is_placed_in_the_recipe(tmp_path):
    path = write_recipe(tmp_path, more="batch:\n  prompts_per_step: 4\n")
    loaded = load_recipe(path, ["seed=1"])
    places = {
        "batch.prompts_per_step": f"{path}:9",
        "batch.updates_per_step": f"{path}:8",
        "seed": "override seed=1",
        "nodes.reward.after": f"{path}:2",
        "elsewhere": str(path),
    }
    for key, place in places.items():
        assert only_problem(loaded.locate(RecipeError.at(key, "is wrong"))).place == place
    already = RecipeError([Problem("seed", "is wrong", "there")])
    assert only_problem(loaded.locate(already)).place == "there"


def test_an_error_reads_place_key_and_rule():
    error = RecipeError([Problem("a.b", "must be odd", "x.yaml:3"), Problem("", "must exist", "x.yaml")])
    assert str(error) == "x.yaml:3: a.b: must be odd\nx.yaml: must exist"


def test_the_nearest_name_is_found_or_all_are_listed():
    assert nearest("gpro", ["gspo", "grpo", "ppo"]) == " (did you mean 'grpo'?)"
    assert nearest("stpes", ["steps", "seed"]) == " (did you mean 'steps'?)"
    assert nearest("x", ["b", "a"]) == " (known: a, b)"
    assert nearest("x", []) == " (known: none)"
    assert nearest("xyz", [f"name{i}" for i in range(20)]) == ""


# Writing it out

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,12}", fullmatch=True)
words = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
texts = st.text(min_size=1, max_size=20)
fractions = st.floats(0, 1, exclude_max=True)
positive = st.floats(1e-12, 1e12)
counts = st.integers(1, 10**6)


def sections(**fields):
    return st.fixed_dictionaries({}, optional=fields)


optimizers = sections(learning_rate=positive, beta1=fractions, schedule=st.sampled_from(["linear", "cosine"]))
models = st.fixed_dictionaries(
    {"path": texts},
    optional={"revision": texts, "gradient_checkpointing": st.booleans()},
)
rewards = st.floats(-10, 10) | sections(
    weight=st.floats(-10, 10), timeout_s=positive, sources=st.lists(texts, max_size=3)
)
own_rewards = st.dictionaries(
    st.from_regex(r"[a-z]{1,4}(\.[a-z]{1,4})?:[a-z]{1,4}", fullmatch=True), rewards, max_size=2
)
layouts = sections(
    ranks=st.sampled_from(["all", "0", "0-3,8"]), dp=counts, tp=counts, groups=st.sampled_from(["whole", "auto"])
)
recipes = st.fixed_dictionaries(
    {
        "name": names,
        "workflow": texts,
        "models": st.dictionaries(texts, models | texts, max_size=3),
        "data": st.fixed_dictionaries(
            {"train": st.fixed_dictionaries({"path": texts}, optional={"answer": texts, "limit": counts})},
            optional={"max_prompt_tokens": counts, "shuffle": st.booleans()},
        ),
        "steps": counts,
    },
    optional={
        "seed": st.integers(0, 2**31 - 1),
        "reward": st.builds(dict.__or__, sections(math=rewards, exact_match=rewards), own_rewards),
        "batch": sections(prompts_per_step=counts, micro_batch_tokens=counts),
        "rollout": sections(temperature=st.floats(0, 10), stop=st.lists(texts, max_size=3)),
        "optimizer": optimizers,
        "roles": st.dictionaries(words, sections(optimizer=optimizers, rollout=st.none()), max_size=2),
        "layout": st.dictionaries(words, layouts, max_size=3),
        "run": sections(directory=texts, timeout_s=positive),
    },
)


MINIMAL = {"name": "a", "workflow": "w", "models": {}, "data": {"train": {"path": "x"}}, "steps": 1}


@given(written=recipes)
@example(written=MINIMAL | {"models": {"policy": {"path": "m", "lora": {"adapter": "folder", "dropout": 0.0}}}})
@example(written=MINIMAL | {"reward": {"judge": {"url": "http://localhost/v1", "model": "m", "pairwise": {}}}})
@example(written=MINIMAL | {"rollout": {"stop": ["\n", "\x85", "a\u2028b", "漢字", " ", "- a: #"]}})
@settings(deadline=None)
def test_a_recipe_that_is_written_out_reads_back_equal(tmp_path_factory, written):
    assume(written["workflow"].strip())
    recipe = Recipe.model_validate(written)
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path).recipe == recipe


def test_a_recipe_with_a_fixed_lag_reads_back_though_its_defaults_are_written_out(tmp_path):
    ahead = make_recipe().model_copy(update={"channels": {"rollout": ChannelConfig(capacity=1)}})
    (tmp_path / "recipe.yaml").write_text(dump_recipe(ahead), encoding="utf-8")
    assert load_recipe(tmp_path / "recipe.yaml").recipe.open_channels["rollout"].capacity == 1


def test_a_recipe_is_written_out_with_every_default():
    text = dump_recipe(make_recipe())
    assert "responses_per_prompt: 8" in text
    assert "epsilon: 1.0e-08" in text


def test_a_setting_that_is_switched_off_with_null_stays_off_when_it_is_read_back(tmp_path):
    recipe = make_recipe(workflow="ppo", algorithm={"critic": {"value_clip": None}})
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe), encoding="utf-8")
    assert load_recipe(path).recipe.algorithm.critic.value_clip is None


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("'http://me:pa/ss@host:5000/a': no answer", "'http://***@host:5000/a': no answer"),
        ("https://host/v1?key=abc&more=1#part is not", "https://host/v1?***#part is not"),
        ("http://a:b@c?d=e and sqlite:///f.db", "http://***@c?*** and sqlite:///f.db"),
        ("ask me@example.org?", "ask me@example.org?"),
    ],
)
def test_errors_show_no_passwords_of_addresses(written: str, shown: str) -> None:
    error = RecipeError([Problem("loggers.0.options.uri", written, written)])
    assert only_problem(error) == Problem("loggers.0.options.uri", shown, shown)
    assert str(error.noted(f" {written}")) == f"{shown}: loggers.0.options.uri: {shown} {shown}"
