"""Adapters on the experts of mixtures: what they compute and learn next to `peft` and a loop, folders, and plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tests.distributed.test_experts import FAMILIES, experts_model
from tests.unit.models.test_models import packed_logits
from tests.unit.recipes import plan_of, write_model
from tests.unit.rollout.test_native_engine import engine_of
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3MoeConfig

from leaderless.config import RecipeError
from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.causal_lm import CausalLM, empty_causal_lm, load_causal_lm
from leaderless.models.lora.expert_lora import adapted_experts, to_peft
from leaderless.models.lora.linear import is_adapter, merge_adapters, without_adapters, write_adapters
from leaderless.planner.graph.adapters import PREFIX, SUFFIX, described, name_in_peft
from leaderless.planner.memory.model_size import read_model_size
from leaderless.rollout.engine import Request, SamplingParams, generate

TOKENS = [torch.tensor(one) for one in ([3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5], [8, 9, 7, 9, 3])]
LORA = LoraConfig(rank=4, alpha=7, expert_rank=3)
FAMILY = pytest.mark.parametrize("family", FAMILIES)


def settings_of(path: str, lora: LoraConfig = LORA) -> ModelConfig:
    return ModelConfig(path=path, lora=lora)


def adapted(path: str, lora: LoraConfig = LORA) -> CausalLM:
    """A model whose adapters change it."""
    model = load_causal_lm(settings_of(path, lora), "policy")
    matrices = [one for name, one in model.trained_weights() if name.endswith("lora_B")]
    for number, matrix in enumerate(matrices):
        torch.nn.init.normal_(matrix, std=0.3, generator=torch.Generator().manual_seed(number))
    return model


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: one.detach() for name, one in model.model.named_parameters() if is_adapter(name)}


def logits_of(model: torch.nn.Module) -> Tensor:
    return torch.cat([model(input_ids=one[None]).logits[0] for one in TOKENS])


def base_of(path: str) -> AutoModelForCausalLM:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@FAMILY
def test_a_mixture_computes_and_learns_as_in_peft(tmp_path: Path, family: str) -> None:
    path = experts_model(tmp_path, family)
    model = adapted(path)
    (tmp_path / "ours").mkdir()
    write_adapters(tmp_path / "ours", weights_of(model), settings_of(path))
    twin = PeftModel.from_pretrained(base_of(path), tmp_path / "ours", is_trainable=True)
    logits, expected = packed_logits(model, TOKENS), logits_of(twin)
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    with without_adapters(model), twin.disable_adapter():
        assert (packed_logits(model, TOKENS) - logits).abs().max() > 0.01
        torch.testing.assert_close(packed_logits(model, TOKENS), logits_of(twin), atol=1e-5, rtol=0)
    gain = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    for one in (logits, expected):
        (gain * one).sum().backward()
    known = {name.replace(".default", ""): one.grad for name, one in twin.named_parameters() if one.grad is not None}
    gradients = {name: one.grad for name, one in model.model.named_parameters() if is_adapter(name)}
    assert {f"{PREFIX}{name_in_peft(name)}{SUFFIX}" for name in gradients} == known.keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        wanted = known[f"{PREFIX}{name_in_peft(name)}{SUFFIX}"]
        torch.testing.assert_close(to_peft(name, gradient), wanted, atol=1e-4, rtol=1e-4)


@FAMILY
def test_a_folder_of_peft_is_where_training_begins(tmp_path: Path, family: str) -> None:
    path = experts_model(tmp_path, family)
    torch.manual_seed(0)
    config = PeftConfig(
        r=5,
        lora_alpha=9,
        target_modules=["q_proj", "o_proj"],
        target_parameters=["mlp.experts.down_proj", "experts.gate_up_proj"],
        rank_pattern={r".*\.experts\..*_proj": 2} if family == "mixtral" else {},
        init_lora_weights=False,
        use_rslora=True,
    )
    twin = get_peft_model(base_of(path), config).eval()
    twin.save_pretrained(tmp_path / "theirs")
    model = load_causal_lm(settings_of(path, LoraConfig(adapter=str(tmp_path / "theirs"))), "policy")
    torch.testing.assert_close(packed_logits(model, TOKENS), logits_of(twin), atol=1e-5, rtol=0)


@FAMILY
def test_at_first_a_mixture_is_exactly_its_base(tmp_path: Path, family: str) -> None:
    path = experts_model(tmp_path, family)
    lora = LoraConfig(rank=7, expert_rank="auto")
    base, model, again = (load_causal_lm(ModelConfig(path=path, lora=one), "policy") for one in (None, lora, lora))
    assert torch.equal(packed_logits(model, TOKENS), packed_logits(base, TOKENS))
    (_, first), *_ = adapted_experts(model.model)
    assert first.down_proj_lora_A.shape[1] == 7 // 2  # each token goes through two experts
    assert {name for name, _ in model.trained_weights()} == {*weights_of(model)}
    for name, value in weights_of(again).items():
        assert torch.equal(value, weights_of(model)[name])
        assert value.any() == name.endswith("lora_A")


@FAMILY
def test_merged_experts_compute_the_same(tmp_path: Path, family: str) -> None:
    path = experts_model(tmp_path, family)
    model = adapted(path)
    logits = packed_logits(model, TOKENS)
    merge_adapters(model.model)
    assert not weights_of(model)
    model.model.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits_of(base_of(str(tmp_path / "merged"))), logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_compute_as_a_loop_over_tokens(tmp_path: Path, dtype: torch.dtype) -> None:
    model = adapted(experts_model(tmp_path, "qwen3_moe"))
    (_, experts), *_ = adapted_experts(model.model)
    experts.to(dtype)
    torch.manual_seed(0)
    hidden = torch.randn(5, 32).to(dtype).requires_grad_()
    chosen = torch.tensor([[0, 3], [3, 0], [5, 1], [1, 2], [2, 0]])  # none chooses expert 4
    shares = torch.rand(5, 2).to(dtype)
    wide = {name: one.detach().double().requires_grad_() for name, one in experts.named_parameters()}
    inputs, scale = hidden.detach().double().requires_grad_(), 7 / 3

    def apply(name: str, expert: int, values: Tensor) -> Tensor:
        weight, a, b = (wide[name + kind][expert] for kind in ("", "_lora_A", "_lora_B"))
        return (weight + scale * b @ a) @ values

    rows = []
    for row, (own, share) in enumerate(zip(chosen.tolist(), shares.double(), strict=True)):
        total = torch.zeros(32, dtype=torch.float64)
        for place, expert in enumerate(own):
            gate, up = apply("gate_up_proj", expert, inputs[row]).chunk(2)
            total = total + share[place] * apply("down_proj", expert, torch.nn.functional.silu(gate) * up)
        rows.append(total)
    expected, found = torch.stack(rows), experts(hidden, chosen, shares)
    gain = torch.linspace(-1, 1, 160).view(5, 32)
    (found.float() * gain).sum().backward()
    (expected * gain).sum().backward()
    pairs = [(found, expected), (hidden.grad, inputs.grad)]
    pairs += [(one.grad, wide[name].grad) for name, one in experts.named_parameters() if is_adapter(name)]
    for own, wanted in pairs:
        assert own is not None
        assert wanted is not None
        error = (own.double() - wanted).norm() / wanted.norm()
        assert error < (1e-6 if dtype == torch.float32 else 0.02)
    for name, matrix in experts.named_parameters():
        if is_adapter(name):
            assert matrix.grad is not None
            assert not matrix.grad[4].any()


def test_what_adapters_add_is_not_rounded_with_the_weights(tmp_path: Path) -> None:
    model = load_causal_lm(settings_of(experts_model(tmp_path, "qwen3_moe")), "policy")
    (_, experts), *_ = adapted_experts(model.model.bfloat16())
    weight, (a, b) = experts.weight("down_proj"), experts.matrices("down_proj")
    experts.adapters.scale = 1.0
    for matrix, value in ((weight, 1.0), (a, 0.0), (b, 2.0**-10)):  # next to 1, this is less than the rounding
        matrix.data.fill_(value)
    a.data[:, :, 0] = 1.0
    row, ends = torch.zeros(1, 16).bfloat16(), torch.ones(6, dtype=torch.int32)
    row[0, 0], row[0, 1] = 1, -1  # what the weights make of it is 0
    assert torch.equal(experts._adapted(row, "down_proj", ends), torch.full((1, 32), 3 * 2.0**-10).bfloat16())
    assert torch.equal(experts.merged(weight, (0, 0), (a, b)), weight)


def test_a_native_engine_samples_with_the_adapters_of_experts(tmp_path: Path) -> None:
    path = experts_model(tmp_path, "qwen3_moe")
    trained = adapted(path)
    engine = engine_of(load_causal_lm(settings_of(path), "policy").requires_grad_(False))
    sent = weights_of(trained)
    lost = "model.layers.1.mlp.experts.down_proj_lora_A"
    with pytest.raises(RuntimeError, match=f"1 of the model's weights have not been sent, such as {lost}"):
        engine.load_weights(WeightStream(((name, one) for name, one in sent.items() if name != lost), 1))
    engine.load_weights(WeightStream(iter(sent.items()), 1))
    prompt = TOKENS[0].tolist()
    ((completion,),) = generate(engine, [Request(prompt, [0])], SamplingParams(SamplingConfig(), 8))
    tokens = torch.tensor(completion.tokens)
    with torch.no_grad():
        logits = packed_logits(trained, [torch.cat([TOKENS[0], tokens])])[len(prompt) - 1 : -1]
    scores = logits.log_softmax(1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(completion.log_probs), scores, atol=1e-4, rtol=0)


def test_a_folder_describes_the_adapters_of_experts(tmp_path: Path) -> None:
    path = experts_model(tmp_path, "qwen3_moe")
    model = adapted(path)
    write_adapters(tmp_path, weights_of(model), settings_of(path))
    lora = described(tmp_path, "policy").lora
    assert lora is not None
    assert (lora.rank, lora.expert_rank, lora.scale_of(3)) == (4, 3, 7 / 3)
    again = load_causal_lm(settings_of(path, LoraConfig(adapter=str(tmp_path))), "policy")
    for name, value in weights_of(again).items():
        assert torch.equal(value, weights_of(model)[name])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_parameters": ["experts.down_proj"]}, r"must be both gate_up_proj and down_proj here"),
        ({"target_parameters": ["experts.down_proj", "mlp.gate.weight"]}, "can be only weights of experts here"),
        ({"rank_pattern": {"experts.gate_up_proj": 3}}, "but only experts can have another rank here, all of them the"),
        ({"rank_pattern": {"experts.*": 3, "q_proj": 2}}, "but only experts can have another rank here"),
        ({"rank_pattern": {"experts.*": 2}}, "the adapters are those of another model"),
        ({"target_parameters": [], "rank_pattern": {}}, "which the model lacks: the adapters are those of another mo"),
        ({"lora_dropout": 0.1}, "adapters of experts have no dropout, as in peft"),
    ],
    ids=str,
)
def test_folders_with_other_adapters_of_experts_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    path = experts_model(tmp_path, "qwen3_moe")
    write_adapters(tmp_path, weights_of(adapted(path)), settings_of(path))
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes), encoding="utf-8")
    with pytest.raises(RecipeError, match=message):
        load_causal_lm(settings_of(path, LoraConfig(adapter=str(tmp_path))), "policy")


def test_models_without_experts_of_a_known_form_are_refused(tmp_path: Path) -> None:
    dense = write_model(tmp_path / "dense")
    with pytest.raises(RecipeError, match=r"policy.lora.expert_rank: the model has no experts: leave it out"):
        plan_of("grpo", 1, models={"policy": {"path": dense, "lora": {"expert_rank": 2}}})
    GptOssConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=16, num_local_experts=4).save_pretrained(
        tmp_path
    )
    for folder in (dense, str(tmp_path)):
        with pytest.raises(
            RecipeError, match=r"policy.lora.expert_rank: models of type .* have no experts with a gate"
        ):
            empty_causal_lm(settings_of(folder), "policy")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_engines_that_cannot_be_sent_adapters_of_experts_need_merged_weights(tmp_path: Path, engine: str) -> None:
    model = {"policy": {"path": experts_model(tmp_path, "qwen3_moe"), "lora": {"expert_rank": "auto"}}}
    rollout: dict[str, object] = {"engine": engine, "external": {"python": "python3"}}
    with pytest.raises(RecipeError, match=r"policy.lora.expert_rank: experts have adapters, .*merge_adapters"):
        plan_of("grpo", 1, models=model, rollout=rollout)
    plan_of("grpo", 1, models=model, rollout=rollout | {"external": {"python": "python3", "merge_adapters": True}})


@FAMILY
@pytest.mark.parametrize("layout", [{}, {"ep": 2}, {"tp": 2, "ep": 2}], ids=str)
def test_a_plan_counts_the_adapters_of_experts(tmp_path: Path, family: str, layout: dict[str, int]) -> None:
    path, lora = experts_model(tmp_path, family), {"rank": 5, "expert_rank": "auto"}
    models, layouts = {"policy": {"path": path, "lora": lora}}, {"policy": layout} | {"rollout": {"dp": 2}}
    plan, keeping = (
        plan_of("grpo", 2, models=models, layout=layouts, training={"keep_whole": kept}) for kept in ("nothing", "all")
    )
    made = empty_causal_lm(settings_of(path, LoraConfig(**lora)), "policy")  # type: ignore[arg-type]
    size = plan.sizes["policy"]
    assert size is not None
    assert size.num_adapter_parameters == sum(weight.numel() for _, weight in made.trained_weights())
    of_experts = [weight.numel() for name, weight in made.trained_weights() if ".experts." in name]
    assert size.num_expert_adapter_parameters == sum(of_experts)
    whole = size.num_whole_adapter_parameters if "tp" in layout else 0
    assert plan.memory is not None
    assert plan.memory.cpu.resident["policy optimizer"] == 4 * (size.num_adapter_parameters + whole)
    assert keeping.memory is not None
    elsewhere = sum(of_experts) // 2 if layout else 0
    gradients = 2 * (size.num_adapter_parameters + whole) if whole else 4 * (size.num_adapter_parameters - elsewhere)
    assert keeping.memory.cpu.phases["policy trains"]["gradients"] == gradients


def test_the_guide_counts_the_adapters_of_a_large_mixture(tmp_path: Path) -> None:
    Qwen3MoeConfig(
        vocab_size=151_936,
        hidden_size=2048,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        tie_word_embeddings=False,
    ).save_pretrained(tmp_path)
    size = read_model_size(settings_of(str(tmp_path), LoraConfig(rank=16, expert_rank="auto")))
    assert size is not None
    assert (round(size.num_adapter_parameters / 1e6), round(size.num_parameters / 1e9, 1)) == (92, 30.5)
    guide = Path(__file__).parents[3].joinpath("docs/guides/lora.md").read_text(encoding="utf-8")
    assert "the adapters have 92 million weights, 0.3 %" in " ".join(guide.split())


@pytest.mark.parametrize("rank", [0, True, "many", [2]])
def test_ranks_of_experts_are_checked(rank: object) -> None:
    with pytest.raises(ValueError, match="must be a whole number of at least 1, or auto"):
        LoraConfig(expert_rank=rank)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="adapters of experts have no dropout, as in peft"):
        LoraConfig(expert_rank=1, dropout=0.1)
