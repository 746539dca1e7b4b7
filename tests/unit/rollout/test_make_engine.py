"""From a recipe to its engine: which engine, with which settings, and what is refused."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch
from tests.tiny import judge_model, mixture_model, tiny_model, tiny_recipe

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.config.rollout import ExternalConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.planner import Cluster, Layout, Plan, engines, make_plan, rollout_engine
from leaderless.planner.engines import choose_engine
from leaderless.planner.memory.limits import CachePool
from leaderless.planner.workflow import resolve_workflow
from leaderless.rollout import make_engine as make
from leaderless.rollout.external.engine import ExternalEngine
from leaderless.rollout.external.lora_slots import Host
from leaderless.rollout.external.sglang_engine import SglangServer
from leaderless.rollout.external.vllm_engine import InProcessVllm, VllmElsewhere, VllmServer
from leaderless.rollout.make_engine import RolloutSetup, make_engine
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.paged_attention import PagedAttend, attend_with_torch
from leaderless.rollout.native.paged_engine import PagedEngine
from leaderless.rollout.wrapped_engine import ALONE
from leaderless.run.planned_run import plan_evaluation

PYTHON = {"rollout.external.python": sys.executable}


def recipe_of(tmp_path: Path, changes: Mapping[str, object]) -> Recipe:
    return tiny_recipe(tmp_path, tiny_model(), changes).recipe


def plan_of(tmp_path: Path, changes: Mapping[str, object], world_size: int = 1, engine: str = "native") -> Plan:
    recipe = recipe_of(tmp_path, changes)
    return make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(world_size, engine))


def engine_in(plan: Plan) -> str:
    return plan.instances[0].engine


def setup_of(
    tmp_path: Path,
    recipe: Recipe,
    *,
    world_size: int = 1,
    max_tokens: int = 0,
    device: str = "cpu",
    shard: ProcessGroup = ALONE,
) -> RolloutSetup:
    config = recipe.models["policy"]
    return RolloutSetup(
        role="policy",
        rollout=recipe.rollout,
        model=config,
        max_tokens=max_tokens or recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens,
        tokenizer=load_tokenizer(config, "policy"),
        layout=Layout(tuple(range(world_size)), world_size // shard.size, tp=shard.size),
        shard=shard,
        world_size=world_size,
        device=torch.device(device),
        logs=tmp_path,
        report=print,
    )


def engine_of(tmp_path: Path, name: str, changes: Mapping[str, object], world_size: int = 1) -> ExternalEngine:
    engine = make_engine(name, setup_of(tmp_path, recipe_of(tmp_path, changes), world_size=world_size))
    assert isinstance(engine, ExternalEngine)
    return engine


def test_the_plan_says_what_generates(tmp_path: Path) -> None:
    assert engine_in(plan_of(tmp_path, {})) == "native"
    assert engine_in(plan_of(tmp_path, PYTHON, engine="vllm")) == "vllm"
    assert engine_in(plan_of(tmp_path, {"rollout.engine": "native"}, engine="vllm")) == "native"
    plan = plan_of(tmp_path, {"rollout.engine": "sglang", **PYTHON})
    assert engine_in(plan) == "sglang"
    assert plan_of(tmp_path, PYTHON).hash() != plan_of(tmp_path, PYTHON, engine="vllm").hash()


def test_a_native_engine_has_the_planned_pool_where_kernels_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = replace(setup_of(tmp_path, recipe_of(tmp_path, {})), pool=CachePool(1280, stays=True))
    assert type(make_engine("native", setup)) is NativeEngine, "on a CPU"
    asked = list[tuple[object, ...]]()

    def working(*arguments: object) -> PagedAttend:
        asked.append(arguments[1:])
        return attend_with_torch

    monkeypatch.setattr(make, "paged_attention", working)
    assert type(make_engine("native", replace(setup, pool=None))) is NativeEngine
    assert not asked
    engine = make_engine("native", setup)
    assert isinstance(engine, PagedEngine)
    assert asked == [(torch.float32, setup.device, setup.shard)]
    assert (engine._pages.num_pages, engine._options.keeps_memory) == (1280 // 64, True)
    assert engine._options.longest == setup.max_tokens
    assert engine.policy_version is None


def test_an_engine_knows_what_its_arguments_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 5}
    given = {"kv_cache_dtype": "fp8", "speculative_config": drafts}
    engine = engine_of(tmp_path, "vllm", {**PYTHON, "rollout.external.arguments": given})
    assert (engine._tolerance, engine._driver._settings.num_drafts) == (1.0, 5)  # type: ignore[attr-defined]
    plain = engine_of(tmp_path, "vllm", PYTHON)
    assert (plain._tolerance, plain._driver._settings.num_drafts) == (5e-4, 0)  # type: ignore[attr-defined]
    monkeypatch.setattr(make, "reserved_tokens", Mock(return_value=frozenset({3})))  # of a model that sees images
    with pytest.raises(RecipeError, match=r"speculative_config: is given, but the model of 'policy' sees images"):
        engine_of(tmp_path, "vllm", {**PYTHON, "rollout.external.arguments": given})


def test_the_plan_counts_the_weights_of_an_engine_of_its_own(tmp_path: Path) -> None:
    memories = [plan_of(tmp_path, PYTHON, engine=engine).memory for engine in ("native", "vllm")]
    native, vllm = [memory.cpu.phases["policy generates"] for memory in memories if memory is not None]
    assert native["unsharded weights"] == 0
    num_weights = sum(p.numel() for p in load_causal_lm(ModelConfig(path=tiny_model()), "policy").parameters())
    assert vllm["engine's weights"] == 4 * num_weights
    assert 0 < vllm["kv cache"] < native["kv cache"], "only the native engine has slots of powers of two"


def test_the_plan_counts_an_engine_that_is_sent_adapters(tmp_path: Path) -> None:
    lora = {**PYTHON, "models.policy": {"path": tiny_model(), "lora": {"rank": 2}}}
    merged = lora | {"rollout.external.merge_adapters": True}
    apart, whole = (plan_of(tmp_path, one, engine="vllm").memory for one in (lora, merged))
    assert apart is not None
    assert whole is not None
    num_weights = sum(p.numel() for p in load_causal_lm(ModelConfig(path=tiny_model()), "policy").parameters())
    assert apart.cpu.phases["policy generates"]["engine's weights"] == 4 * num_weights
    assert whole.cpu.phases["policy generates"]["engine's weights"] == 8 * num_weights, "merged copies are sent"
    assert apart.accelerator.host["bases of engines asleep"] == 4 * num_weights
    assert "bases of engines asleep" not in whole.accelerator.host
    assert "policy engine's base" not in apart.cpu.resident, "it is counted while it generates"


def test_auto_is_vllm_where_it_is_and_a_cuda_device_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for has_cuda in (False, True):
        monkeypatch.setattr(engines, "find_accelerator", Mock(return_value="cuda" if has_cuda else None))
        for has_module in (False, True):
            monkeypatch.setattr(engines, "find_spec", Mock(return_value=object() if has_module else None))
            expected = "vllm" if has_cuda and has_module else "native"
            assert choose_engine(recipe_of(tmp_path, {}).rollout) == expected
            assert choose_engine(recipe_of(tmp_path, PYTHON).rollout) == ("vllm" if has_cuda else "native")


def test_vllm_in_the_ranks_needs_all_of_them(tmp_path: Path) -> None:
    apart = {"rollout.engine": "vllm", "layout": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}}
    with pytest.raises(RecipeError, match=r"rollout.external.python: must be given where not all ranks generate"):
        plan_of(tmp_path, apart, 2)
    assert engine_in(plan_of(tmp_path, apart | PYTHON, 2)) == "vllm"
    assert engine_in(plan_of(tmp_path, {"rollout.engine": "vllm"}, 2)) == "vllm"


def test_each_engine_gets_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "find_spec", Mock())
    assert isinstance(engine_of(tmp_path, "vllm", PYTHON)._driver, VllmServer)
    assert isinstance(engine_of(tmp_path, "sglang", PYTHON)._driver, SglangServer)
    in_process = [engine_of(tmp_path, "vllm", {}, world_size=count)._driver for count in (1, 2)]
    assert all(isinstance(driver, InProcessVllm) for driver in in_process)
    assert [driver.settings.meeting is not None for driver in in_process] == [False, True]


def test_the_engine_of_several_roles_records_experts_if_one_of_them_replays_these(tmp_path: Path) -> None:
    config = ModelConfig(path=mixture_model(tiny_model("qwen3")), lora=LoraConfig(rank=2, targets=["q_proj"]))
    host = Host(dict.fromkeys(("planner", "solver"), config), records_experts=True)
    setup = setup_of(tmp_path, recipe_of(tmp_path, PYTHON))
    found = {}
    for role in host.models:
        engine = make_engine(
            "sglang", replace(setup, role=role, model=config, host=host, records_experts=role == "solver")
        )
        assert isinstance(engine, ExternalEngine)
        found[role] = engine.experts_per_token
    assert found == {"planner": 0, "solver": 2 * 2}
    assert isinstance(host.driver, SglangServer)
    settings = host.driver._settings
    assert (list(settings.expert_layers), settings.experts_per_token) == ([0, 1], 2)
    assert list(settings.adapters) == list(settings.matrices) == ["planner", "solver"]


def test_an_engine_that_is_not_there_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(make, "find_spec", Mock(return_value=None))
    with pytest.raises(RecipeError, match=r"rollout.engine: vllm: vLLM cannot be imported here: install it, or name"):
        engine_of(tmp_path, "vllm", {"rollout.engine": "vllm"})
    with pytest.raises(RecipeError, match=r"rollout.external.python: '/no/python' is not a program on this machine"):
        engine_of(tmp_path, "vllm", {"rollout.external.python": "/no/python"})


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("memory_fraction", 0.7),
        ("graphs", False),
        ("merge_adapters", True),
        ("arguments", {"max_num_batched_tokens": 64}),
        ("start_timeout_s", 5.0),
        ("answer_timeout_s", 6.0),
    ],
)
def test_every_setting_of_external_engines_changes_something(tmp_path: Path, setting: str, value: object) -> None:
    described = []
    for changes in ({}, {f"rollout.external.{setting}": value}):
        model = {"models.policy": {"path": tiny_model(), "lora": {"rank": 2}}}
        recipe = recipe_of(tmp_path, {**PYTHON, **model, **changes})
        setup = setup_of(tmp_path, recipe, max_tokens=64, device="cuda:0")
        settings = make._settings(setup)
        driver = make._driver("vllm", setup, settings)
        assert isinstance(driver, VllmServer)
        server = driver._server
        described.append((settings, server._start_timeout_s, server.answer_timeout_s))
    assert described[0] != described[1]


def test_all_settings_of_external_engines_are_tried_above() -> None:
    tried = {"memory_fraction", "graphs", "merge_adapters", "arguments", "start_timeout_s"}
    tried.add("answer_timeout_s")
    assert set(ExternalConfig.model_fields) == {"python", "addresses", *tried}


def test_each_rank_has_the_engine_elsewhere_at_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEADERLESS_TOKEN", "secret")
    recipe = recipe_of(tmp_path, {"rollout.external.addresses": ["a:1", "b:2"]})
    shard = Mock(spec=ProcessGroup, rank=5, size=1, ranks=(5,), hosts={}, activity=Mock())
    setup = replace(setup_of(tmp_path, recipe, shard=shard), layout=Layout((4, 5), 2), world_size=6)
    driver = make._driver("vllm", setup, make._settings(setup))
    assert isinstance(driver, VllmElsewhere)
    server = driver._server
    assert (server.host, server.port, server.token) == ("b", 2, "secret")
    assert driver._settings.meeting is None, "it is no part of the processes of ranks"


def test_sglang_is_told_what_the_recipe_says(tmp_path: Path) -> None:
    changes = {**PYTHON, "rollout.external.memory_fraction": 0.6, "rollout.max_sequences": 9}
    flags = {"disable_radix_cache": True, "max_prefill_tokens": 64, "schedule_policy": None}
    changes["rollout.external.arguments"] = {**flags, "cuda_graph_bs": [1, 2], "extra": {"a": 1}}
    driver = engine_of(tmp_path, "sglang", changes)._driver
    assert isinstance(driver, SglangServer)
    text = " ".join(driver._arguments())
    assert f"--model-path {tiny_model()} --host 127.0.0.1" in text
    for part in ("--mem-fraction-static 0.6", "--max-running-requests 9", "--context-length 14", "--dtype float32"):
        assert part in text
    assert text.endswith('--disable-radix-cache --max-prefill-tokens 64 --cuda-graph-bs 1 2 --extra {"a": 1}')


def test_the_cache_in_host_memory_is_what_the_longest_sequences_need(tmp_path: Path) -> None:
    settings = make._settings(setup_of(tmp_path, recipe_of(tmp_path, PYTHON), max_tokens=130))
    values_per_token = 2 * 2 * 2 * 8  # keys and values, layers, heads, width
    assert settings.kv_cache_bytes == (16 * 2 + 1) * 128 * values_per_token * 4
    little = recipe_of(tmp_path, {**PYTHON, "rollout.external.memory_fraction": 1e-6})
    bytes_of_host = psutil.virtual_memory().total
    assert make._settings(setup_of(tmp_path, little, max_tokens=130)).kv_cache_bytes == int(1e-6 * bytes_of_host)


def test_the_native_engine_is_made_where_nothing_else_is_asked_for(tmp_path: Path) -> None:
    assert isinstance(make_engine("native", setup_of(tmp_path, recipe_of(tmp_path, {}))), NativeEngine)


def test_sglang_needs_an_interpreter_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"engine: sglang needs external\.python"):
        recipe_of(tmp_path, {"rollout.engine": "sglang"})
    with pytest.raises(RecipeError, match=r"rollout\.external\.python.*SGLang"):
        engine_of(tmp_path, "sglang", {})


OWN = "tests.contracts.plain_engine:make"


def test_an_engine_of_ones_own_is_named_in_the_recipe(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, {"rollout.engine": OWN})
    assert engine_in(plan) == OWN
    assert plan.memory is not None
    assert plan.memory.cpu.phases["policy generates"]["engine's weights"] > 0
    engine = make_engine(OWN, setup_of(tmp_path, recipe_of(tmp_path, {"rollout.engine": OWN})))
    assert type(engine).__name__ == "PlainEngine"


@rollout_engine()
def makes_nothing(setup: RolloutSetup) -> object:
    return object()


def undeclared(setup: RolloutSetup) -> object:
    return object()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nativ", r"rollout.engine: unknown engine 'nativ'.*did you mean 'native'"),
        ("tests.contracts.plain_engine:mak", r"rollout.engine: module 'tests.contracts.plain_engine' has no function"),
        (f"{__name__}:undeclared", r"must be declared with @leaderless.rollout_engine"),
        ("my engine", "must be the name of an engine, such as native, or package.module:function"),
    ],
)
def test_an_engine_that_is_none_is_refused_when_the_recipe_is_read(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        plan_of(tmp_path, {"rollout.engine": name})


def test_what_is_made_must_be_an_engine(tmp_path: Path) -> None:
    name = f"{__name__}:makes_nothing"
    message = "made object for role 'policy', which is no RolloutEngine: it lacks abort, close, forget, load_weights"
    with pytest.raises(RecipeError, match=message):
        make_engine(name, setup_of(tmp_path, recipe_of(tmp_path, {})))


def test_an_engine_spans_no_unknown_axis() -> None:
    with pytest.raises(ValueError, match=r"@rollout_engine\(axes=\['ep'\]\): 'ep' is none of pp, cp, tp"):
        rollout_engine(axes=["ep"])


def test_an_engine_declares_what_becomes_of_its_cache() -> None:
    with pytest.raises(ValueError, match=r"\(updates=\['forget'\]\): 'forget' is none of keep, recompute"):
        rollout_engine(updates=["forget"])


def test_an_engine_of_several_ranks_has_its_part_of_the_cache_and_is_never_started_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(tmp_path, {"rollout.engine": "vllm", **PYTHON})
    alone = make_engine("vllm", setup_of(tmp_path, recipe))
    # Without peers in reach, a broadcast could not return: both ranks are asked for their text, and this one is first.
    facts = {"rank": 0, "size": 2, "ranks": (0, 1), "hosts": {0: 0, 1: 0}, "activity": Mock()}
    shard = Mock(spec=ProcessGroup, broadcast_text=lambda text, *_: text, **facts)
    part = make_engine("vllm", setup_of(tmp_path, recipe, world_size=2, shard=shard))
    whole, half = alone._driver._settings, part._driver._settings  # type: ignore[attr-defined]
    assert (half.tensor_parallel_size, half.rank, half.kv_cache_bytes * 2) == (2, 0, whole.kv_cache_bytes)
    assert (whole.meeting is None, half.meeting is None) == (True, False)
    assert (alone._report is None, part._report is None) == (False, True)  # type: ignore[attr-defined]
    assert half.meeting.startswith("file:///"), "of one machine"
    shard.hosts = {0: 0, 1: 1}
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    apart = make_engine("vllm", setup_of(tmp_path, recipe, world_size=2, shard=shard))
    # Another name on each machine: parts with the same one would share memory.
    assert re.fullmatch(r"tcp://127\.0\.0\.1:\d+\?machine=0", apart._driver._settings.meeting)  # type: ignore[attr-defined]
    setup = replace(setup_of(tmp_path, recipe, world_size=2, shard=shard), layout=Layout((0, 1), 1, tp=2, ep=2))
    with pytest.raises(RecipeError, match="layout: ep=2: on a CPU, vLLM does not divide experts"):
        make_engine("vllm", setup)
    settings = make._settings(replace(setup, device=torch.device("cuda")))
    assert (settings.divides_experts, settings.num_stages) == (True, 1)


@pytest.mark.parametrize(("workers", "tp"), [(4, 2), (3, 1)])
def test_leaderless_eval_answers_with_engines_that_span_ranks_if_there_are_enough(
    tmp_path: Path, workers: int, tp: int
) -> None:
    held_out = {"path": "held_out.jsonl", "prompt": "question", "answer": "answer", "template": "plain"}
    settings = {"rollout.engine": "vllm", **PYTHON, "layout": {"rollout": {"tp": 2}}, "data.evaluation": held_out}
    loaded = tiny_recipe(tmp_path, tiny_model(), settings)
    (node,) = plan_evaluation(loaded, None, workers).plan.nodes
    assert (node.layout.tp, node.layout.dp) == (tp, workers // tp)


@pytest.mark.parametrize(
    ("layout", "engines", "tps"),
    [
        ({"rollout": {"ranks": "0-1", "tp": 2}, "reward": {"ranks": "2-3"}}, ("vllm", "native"), (2, 1)),
        ({"rollout": {"ranks": "0-1"}, "reward": {"ranks": "2-3", "tp": 2}}, ("native", "vllm"), (1, 2)),
    ],
)
def test_leaderless_eval_judges_with_engines_that_span_ranks_as_in_training(
    tmp_path: Path, layout: dict[str, object], engines: tuple[str, str], tps: tuple[int, int]
) -> None:
    held_out = {"path": "held_out.jsonl", "prompt": "question", "template": "plain"}
    rollouts = [
        {"engine": engine, **({"external": {"python": "python"}} if engine == "vllm" else {})} for engine in engines
    ]
    settings = {
        "models.judge": judge_model(),
        "reward": {"judge": {"role": "judge", "max_question_tokens": 100, "max_answer_tokens": 4}},
        "rollout": {**rollouts[0], "max_response_tokens": 6},
        "roles.judge.rollout": {"max_response_tokens": 6, **rollouts[1]},
        "layout": layout,
        "data.evaluation": held_out,
    }
    loaded = tiny_recipe(tmp_path, tiny_model(), settings)
    plan = plan_evaluation(loaded, None, 4).plan
    assert [(one.role, one.serving_layout.tp, one.serving_layout.dp) for one in plan.instances] == [
        ("policy", tps[0], 4 // tps[0]),
        ("judge", tps[1], 4 // tps[1]),
    ]
    assert {one.layout.ranks for one in plan.instances} == {(0, 1, 2, 3)}
