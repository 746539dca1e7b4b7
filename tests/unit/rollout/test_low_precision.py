"""Formats of low precision and drafts: which are taken, what they change, and what a plan says of them."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console
from tests.engines import settings_of
from tests.tiny import mixture_model, tiny_model
from tests.unit.recipes import make_recipe, plan_of
from tests.unit.rollout.test_engine_arguments import external_of, fake_vllm_python, plan_with

from leaderless.config import Recipe, RecipeError
from leaderless.config.low_precision import FORMATS, formats_of
from leaderless.planner.show.precision import precision_lines
from leaderless.planner.show.text import print_plan
from leaderless.rollout.engine import PROBE_TOLERANCE, Completion, Delta, probe_tolerance
from leaderless.rollout.external.arguments import check_device, check_installed
from leaderless.rollout.external.vllm_process.drafts import expand
from leaderless.rollout.external.vllm_process.int8 import quantized, with_int8

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def recipe_with(arguments: Mapping[str, object], engine: str = "vllm", **more: object) -> Recipe:
    return make_recipe(rollout={"engine": engine, "external": {"python": "python", "arguments": arguments}}, **more)


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        (
            "vllm",
            {"quantization": "awq"},
            r"quantization: is \"awq\", but .* reads none that were quantized before: ch",
        ),
        ("vllm", {"quantization": "fp8"}, r"choose int8_per_channel, fp8_per_channel, fp8_per_block, fp8_per_tensor"),
        ("vllm", {"kv_cache_dtype": "turboquant_k8v4"}, r"the difference .* that it explains is not known: choose fp8"),
        ("sglang", {"kv_cache_dtype": "fp4_e2m1"}, r"choose fp8_e4m3 or fp8_e5m2$"),
        ("vllm", {"speculative_config": 3}, r"must be a mapping with method and num_speculative_tokens"),
        (
            "vllm",
            {"speculative_config": {**NGRAM, "method": "eagle3"}},
            r"\.method: is \"eagle3\": a model that drafts",
        ),
        ("vllm", {"speculative_config": {**NGRAM, "model": "m"}}, r"nothing sends or keeps them: leave out `model`"),
        (
            "vllm",
            {"speculative_config": {**NGRAM, "rejection_sample_method": "synthetic"}},
            r"rejection_sample_method: is \"synthetic\": tokens would not have the distribution",
        ),
    ],
)
def test_what_an_engine_cannot_do_with_weights_that_it_is_sent_is_refused(
    engine: str, arguments: Mapping[str, object], message: str
) -> None:
    with pytest.raises(RecipeError, match=rf"^rollout\.external\.arguments\..*{message}"):
        plan_with(arguments, engine)


@pytest.mark.parametrize(("engine", "one"), [(name, one) for name, some in FORMATS.items() for one in some])
def test_every_format_is_taken_by_a_plan_unless_it_is_for_experts(engine: str, one: Any) -> None:
    given = {one.argument: one.value}
    assert formats_of(engine, given) == [one]
    if one.is_for_experts:
        external = {"python": "python", "arguments": given}
        rollout = {"engine": engine, "external": external, "max_response_tokens": 8}
        data = {"train": {"path": "rows.jsonl"}, "max_prompt_tokens": 16}
        with pytest.raises(RecipeError, match=rf"{one.argument}: is {one.value}, which quantizes experts alone"):
            plan_of("grpo", 1, rollout=rollout, data=data, models={"policy": {"path": tiny_model("qwen3")}})
        plan_of("grpo", 1, rollout=rollout, data=data, models={"policy": {"path": mixture_model(tiny_model("qwen3"))}})
    else:
        plan_with(given, engine)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout.min_p": 0.1}, r"is given, but rollout\.top_k is 4, and vLLM cannot do both"),
        ({"evaluation": {"top_p": 0.9}}, r"is given, but evaluation\.top_p is 0\.9, and vLLM cannot do both"),
        ({"algorithm": {"replay_experts": True}}, r"replay_experts"),
    ],
)
def test_drafts_are_refused_where_vllm_cannot_do_both(changes: Mapping[str, Any], message: str) -> None:
    rollout = {"engine": "vllm", "external": {"python": "python", "arguments": {"speculative_config": NGRAM}}}
    rollout |= {"min_p": changes["rollout.min_p"], "top_k": 4} if "rollout.min_p" in changes else {}
    plan_of("grpo", 1, rollout={**rollout, "min_p": 0.0, "top_k": 0})
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", 1, rollout=rollout, **{k: v for k, v in changes.items() if "." not in k})


def test_a_format_that_the_installed_version_does_not_have_is_refused(tmp_path: Path) -> None:
    python = fake_vllm_python(tmp_path)
    (tmp_path / "vllm/engine/arg_utils.py").write_text(
        "import dataclasses\n@dataclasses.dataclass\nclass EngineArgs:\n    quantization: str = ''\n"
        "    kv_cache_dtype: str = ''\n"
    )
    (tmp_path / "vllm/config").mkdir()
    (tmp_path / "vllm/config/__init__.py").write_text("")
    (tmp_path / "vllm/config/cache.py").write_text("from typing import Literal\nCacheDType = Literal['auto', 'fp8']\n")
    (tmp_path / "vllm/config/quantization.py").write_text("ONLINE_QUANT_SHORTHAND_NAMES = ('mxfp8', 'online')\n")
    known = {"quantization": "mxfp8", "kv_cache_dtype": "fp8"}
    assert "mxfp8" in check_installed("vllm", external_of(python, known), "policy")
    assert check_installed("vllm", external_of(python, {"quantization": "int8_per_channel"}), "policy")
    message = r"^rollout\.external\.arguments\.kv_cache_dtype: is fp8_e5m2, but vLLM 0\.99\.1 has no .*: choose fp8, or"
    with pytest.raises(RecipeError, match=message):
        check_installed("vllm", external_of(python, {"kv_cache_dtype": "fp8_e5m2"}), "policy")
    with pytest.raises(RecipeError, match=r"quantization: is fp8_per_channel, .* choose mxfp8, or install a version"):
        check_installed("vllm", external_of(python, {"quantization": "fp8_per_channel"}), "policy")


def check(arguments: Mapping[str, Any], device: torch.device, compute_dtype: str = "bfloat16") -> None:
    check_device("vllm", external_of("python", arguments), device, compute_dtype, "policy")


def test_a_device_computes_in_its_formats_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    capability = Mock(return_value=(8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", Mock(return_value="Card"))
    check({"quantization": "int8_per_channel"}, CUDA)
    message = (
        r"^rollout\.external\.arguments\.quantization: is fp8_per_block for role 'policy', but cuda:0 \(Card\) has "
    )
    with pytest.raises(
        RecipeError, match=message + r"compute capability 8\.0, and FP8 needs 8\.9: choose int8_per_channel, .* leave"
    ):
        check({"quantization": "fp8_per_block"}, CUDA)
    capability.return_value = (8, 9)
    check({"quantization": "fp8_per_block", "kv_cache_dtype": "fp8"}, CUDA)
    check({"quantization": "fp8_per_channel", "kv_cache_dtype": "fp8"}, CPU)
    with pytest.raises(
        RecipeError, match=r"the CPU computes this run, .* choose int8_per_channel, fp8_per_channel, or"
    ):
        check({"quantization": "fp8_per_tensor"}, CPU)
    with pytest.raises(RecipeError, match=r"kv_cache_dtype: is int8_per_token_head .* choose fp8, fp8_e4m3, fp8_e5m2"):
        check({"kv_cache_dtype": "int8_per_token_head"}, CPU)


def test_weights_of_32_bits_are_not_quantized() -> None:
    check({"kv_cache_dtype": "fp8"}, CPU, "float32")
    with pytest.raises(RecipeError, match=r"set models\.policy\.compute_dtype to bfloat16"):
        check({"quantization": "fp8_per_channel"}, CPU, "float32")


def test_the_probe_may_differ_by_what_the_coarsest_format_explains() -> None:
    fine, coarse = formats_of("vllm", {"kv_cache_dtype": "fp8"}), formats_of("vllm", {"quantization": "mxfp4"})
    assert probe_tolerance("bfloat16") == PROBE_TOLERANCE["bfloat16"]
    assert probe_tolerance("float32") < probe_tolerance("float32", fine) == fine[0].probe_tolerance
    assert probe_tolerance("bfloat16", [*fine, *coarse]) == coarse[0].probe_tolerance > fine[0].probe_tolerance


@pytest.mark.parametrize(
    ("arguments", "algorithm", "expected"),
    [
        ({}, {}, "auto"),
        ({"max_num_seqs": 3}, {}, "auto"),
        ({"kv_cache_dtype": "auto"}, {}, "auto"),
        ({"kv_cache_dtype": "fp8"}, {}, "truncate"),
        ({"quantization": "fp8_per_channel"}, {"correction": {"highest": 3.0}}, "truncate"),
        ({"quantization": "fp8_per_channel"}, {"correction": {"type": "none"}}, "none"),
        ({"quantization": "fp8_per_channel"}, {"correction": {"type": "mask"}}, "mask"),
        ({"kv_cache_dtype": "fp8"}, {"policy_loss": {"type": "topr"}}, "auto"),
    ],
)
def test_samples_of_low_precision_are_corrected_unless_the_recipe_says_how(
    arguments: Mapping[str, Any], algorithm: Mapping[str, Any], expected: str
) -> None:
    found = recipe_with(arguments, algorithm=algorithm).as_seen_by("policy", ["policy"]).algorithm.correction
    assert found.type == expected
    assert found.has_weights == (expected in {"truncate", "mask"})
    assert found.highest == algorithm.get("correction", {}).get("highest", 2.0)
    native = recipe_with(arguments, "native", algorithm=algorithm).as_seen_by("policy", ["policy"])
    assert native.algorithm.correction.type == (expected if expected in {"none", "mask"} else "auto")


def test_the_correction_follows_the_engine_of_the_role_that_has_sampled() -> None:
    own = {"solver": {"rollout": {"external": {"arguments": {"kv_cache_dtype": "fp8"}}}}}
    recipe = recipe_with({}, roles=own)
    found = {role: recipe.as_seen_by("policy", [role]).algorithm.correction.type for role in ("solver", "planner")}
    assert found == {"solver": "truncate", "planner": "auto"}
    assert recipe.as_seen_by("policy", ["planner", "solver"]).algorithm.correction.type == "truncate"


@pytest.mark.parametrize(
    ("algorithm", "line"),
    [
        ({}, "corrects samples by truncate at 2 (the default for low precision)"),
        ({"correction": {"type": "truncate", "highest": 4.0}}, "truncate at 4 (algorithm.correction)"),
        ({"correction": {"type": "none"}}, "does not correct samples (algorithm.correction.type: none, ppo)"),
    ],
)
def test_a_plan_shows_low_precision_and_the_correction(algorithm: Mapping[str, Any], line: str) -> None:
    recipe = recipe_with({"kv_cache_dtype": "fp8", "speculative_config": NGRAM}, algorithm=algorithm)
    plan = plan_of(
        "grpo",
        1,
        rollout=recipe.rollout.model_dump(),
        algorithm=algorithm,
    )
    lines = precision_lines(recipe, plan)
    assert ("policy", "vllm has keys and values in FP8 (kv_cache_dtype: fp8)") in lines
    assert ("policy", "vllm drafts 3 tokens at a time (speculative_config)") in lines
    shown = Console(file=io.StringIO(), width=120)
    print_plan(plan, shown, precision=lines)
    assert line in shown.file.getvalue()  # type: ignore[attr-defined]
    assert precision_lines(make_recipe(), plan_of("grpo", 1)) == []


def test_int8_weights_are_within_half_a_step_of_those_that_came() -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 6, 5)[:, None]
    weight[2] = 0
    values, scale = quantized(weight.bfloat16(), weight.bfloat16().abs().amax(1, keepdim=True))
    assert values.dtype == torch.int8
    assert values.abs().amax(1).tolist() == [127, 127, 0, 127, 127]
    assert bool(((values * scale - weight.bfloat16().float()).abs() <= scale / 2 * 1.001).all())


def test_arguments_without_int8_are_left_as_they_are() -> None:
    given = {"quantization": "fp8_per_channel", "block_size": 32}
    assert with_int8(given) == given


def test_settings_of_requests_are_repeated_for_their_drafts() -> None:
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expand(torch.tensor([0.5, 7.0, 0.0]), ends, 5, replace_from=0, replace_to=1)
    assert found.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
    assert expand(torch.tensor([3, 4, 0], dtype=torch.int32), ends, 5).tolist() == [3, 3, 0, 0, 0]


def test_drafts_of_a_response_are_counted() -> None:
    completion = Completion()
    completion.add(Delta(1, 0, [3], [-1.0], None, 0))
    completion.add(Delta(1, 0, [4, 5], [-1.0, -2.0], "length", 0, num_drafted=6, num_accepted=2))
    assert (completion.num_drafted, completion.num_accepted) == (6, 2)
    assert settings_of("model").num_drafts == 0
    assert recipe_with({"speculative_config": NGRAM}).rollout.num_drafts == 3
    assert recipe_with({"speculative_config": NGRAM}, "native").rollout.num_drafts == 0
