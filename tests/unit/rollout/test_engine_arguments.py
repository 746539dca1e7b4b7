"""Arguments for vLLM and SGLang: which the recipe may give, and what the installed version says of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from types import ModuleType
from typing import Any, Literal
from unittest.mock import Mock

import pytest
import torch
from tests.engines import fake_sglang_python, settings_of
from tests.unit.recipes import make_recipe, plan_of

from leaderless.config import RecipeError
from leaderless.config.rollout import ExternalConfig
from leaderless.distributed.remote.child_server import ChildServer
from leaderless.planner import Cluster, make_plan
from leaderless.planner.checks.engine_arguments import DENIED
from leaderless.planner.workflow import resolve_workflow
from leaderless.rollout.external.arguments import check_installed
from leaderless.rollout.external.sglang_engine import SglangServer
from leaderless.rollout.external.vllm_process import worker as vllm_worker
from leaderless.rollout.external.vllm_process.worker import VllmWorker
from leaderless.worker.build import instances
from leaderless.worker.rank_info import RankInfo


def plan_with(arguments: Mapping[str, object], engine: str = "vllm", **more: object) -> object:
    rollout = {"engine": engine, "external": {"python": "python", "arguments": arguments}}
    return plan_of("grpo", 2, rollout=rollout, **more)


@pytest.mark.parametrize(
    ("engine", "name", "remedy"),
    [
        ("vllm", "seed", "set seed$"),
        ("vllm", "override_generation_config", "set rollout.temperature"),
        ("vllm", "served_model_name", "no client asks for the model by a name: leave it out"),
        ("vllm", "model", "set models.policy.path"),
        ("vllm", "load_format", "weights come from the trainer"),
        ("vllm", "quantization_config", "quantized as they arrive by a format that `quantization` names alone"),
        ("vllm", "spec_method", "set speculative_config in rollout.external.arguments"),
        ("vllm", "max_logprobs", "leave it out"),
        ("vllm", "lora_dtype", "set models.policy.lora"),
        ("vllm", "data_parallel_size_local", "set layout.NODE.tp"),
        ("vllm", "enforce_eager", "set rollout.external.graphs"),
        ("vllm", "kv_transfer_config", "would outlive the weights"),
        ("sglang", "port", "only the rank that starts the engine can reach it"),
        ("sglang", "tensor_parallel_size", "set layout.NODE.tp"),
        ("sglang", "random_seed", "set seed$"),
        ("sglang", "quantization", "SGLang quantizes weights when it starts, and not those that it is sent later"),
        ("sglang", "torchao_config", "as with kv_cache_dtype: fp8_e5m2"),
        ("sglang", "speculative_draft_model_quantization", "leave it out"),
        ("sglang", "speculative_algorithm", "set rollout.engine to vllm, which takes speculative_config"),
        ("sglang", "config", "write them into the recipe"),
    ],
)
def test_arguments_that_break_what_is_promised_are_refused_with_a_reason(engine: str, name: str, remedy: str) -> None:
    with pytest.raises(RecipeError, match=rf"^rollout\.external\.arguments\.{name}: {engine} is not .*{remedy}"):
        plan_with({"max_num_batched_tokens": 64, name: 1}, engine)


def test_an_argument_is_refused_for_the_engine_that_it_is_for_alone() -> None:
    plan_with({"enable_prefix_caching": False, "max_num_batched_tokens": 64, "kv_cache_dtype": "fp8"})
    plan_with({"port": 1}, "native")
    plan_with({"seed": None})
    assert make_recipe(rollout={"external": {"arguments": {"seed": None}}}).rollout.external.given_arguments == {}


def test_a_flag_of_sglang_cannot_be_false() -> None:
    with pytest.raises(
        RecipeError, match=r"disable_cuda_graph_padding: is false, but flags .* only switch something on"
    ):
        plan_with({"disable_cuda_graph_padding": False}, "sglang")


def test_a_role_has_arguments_of_its_own() -> None:
    roles = {"policy": {"rollout": {"external": {"arguments": {"seed": 3}}}}}
    with pytest.raises(RecipeError, match=r"^roles\.policy\.rollout\.external\.arguments\.seed: "):
        plan_with({"block_size": 16}, roles=roles)
    roles = {"policy": {"rollout": {"external": {"arguments": {"seed": None}}}}}
    plan_with({"seed": 3, "block_size": 16}, "native", roles=roles)


def test_settings_of_generation_with_arguments_are_keys_of_a_mapping() -> None:
    arguments: Mapping[str, Any] = {"cuda_graph_bs": [1, 2], "compilation_config": {"mode": 3}}
    first, second = (
        make_recipe(rollout={"external": {"arguments": dict(one)}}).rollout
        for one in (arguments.items(), reversed(arguments.items()))
    )
    assert [*dict.fromkeys([first, second])] == [first]


def refused(engine: str, name: str) -> bool:
    return any(fnmatchcase(name, pattern) for names in DENIED[engine] for pattern in names.split())


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What vLLM's `EngineArgs` is called with."""
    for name in ("vllm", "vllm.distributed", "vllm.distributed.parallel_state", "vllm.v1", "vllm.v1.engine"):
        monkeypatch.setitem(sys.modules, name, Mock())
    monkeypatch.setitem(sys.modules, "vllm.v1.engine.llm_engine", Mock())
    lora = ModuleType("vllm.config.lora")
    vars(lora)["MaxLoRARanks"] = Literal[8, 16]
    monkeypatch.setitem(sys.modules, "vllm.config", ModuleType("vllm.config"))
    monkeypatch.setitem(sys.modules, "vllm.config.lora", lora)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_NO_USAGE_STATS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setattr(vllm_worker, "check_version", Mock())
    monkeypatch.setattr(VllmWorker, "sleep", Mock())
    arguments: Mock = sys.modules["vllm"].EngineArgs
    return arguments


