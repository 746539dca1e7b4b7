"""Weights of 4 bits under adapters: their numbers, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from tests.distributed.test_experts import experts_model
from tests.tiny import tiny_model
from tests.unit.models.test_models import packed_logits
from tests.unit.recipes import make_recipe, plan_of, write_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from leaderless import EngineSetup, train_backend
from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.lora import nf4
from leaderless.models.lora.linear import adapted_layers, is_adapter, without_adapters, write_adapters
from leaderless.planner.memory.layers import packed_bytes
from leaderless.planner.memory.rank import DeviceMemory
from leaderless.planner.show.fit import Fitted
from leaderless.training.engine import TrainEngine

needs_bitsandbytes = pytest.mark.skipif(
    find_spec("bitsandbytes") is None, reason="bitsandbytes, of the extra nf4, is missing"
)
BELOW = [-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004]
VALUES = [*BELOW, 0.0, 0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0]
"""The values of NF4 (QLoRA, appendix E)."""


def naive(row: list[float], block: int) -> list[float]:
    """The numbers that are left of a row."""
    found = list[float]()
    for begin in range(0, len(row), block):
        own = row[begin : begin + block]
        scale = max(map(abs, own))
        found += [scale * min(VALUES, key=lambda value: abs(value * scale - number)) for number in own]
    return found


@needs_bitsandbytes
@pytest.mark.parametrize("block", [32, 64])
def test_numbers_are_the_nearest_of_their_block(block: int) -> None:
    nf4.check_library("models.policy")
    weight = torch.randn(24, 256, generator=torch.Generator().manual_seed(3))
    weight[5] = 0
    packed = nf4.packed(weight, block)
    assert packed.dtype is torch.uint8
    assert packed.numel() == packed_bytes(weight.numel(), block) == weight.numel() * (4 + 32 / block) / 8
    numbers = nf4.unpacked(packed, block, torch.float32)
    expected = torch.tensor([naive(row, block) for row in weight.tolist()])
    torch.testing.assert_close(numbers, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(nf4.packed(numbers, block), packed), "packing again changes nothing"
    assert torch.equal(nf4.packed(weight[7:11], block), packed[7:11]), "rows are packed by themselves"
    halves = [nf4.unpacked(nf4.packed(half, block), block, torch.float32) for half in weight.split(128, 1)]
    assert torch.equal(torch.cat(halves, 1), numbers), "and so are parts of rows"
    assert torch.equal(nf4.unpacked(packed, block, torch.bfloat16), numbers.bfloat16())
    with patch.object(nf4, "PIECE", 500):
        assert torch.equal(nf4.packed(weight, block), packed)


@needs_bitsandbytes
def test_gradients_go_through_packed_weights() -> None:
    settings = ModelConfig(path=tiny_model(), lora=LoraConfig(base_dtype="nf4", base_block=32))
    model = load_causal_lm(settings, "policy")
    nf4.pack_layers(model)
    (_, layer), *_ = adapted_layers(model)
    torch.nn.init.normal_(layer.lora_B, generator=torch.Generator().manual_seed(0))
    values = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(1)).requires_grad_()
    gain = torch.linspace(-1, 1, 10 * layer.out_features).view(2, 5, -1)
    whole = layer.numbers(torch.float32) + layer.scale * layer.lora_B @ layer.lora_A
    expected = torch.autograd.grad((values @ whole.t() * gain).sum(), (values, layer.lora_A, layer.lora_B))
    found = torch.autograd.grad((layer(values) * gain).sum(), (values, layer.lora_A, layer.lora_B))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    saved = list[torch.Tensor]()
    with torch.autograd.graph.saved_tensors_hooks(lambda one: saved.append(one) or one, lambda one: one):
        layer(values)
    assert not any(one.is_floating_point() and one.shape == whole.shape for one in saved), "no numbers are kept"


@needs_bitsandbytes
def test_a_model_computes_what_transformers_does_with_bitsandbytes(tmp_path: Path) -> None:
    path, lora = tiny_model(head_dim=16), LoraConfig(rank=3)
    model = load_causal_lm(ModelConfig(path=path, lora=lora.model_copy(update={"base_dtype": "nf4"})), "policy")
    for number, (_, layer) in enumerate(adapted_layers(model)):
        torch.nn.init.normal_(layer.lora_B, std=0.3, generator=torch.Generator().manual_seed(number))
    nf4.pack_layers(model)
    weights = {name: one.detach() for name, one in model.model.named_parameters() if is_adapter(name)}
    write_adapters(tmp_path, weights, ModelConfig(path=path, lora=lora))
    way = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=way)
    twin = PeftModel.from_pretrained(base, tmp_path).train()  # else it multiplies in bfloat16 on some CPUs
    tokens = torch.tensor([3, 1, 4, 1, 5, 9, 2, 6])
    with torch.no_grad():
        expected, found = twin(input_ids=tokens[None]).logits[0], packed_logits(model, [tokens])
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
        with without_adapters(model):
            assert (packed_logits(model, [tokens]) - found).abs().max() > 0.01


def test_without_the_package_its_installation_is_named() -> None:
    lora = LoraConfig(base_dtype="nf4", base_block=32)
    with (
        patch.object(nf4, "find_spec", lambda _: None),
        pytest.raises(RecipeError, match=r"policy\.lora\.base_dtype: 'nf4' needs bitsandbytes: .*pip install .*nf4"),
    ):
        load_causal_lm(ModelConfig(path=tiny_model(), lora=lora), "policy")


def test_models_whose_weights_cannot_be_packed_are_refused_when_they_are_loaded(tmp_path: Path) -> None:
    lora = LoraConfig(base_dtype="nf4")
    path = experts_model(tmp_path, "qwen3_moe")
    with pytest.raises(RecipeError, match=r"nf4 is not for models of type qwen3_moe, whose experts are most of its"):
        load_causal_lm(ModelConfig(path=path, lora=lora), "policy")
    reason = r"lora\.base_block: 64 does not divide the 32 inputs of model.layers.0.self_attn.q_proj: set it to 32"
    with patch("leaderless.models.lora.linear.check_library"), pytest.raises(RecipeError, match=reason):
        load_causal_lm(ModelConfig(path=tiny_model(), lora=lora), "policy")


def test_a_block_needs_packed_weights() -> None:
    with pytest.raises(ValueError, match="base_block=32 is for base_dtype nf4: set that, or leave it out"):
        LoraConfig(base_block=32)
    assert LoraConfig(adapter="folder", base_dtype="nf4").packed_block == 64, "a folder does not say this"


def test_weights_of_4_bits_without_adapters_are_refused() -> None:
    with pytest.raises(ValueError, match="base_dtype"):
        make_recipe(models={"policy": {"path": "some/model", "base_dtype": "nf4"}})


@train_backend(trains_adapters=True)
def adapts(setup: EngineSetup) -> TrainEngine:
    """A back end of a user that trains adapters."""
    raise NotImplementedError(setup)


SIZES = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
}


@pytest.mark.parametrize(
    ("config", "sections", "message"),
    [
        ({}, {"rollout": {"engine": "vllm"}}, "nf4: vLLM and SGLang would read .* set rollout.external.merge_adapters"),
        ({}, {"training": {"backend": "tests.unit.models.test_nf4:adapts"}}, "nf4 is not for the back end .* use fsdp"),
        ({"intermediate_size": 200}, {}, "64 does not divide the 200 inputs of .*down_proj: leave out base_dtype"),
        ({"hidden_size": 96}, {}, "64 does not divide the 96 inputs of .*q_proj: set it to 32"),
        (
            {"intermediate_size": 192},
            {"layout": {"policy": {"tp": 2}, "rollout": {"dp": 2}}},
            "64 does not divide the 96 inputs of .*down_proj that each rank along tp=2 has: set it to 32, or leave out",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 4}, {}, "not for the model of 'policy', whose experts are most of"),
    ],
)
def test_plans_that_cannot_have_them_are_refused(
    tmp_path: Path, config: dict[str, object], sections: dict[str, object], message: str
) -> None:
    path = write_model(tmp_path / "model", **SIZES | config)
    models = {"policy": {"path": path, "lora": {"base_dtype": "nf4"}}}
    with pytest.raises(RecipeError, match=message):
        plan_of("grpo", 2 if "layout" in sections else 1, models=models, **sections)


def memory_of(lora: dict[str, object], path: str, num_ranks: int = 1, **sections: object) -> DeviceMemory:
    memory = plan_of("grpo", num_ranks, models={"policy": {"path": path, "lora": lora}}, **sections).memory
    assert memory is not None
    return memory.cpu


@pytest.mark.parametrize("layout", [{"dp": 2}, {"tp": 2}, {"pp": 2}], ids=str)
def test_a_plan_counts_them(tmp_path: Path, layout: dict[str, int]) -> None:
    path = write_model(tmp_path / "model", **SIZES, num_hidden_layers=4)
    linears = 4 * (4 * 128 * 128 + 3 * 128 * 384)
    saved = linears * (4 - 4 / 8 - 4 / 64)
    full, packed = (memory_of(lora, path) for lora in ({}, {"base_dtype": "nf4"}))
    for name in ("policy weights", "policy engine's base"):
        assert full.resident[name] - packed.resident[name] == saved
    assert packed.phases["policy trains"]["unpacked weight"] == 128 * 384 * (4 + 4 / 8 + 4 / 64)
    layouts = {"policy": layout, "rollout": {"dp": 2}}
    ranks = [memory_of(lora, path, 2, layout=layouts) for lora in ({}, {"base_dtype": "nf4"})]
    assert ranks[0].resident["policy weights"] - ranks[1].resident["policy weights"] == saved / 2
    gathered = [one.phases["policy trains"].get("gathered weights", 0) for one in ranks]
    if "pp" not in layout or layout["pp"] == 1:
        assert gathered[1] < gathered[0] or gathered == [0, 0]


def test_they_are_a_remedy_where_memory_is_short(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", **SIZES)

    def problem(lora: dict[str, object], **sections: object) -> str:
        given: dict[str, object] = {"models": {"policy": {"path": path, "lora": lora}}, **sections}
        return Fitted.of(make_recipe(**given), plan_of("grpo", 1, **given), 0.1).fit.problem

    assert "set models.policy.lora.base_dtype=nf4, which saves " in problem({})
    assert "nf4" not in problem({"base_dtype": "nf4"})
    external = {"engine": "vllm", "external": {"python": "python3"}}
    assert "nf4" not in problem({}, rollout=external)
    external = {"engine": "vllm", "external": {"python": "python3", "merge_adapters": True}}
    assert "set models.policy.lora.base_dtype=nf4" in problem({}, rollout=external)
