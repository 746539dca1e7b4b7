"""Adapters of models that see images: on the layers for text, unless layers that see are named."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import get_args

import pytest
import torch
import transformers
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tests.engines import ALONE
from tests.pictures import Family, prompt_with, vision_model
from tests.tiny import tiny_recipe
from tests.unit.models.test_vision import model_of
from tests.unit.planner.test_plan_sizes import EXPERTS, SHARED, SMALL
from tests.unit.recipes import plan_of
from tests.unit.rollout.test_make_engine import PYTHON, setup_of
from torch import Tensor
from transformers import AutoModelForImageTextToText

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.models.causal_lm import empty_causal_lm
from leaderless.models.lora.linear import adapted_layers, is_adapter, write_adapters
from leaderless.models.vision.vision_models import VisionLM
from leaderless.planner.graph.adapters import PREFIX, lora_of
from leaderless.planner.memory.layers import TEXT_PART
from leaderless.planner.memory.model_size import read_model_size
from leaderless.rollout import make_engine
from leaderless.training.fsdp import FsdpEngine
from leaderless.worker.checkpoint.reader import ROLE_FILE, STATE_FILE, RoleState, RunState, fingerprint, load_checkpoint

FAMILIES = get_args(Family)
TOWER: Mapping[Family, list[str]] = {
    "qwen2_vl": ["q_proj", "attn.qkv", "mlp.2"],
    "qwen2_5_vl": ["down_proj", "visual.blocks.1.attn.proj"],
    "qwen3_vl": ["v_proj", "linear_fc1"],
    "qwen3_vl_moe": ["o_proj", "qkv"],
    "llava": ["k_proj", "multi_modal_projector.linear_1"],
    "paligemma": ["up_proj", "linear", "fc2"],
}
"""Layers for text, and others that see; some names are those of both."""


def adapted(family: Family, **lora: object) -> VisionLM:
    """A model whose adapters change it."""
    model = model_of(family, lora=LoraConfig(**lora))  # type: ignore[arg-type]
    for number, (_, layer) in enumerate(adapted_layers(model)):
        torch.nn.init.normal_(layer.lora_B, std=0.3, generator=torch.Generator().manual_seed(number))
    return model


def weights_of(model: VisionLM) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in model.trained_weights()}


def logits_of(model: torch.nn.Module, reader: VisionLM, family: Family) -> Tensor:
    """Logits of a prompt with two images by a model of `transformers`."""
    prompt, images = prompt_with([(32, 32), (16, 24)], family)
    tokens, pixels = torch.tensor([prompt]), reader.reader.pixels(images)
    inputs: dict[str, Tensor] = {"pixel_values": pixels.values}
    if family == "paligemma":
        inputs["token_type_ids"] = torch.zeros_like(tokens)
    if reader.has_grid:
        inputs |= {"image_grid_thw": pixels.grids, "mm_token_type_ids": (tokens == reader.reader.token).int()}
    with torch.no_grad():
        found: Tensor = model(input_ids=tokens, **inputs).logits[0]
    return found


def own_logits(model: VisionLM, family: Family) -> Tensor:
    model.model.set_attn_implementation("eager")
    return logits_of(model.model, model, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_only_layers_for_text_have_adapters_unless_others_are_named(family: Family) -> None:
    names = [name for name, _ in adapted_layers(model_of(family, lora=LoraConfig(rank=2)).model)]
    layers = 4 if family == "qwen3_vl_moe" else 7
    assert len(names) == 2 * layers, "two decoder layers"
    assert all(name.startswith(TEXT_PART) for name in names)
    named = [name for name, _ in adapted_layers(model_of(family, lora=LoraConfig(targets=TOWER[family])).model)]
    assert {name.startswith(TEXT_PART) for name in named} == {True, False}


@pytest.mark.parametrize(
    ("family", "is_frozen"),
    [
        *((family, False) for family in FAMILIES),
        ("qwen3_vl", True),
        ("llava", True),
        *(pytest.param(one, True, marks=pytest.mark.thorough) for one in FAMILIES if one not in {"qwen3_vl", "llava"}),
    ],
)
def test_a_plan_counts_the_adapters_that_models_that_see_images_have(family: Family, is_frozen: bool) -> None:
    for targets in ("all-linear", TOWER[family]):
        lora = LoraConfig(rank=3, targets=targets)  # type: ignore[arg-type]
        config = ModelConfig(path=vision_model(family), lora=lora, freeze_vision=is_frozen)
        if is_frozen and targets != "all-linear" and family != "llava":
            with pytest.raises(RecipeError, match=r"lora.targets: '.*' is a layer that freeze_vision leaves as it is"):
                empty_causal_lm(config, "policy")
            continue
        model, size = empty_causal_lm(config, "policy"), read_model_size(config)
        assert size is not None
        assert size.num_adapter_parameters == sum(weight.numel() for _, weight in model.trained_weights()), targets
        assert not any(model.is_frozen(name) for name, _ in model.trained_weights()), "none is made for nothing"


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma", {"head_dim": 16}),
        ("granite", {}),
        ("llama", {}),
        ("mixtral", {"num_local_experts": 4}),
        ("phi3", {}),
        ("qwen2_moe", {**EXPERTS, **SHARED, "mlp_only_layers": [0]}),
        ("qwen3_moe", {**EXPERTS, "decoder_sparse_step": 2}),
    ],
)
def test_a_plan_counts_the_adapters_of_every_family(tmp_path: Path, family: str, changes: Mapping[str, object]) -> None:
    transformers.AutoConfig.for_model(family, **(SMALL | changes)).save_pretrained(tmp_path)
    for targets in ("all-linear", ["o_proj"], ["layers.1.self_attn.o_proj"]):
        config = ModelConfig(path=str(tmp_path), lora=LoraConfig(rank=3, targets=targets))  # type: ignore[arg-type]
        model, size = empty_causal_lm(config, "policy"), read_model_size(config)
        assert size is not None
        assert size.num_adapter_parameters == sum(weight.numel() for _, weight in model.trained_weights()), targets


@pytest.mark.parametrize(("family", "num_bytes"), [("qwen3_vl", 38_912), ("qwen3_vl_moe", 14_336)])
def test_the_optimizer_of_adapters_is_as_large_as_planned(family: Family, num_bytes: int) -> None:
    model = {"path": vision_model(family), "lora": {"rank": 4}}
    memory = plan_of("grpo", 1, models={"policy": model}).memory
    assert memory is not None
    made = model_of(family, lora=LoraConfig(rank=4))
    assert memory.cpu.resident["policy optimizer"] == 8 * sum(one.numel() for one in weights_of(made).values())
    assert memory.cpu.resident["policy optimizer"] == num_bytes


@pytest.mark.parametrize(
    ("family", "is_named"),
    [
        ("qwen3_vl", True),
        ("qwen2_5_vl", False),
        ("llava", True),
        pytest.param("qwen3_vl", False, marks=pytest.mark.thorough),
        pytest.param("qwen2_5_vl", True, marks=pytest.mark.thorough),
        pytest.param("llava", False, marks=pytest.mark.thorough),
    ],
)
def test_folders_go_to_peft_and_back(tmp_path: Path, family: Family, is_named: bool) -> None:
    lora: dict[str, object] = {"rank": 4, "targets": TOWER[family]} if is_named else {"rank": 4}
    model, path = adapted(family, **lora), vision_model(family)
    write_adapters(tmp_path, weights_of(model), ModelConfig(path=path, lora=LoraConfig(**lora)))  # type: ignore[arg-type]
    base = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    twin = PeftModel.from_pretrained(base, tmp_path)
    names = {name.replace(".default.", ".") for name, _ in twin.named_parameters() if "lora_" in name}
    assert names == {f"{PREFIX}{name}.weight" for name in weights_of(model)}
    expected = own_logits(model, family)
    torch.testing.assert_close(logits_of(twin, model, family), expected, atol=1e-5, rtol=0)
    with twin.disable_adapter():
        assert float((logits_of(twin, model, family) - expected).abs().max()) > 1e-2
    again = model_of(family, lora=LoraConfig(adapter=str(tmp_path)))
    assert weights_of(again).keys() == weights_of(model).keys()
    torch.testing.assert_close(own_logits(again, family), expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    "chosen",
    [
        {"target_modules": "all-linear"},
        {"target_modules": "all-linear", "exclude_modules": r".*visual.*"},
        {"target_modules": r".*language_model.*\.(q_proj|down_proj)"},
    ],
    ids=str,
)
def test_patterns_of_peft_mean_the_layers_that_its_folder_has(tmp_path: Path, chosen: dict[str, str]) -> None:
    path = vision_model("qwen2_5_vl")
    base = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    torch.manual_seed(0)
    twin = get_peft_model(base, PeftConfig(r=3, init_lora_weights=False, **chosen)).eval()  # type: ignore[arg-type]
    twin.save_pretrained(tmp_path)
    model = model_of("qwen2_5_vl", lora=LoraConfig(adapter=str(tmp_path)))
    torch.testing.assert_close(own_logits(model, "qwen2_5_vl"), logits_of(twin, model, "qwen2_5_vl"), atol=1e-5, rtol=0)
    size = read_model_size(ModelConfig(path=path, lora=LoraConfig(adapter=str(tmp_path))))
    assert size is not None
    assert size.num_adapter_parameters == sum(one.numel() for one in weights_of(model).values())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"\x08")
    if set(chosen) != {"target_modules"} or chosen["target_modules"] != "all-linear":
        with pytest.raises(RecipeError, match=r"adapter_model\.safetensors cannot be read"):
            lora_of(ModelConfig(path=path, lora=LoraConfig(adapter=str(tmp_path))), "models.policy")


def test_what_sees_has_no_dropout() -> None:
    lora = LoraConfig(targets=["q_proj", "visual.blocks.0.attn.qkv"], dropout=0.1)
    with pytest.raises(RecipeError, match=r"lora.dropout: model.visual.blocks.0.attn.qkv is in no decoder layer for"):
        model_of("qwen3_vl", lora=lora)
    with pytest.raises(RecipeError, match=r"policy.lora.dropout: model.visual.* is in no decoder layer"):
        plan_of("grpo", 1, models={"policy": {"path": vision_model("qwen3_vl"), "lora": lora.model_dump()}})
    without = lora.model_copy(update={"dropout": 0.0}).model_dump()
    assert plan_of("grpo", 1, models={"policy": {"path": vision_model("qwen3_vl"), "lora": without}}).memory
    assert model_of("qwen3_vl", lora=LoraConfig(dropout=0.1))


def test_a_checkpoint_with_adapters_on_what_sees_says_how_to_continue(tmp_path: Path) -> None:
    old = ModelConfig(path=vision_model(), lora=LoraConfig(rank=2, targets=["q_proj", "qkv"]))
    new = old.model_copy(update={"lora": LoraConfig(rank=2)})
    engines = [
        FsdpEngine(model_of("qwen3_vl", lora=one.lora), one, ALONE, torch.device("cpu"), 64) for one in (old, new)
    ]
    folder = tmp_path / "policy"
    folder.mkdir()
    engines[0].write_description(folder)
    described = json.loads((folder / "adapter_config.json").read_text())
    described["target_modules"] = ["q_proj", "qkv"]  # as it was written before
    (folder / "adapter_config.json").write_text(json.dumps(described))
    (tmp_path / STATE_FILE).write_text(json.dumps(asdict(RunState(1, 0, 0.0))))
    (folder / ROLE_FILE).write_text(json.dumps(asdict(RoleState(1, fingerprint(engines[0])))))
    with pytest.raises(RecipeError, match=r"policy.lora.targets: means other layers .* set \[q_proj, qkv\], or give"):
        load_checkpoint(tmp_path, {"policy": engines[1]})


def test_external_engines_are_not_sent_adapters_of_what_sees(tmp_path: Path) -> None:
    for lora in ({"rank": 2}, {"rank": 2, "targets": ["q_proj", "qkv"]}):
        for merges in (False, True):
            changes = {
                **PYTHON,
                "models.policy": {"path": vision_model(), "lora": lora},
                "rollout.external.merge_adapters": merges,
            }
            recipe = tiny_recipe(tmp_path, vision_model(), changes).recipe
            setup = setup_of(tmp_path, recipe)
            if "targets" in lora and not merges:
                with pytest.raises(RecipeError, match=r"lora.targets: names model.visual.blocks.0.attn.qkv, but vLLM"):
                    make_engine._adapters(setup)
                continue
            names = make_engine._adapters(setup)[1].get("policy", ())
            assert all(is_adapter(name) and name.startswith(TEXT_PART) for name in names)
            assert bool(names) != merges