@pytest.mark.parametrize("adapters", [{}, {"policy": {"r": 4, "target_modules": ["q_proj"]}}])
def test_what_is_set_for_an_engine_cannot_be_set_twice(started: Mock, adapters: Mapping[str, Any]) -> None:
    own, matrices = {"block_size": 16, "kv_cache_dtype": "fp8"}, dict.fromkeys(adapters, ())
    settings = replace(settings_of("model"), adapters=adapters, matrices=matrices, sees_images=True, revision="main")
    VllmWorker(replace(settings, arguments=own)).start()
    given = started.call_args.kwargs
    assert own.items() <= given.items()
    assert [name for name in given if not refused("vllm", name)] == [*own]
    settings = replace(settings, trust_remote_code=True, expert_layers=(1,))
    text = SglangServer("python", settings, torch.device("cpu"), Mock(spec=ChildServer, port=1))._arguments()
    names = [part[2:].replace("-", "_") for part in text if part.startswith("--")]
    assert len(names) > 12
    assert [name for name in names if not refused("sglang", name)] == []


FAKE_VLLM = """
import dataclasses

@dataclasses.dataclass
class EngineArgs:
    max_num_batched_tokens: int = 0
    enable_prefix_caching: bool = True
    _api_process_count: int = 1
"""


def fake_vllm_python(folder: Path, before: str = "") -> str:
    """An interpreter that finds a stand-in for vLLM, after some code."""
    (folder / "vllm/engine").mkdir(parents=True)
    (folder / "vllm/__init__.py").write_text("print('some message', end='')\n__version__ = '0.99.1'\n")
    (folder / "vllm/engine/arg_utils.py").write_text(FAKE_VLLM)
    path, first = folder / "python", f"import sys; sys.path.insert(0, '{folder}'); {before}"
    path.write_text(f'#!/bin/sh\nshift 2\ncode="{first}\n$1"\nshift\nexec {sys.executable} -S -I -c "$code" "$@"\n')
    path.chmod(0o755)
    return str(path)


def external_of(python: str, arguments: Mapping[str, Any], start_timeout_s: float = 60.0) -> ExternalConfig:
    return ExternalConfig(python=python, arguments=arguments, start_timeout_s=start_timeout_s)


def test_the_installed_vllm_is_asked_which_arguments_it_has(tmp_path: Path) -> None:
    python = fake_vllm_python(tmp_path)
    known = {"max_num_batched_tokens": 64, "enable_prefix_caching": False}
    said = check_installed("vllm", external_of(python, known), "policy")
    assert said == (
        "vLLM 0.99.1 generates with role 'policy' and the arguments max_num_batched_tokens=64, "
        "enable_prefix_caching=false"
    )
    for name, hint in (
        ("max_num_batch_tokens", r" \(did you mean 'max_num_batched_tokens'\?\)"),
        ("_api_process_count", ""),
    ):
        message = rf"^rollout\.external\.arguments\.{name}: vLLM 0\.99\.1 has no argument of this name{hint}$"
        with pytest.raises(RecipeError, match=message):
            check_installed("vllm", external_of(python, {name: 1}), "policy")


def test_the_installed_sglang_is_asked_which_arguments_it_has(tmp_path: Path) -> None:
    python = fake_sglang_python(tmp_path)
    assert "SGLang 0.0.fake" in check_installed("sglang", external_of(python, {"max_prefill_tokens": 3}), "policy")
    message = r"SGLang 0\.0\.fake has no argument of this name \(did you mean 'max_prefill_tokens'\?\)"
    with pytest.raises(RecipeError, match=message):
        check_installed("sglang", external_of(python, {"max_prefil_tokens": 3}), "policy")


def test_an_engine_that_cannot_be_asked_is_named(tmp_path: Path) -> None:
    given = {"max_num_batched_tokens": 64}
    with pytest.raises(RecipeError, match=r"^rollout\.external\.python: '/no/python' is not a program"):
        check_installed("vllm", external_of("/no/python", given), "policy")
    python = fake_vllm_python(tmp_path / "broken", "raise ImportError('no such library')")
    with pytest.raises(RecipeError, match=r"cannot import vllm, .*: ImportError: no such library"):
        check_installed("vllm", external_of(python, given), "policy")
    python = fake_vllm_python(tmp_path / "slow", "import time; time.sleep(60)")
    with pytest.raises(RecipeError, match=r"within rollout\.external\.start_timeout_s=0\.2 s: raise it"):
        check_installed("vllm", external_of(python, given, start_timeout_s=0.2), "policy")


def test_nothing_is_asked_without_arguments_or_for_the_native_engine() -> None:
    assert not check_installed("vllm", external_of("/no/python", {"seed": None}), "policy")
    assert not check_installed("native", external_of("/no/python", {"seed": 3}), "policy")


def test_engines_are_asked_once_on_each_machine_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Mock(return_value="said")
    monkeypatch.setattr(instances, "check_installed", asked)
    external = {"python": "python", "arguments": {"block_size": 16}}
    layout = {"rollout": {"ranks": "1-2"}, "policy": {"ranks": "0-3"}}
    recipe = make_recipe(rollout={"engine": "vllm", "external": external}, layout=layout)
    plan, said = make_plan(recipe, resolve_workflow("grpo"), Cluster(4)), list[int]()
    for rank in range(4):
        place = RankInfo(rank, 4, rank % 2, 2)
        texts = list[str]()
        instances.check_engines(recipe, plan, place, texts.append)
        said += [rank] * len(texts)
    assert said == [1, 2]
    asked.assert_called_with("vllm", recipe.rollout.external, "policy", "rollout.external.arguments")
