"""Weights next to each other in the engine's memory: one product for several layers, and the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from tests.tiny import mixture_model, tiny_model
from tests.unit.rollout.test_native_engine import FAMILIES, assert_same, model_of, sample, tiny_engine
from torch import Tensor, fx, nn

from leaderless.config.models import LoraConfig, ModelConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.rollout.native import lean_forward
from leaderless.rollout.native.engine import NativeEngine
from leaderless.rollout.native.lean_forward import LeanForward
from leaderless.rollout.native.paged_attention import attend_with_torch
from leaderless.rollout.native.paged_engine import PagedEngine, PagedOptions

CPU = torch.device("cpu")


def engine_of(model: CausalLM, *, keeps: bool = True) -> PagedEngine:
    tokenizer = load_tokenizer(ModelConfig(path=tiny_model()), "policy")
    options = PagedOptions(attend_with_torch, 4096, 32, keeps_memory=keeps, page_tokens=8)
    return PagedEngine(model, tokenizer, frozenset({0}), 64, CPU, options)


def weights_of(model: CausalLM) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in model.trained_weights()}


def load(engine: NativeEngine, weights: dict[str, Tensor], version: int = 1) -> None:
    engine.load_weights(WeightStream(iter(weights.items()), version))


def forward_of(engine: PagedEngine) -> LeanForward:
    assert isinstance(engine._pass, LeanForward)
    return engine._pass


def model_called(name: str) -> CausalLM:
    """A Qwen2 has biases, a Qwen3 norms of queries and keys, and one with experts no joined feed-forward part."""
    if name in FAMILIES:
        return model_of(name)
    path = mixture_model(tiny_model("qwen3")) if name == "experts" else tiny_model(name)  # type: ignore[arg-type]
    return load_causal_lm(ModelConfig(path=path), "policy").eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "experts", "qwen3_moe"])
@torch.no_grad()
def test_joined_layers_give_what_separate_ones_give(name: str, dtype: torch.dtype) -> None:
    model = model_called(name).to(dtype)
    tokens, positions = torch.arange(1, 15), torch.cat([torch.arange(5), torch.arange(9)])
    attention, select = PackedAttention([5, 9], CPU), torch.tensor([4, 13])
    expected = LeanForward(model, enable_compile=False)(tokens, positions, attention, select)
    engine = engine_of(model)
    load(engine, weights_of(model))
    layers = forward_of(engine).joined.layers()
    assert all(layer.queries is not None for layer in layers)
    assert all((layer.gates is None) == hasattr(layer.module.mlp, "experts") for layer in layers)
    found = forward_of(engine)(tokens, positions, attention, select)
    limit = 1e-6 if dtype == torch.float32 else 0.01
    assert float((found - expected).abs().max()) <= limit * float(expected.abs().max())


def test_one_product_takes_the_place_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    num_products, product = 0, lean_forward.linear_for_few

    def counted(values: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        nonlocal num_products
        num_products += 1
        return product(values, weight, bias)

    monkeypatch.setattr(lean_forward, "linear_for_few", counted)
    engine, expected = engine_of(load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval()), sample(tiny_engine())
    num_layers = len(forward_of(engine).joined.layers())
    num_products = 0
    assert_same(sample(engine), expected)
    assert num_products % (7 * num_layers) == 0, "weights are where they were until new ones come"
    num_passes = num_products // 7
    load(engine, weights_of(engine.model))
    num_products = 0
    assert_same(sample(engine), expected)
    assert num_products == 4 * num_passes


def test_weights_are_where_products_read_them_until_they_are_released() -> None:
    model = load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval()
    engine, weights = engine_of(model), weights_of(model)
    load(engine, weights)
    (first, *_) = forward_of(engine).joined.layers()
    assert first.queries is not None
    assert first.gates is not None
    attention = first.module.self_attn
    parts = [attention.q_proj, attention.k_proj, attention.v_proj]
    assert torch.equal(first.queries.weight, torch.cat([part.weight for part in parts]))
    assert torch.equal(first.queries.bias, torch.cat([part.bias for part in parts]))
    assert torch.equal(
        first.gates.weight, torch.cat([first.module.mlp.gate_proj.weight, first.module.mlp.up_proj.weight])
    )
    for joined, linears in ((first.queries, parts), (first.gates, [first.module.mlp.gate_proj])):
        assert {one.weight.untyped_storage().data_ptr() for one in linears} == {
            joined.weight.untyped_storage().data_ptr()
        }
    place = first.queries.weight.data_ptr()
    load(engine, {name: 2 * weight for name, weight in weights.items()}, 2)
    assert first.queries.weight.data_ptr() == place
    assert torch.equal(first.queries.bias, torch.cat([part.bias for part in parts]))
    load(engine, {name: weight.bfloat16() for name, weight in weights.items()}, 3)
    again = forward_of(engine).joined.layers()[0].queries
    assert again is not None
    assert torch.equal(again.weight, torch.cat([part.weight for part in parts]))
    assert again.weight.dtype == torch.bfloat16
    engine.close()
    assert all(layer.queries is layer.gates is None for layer in forward_of(engine).joined.layers())


def test_weights_that_stay_the_trainers_own_and_those_under_adapters_are_not_joined() -> None:
    model = load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval()
    engine, weights = engine_of(model, keeps=False), weights_of(model)
    load(engine, weights)
    assert all(layer.queries is layer.gates is None for layer in forward_of(engine).joined.layers())
    config = ModelConfig(path=tiny_model(), lora=LoraConfig(rank=2, targets=["q_proj", "up_proj"]))
    adapted = load_causal_lm(config, "policy").eval()
    engine, plain = engine_of(adapted), tiny_engine()
    trained = {name: torch.full_like(weight, 0.03) for name, weight in weights_of(adapted).items()}
    load(engine, trained)
    assert all(layer.queries is layer.gates is None for layer in forward_of(engine).joined.layers())
    separate = NativeEngine(load_causal_lm(config, "policy").eval(), plain.tokenizer, plain.end_tokens, 64, CPU)
    load(separate, trained)
    assert_same(sample(engine), sample(separate))


def test_kernels_of_joined_layers_are_for_the_sizes_of_their_weights() -> None:
    """With sizes that it does not know, `torch.compile` would make slower ones."""
    model, shapes = model_called("qwen2"), set[str]()
    engine = engine_of(model)
    load(engine, weights_of(model))

    def backend(graph: fx.GraphModule, _: Sequence[object]) -> Callable[..., object]:
        examples = [node.meta["example_value"] for node in graph.graph.nodes if node.op == "placeholder"]
        shapes.update(str(list(one.shape)) for one in examples if isinstance(one, nn.Parameter))
        return graph.forward

    layer = forward_of(engine).joined.layers()[0]
    joined = [one for one in (layer.queries, layer.gates) if one is not None]
    multiply = torch.compile(lambda values: [one.multiply(values) for one in joined], backend=backend, dynamic=True)
    with torch.no_grad():
        multiply(torch.ones(3, joined[0].weight.shape[1]))
    weights = [weight for one in joined for weight in (one.weight, one.bias) if weight is not None]
    assert {str(list(one.shape)) for one in weights} == shapes
    torch._dynamo.reset()
