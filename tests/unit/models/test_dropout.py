"""Dropout of what adapters take in: which numbers are dropped, and what that changes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import cast

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from tests.engines import ALONE
from tests.tiny import random_samples, tiny_model
from tests.unit.recipes import plan_of, write_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from leaderless.config.models import LoraConfig, ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.models.lora import dropout
from leaderless.models.lora.dropout import Dropout, dropped_product, key_of, mixed
from leaderless.models.lora.linear import adapted_layers, write_adapters
from leaderless.planner.graph.adapters import PREFIX, described, lora_of
from leaderless.training.fsdp import FsdpEngine
from leaderless.training.micro_batches import MicroBatch, make_micro_batches, token_keys

RATE, SEED = 0.25, 7
LENGTHS = [(5, 4), (5, 6), (5, 3), (3, 7), (3, 2), (3, 5), (6, 1), (6, 4), (6, 0)]
"""Prompt and response tokens of nine samples, three of each prompt."""
WORD = (1 << 64) - 1


def splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def is_dropped(key: int, layer: int, feature: int, rate: float) -> bool:
    """Whether a number is dropped, by arithmetic of whole numbers alone."""
    state = splitmix((key ^ layer) & WORD)
    word = splitmix((state + feature // 2 * 0x9E3779B97F4A7C15) & WORD)
    half = (word >> 32 * (feature % 2)) & 0xFFFFFFFF
    return (half ^ 0x80000000) < round(rate * 2**32)


@pytest.mark.parametrize(("features", "rate"), [(range(8), 0.5), (range(3, 10), 0.1), (range(5, 6), 0.999)], ids=str)
def test_numbers_are_dropped_as_by_whole_numbers(features: range, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "MAX_WORDS", 9)
    keys, layer = mixed(torch.arange(-3, 9)), key_of("model.layers.0.mlp.up_proj")
    expected = [[is_dropped(key, layer, one, rate) for one in features] for key in keys.tolist()]
    assert Dropout(keys, rate).dropped(layer, features).tolist() == expected


def test_numbers_are_dropped_at_the_rate_and_independently() -> None:
    num_tokens, num_features, rate = 500, 400, 0.3
    one = Dropout(mixed(torch.arange(num_tokens)), rate)
    layers = [one.dropped(key_of(name), range(num_features)).double() for name in ("q_proj", "k_proj")]
    other = Dropout(mixed(torch.arange(num_tokens) + num_tokens), rate).dropped(key_of("q_proj"), range(num_features))
    first, spread = layers[0], (rate * (1 - rate) / layers[0].numel()) ** 0.5
    assert abs(float(first.mean()) - rate) < 4 * spread
    assert (first.mean(0) - rate).abs().max() < 5 * (rate * (1 - rate) / num_tokens) ** 0.5
    assert (first.mean(1) - rate).abs().max() < 5 * (rate * (1 - rate) / num_features) ** 0.5
    pairs = {
        "layers": (first, layers[1]),
        "tokens": (first, other.double()),
        "neighboring tokens": (first[1:], first[:-1]),
        "neighboring features": (first[:, 1:], first[:, :-1]),
        "second next features": (first[:, 2:], first[:, :-2]),
    }
    for name, (left, right) in pairs.items():
        covariance = float(((left - rate) * (right - rate)).mean())
        assert abs(covariance) < 4 * rate * (1 - rate) / left.numel() ** 0.5, name


def test_the_product_is_that_of_what_is_left_and_its_gradient_by_finite_differences() -> None:
    generator, drops, layer = torch.Generator().manual_seed(0), Dropout(mixed(torch.arange(4)), RATE), key_of("a layer")
    values, matrix = (torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((1, 4, 6), (3, 6)))
    expected = torch.zeros(1, 4, 3, dtype=torch.float64)
    for token, key in enumerate(drops.keys.tolist()):
        for feature in range(6):
            if not is_dropped(key, layer, 6 + feature, RATE):
                expected[0, token] += values[0, token, feature] / (1 - RATE) * matrix[:, feature]
    torch.testing.assert_close(dropped_product(values, matrix, drops, layer, 6), expected)
    inputs = values.requires_grad_(), matrix.requires_grad_()
    assert torch.autograd.gradcheck(lambda x, a: dropped_product(x, a, drops, layer, 6), inputs)


def keys_by_token(micro_batches: list[MicroBatch], update: int = 3) -> dict[tuple[object, int], int]:
    """The key of each token, by what it belongs to and its position; prompts are those of three samples each."""
    found: dict[tuple[object, int], int] = {}
    for one in micro_batches:
        if one.origins is None:
            continue
        keys = token_keys(one, SEED, update).tolist()
        for place, (key, position) in enumerate(zip(keys, one.positions.tolist(), strict=True)):
            owner, _ = one.origin_of(place)
            number = int(owner.rpartition(" ")[2])
            name = ("prompt", number // 3) if owner.startswith("the prompt") else number
            assert found.setdefault((name, position), key) == key, "siblings in other passes share their prompt's keys"
    return found


def test_keys_depend_on_the_token_alone() -> None:
    samples = random_samples(LENGTHS, siblings=3)
    expected = keys_by_token(make_micro_batches(samples, 4096, ALONE))
    assert len({*expected.values()}) == len(expected), "no two tokens have the same"
    backwards = samples.select(torch.arange(len(samples)).flip(0))
    apart = random_samples(LENGTHS, siblings=3, is_shared=False)
    for batch, max_tokens in ((samples, 8), (samples, 20), (backwards, 4096), (apart, 12), (apart, 4096)):
        assert keys_by_token(make_micro_batches(batch, max_tokens, ALONE)) == expected
    some = keys_by_token(make_micro_batches(samples.select(torch.tensor([7, 1])), 4096, ALONE))
    assert some.items() < expected.items()
    (alike,) = make_micro_batches(random_samples([(3, 4)] * 2, siblings=2), 4096, ALONE)
    keys = token_keys(replace(alike, tokens=torch.ones_like(alike.tokens)), SEED, 3)
    assert len({*keys.tolist()}) == 3 + 3, "but tokens of samples with the same text, which may be computed once"
    later = keys_by_token(make_micro_batches(samples, 4096, ALONE), update=4)
    assert later.keys() == expected.keys()
    assert not {*later.values()} & {*expected.values()}


@cache
def settings(rate: float = RATE) -> ModelConfig:
    return ModelConfig(path=tiny_model("qwen3"), lora=LoraConfig(rank=3, alpha=7.0, dropout=rate))


def engine_of(config: ModelConfig, seed: int = SEED, max_tokens: int = 4096) -> FsdpEngine:
    """An engine whose adapters change the model."""
    model = load_causal_lm(config, "policy")
    for number, (_, layer) in enumerate(adapted_layers(model)):
        nn.init.normal_(layer.lora_B, std=0.3, generator=torch.Generator().manual_seed(number))
    engine = FsdpEngine(model, config, ALONE, torch.device("cpu"), max_tokens, optimizer=OptimizerConfig())
    engine.seed = seed
    return engine


def gradients(engine: FsdpEngine, samples: Batch) -> dict[str, Tensor]:
    for micro_batch in engine.micro_batches(samples):
        outputs = engine.forward(micro_batch)
        weighted = (micro_batch.targets % 7 - 3.0)[: len(outputs.log_probs)] * outputs.log_probs
        weighted.sum().backward()
    found = {name: cast("Tensor", one.grad).clone() for name, one in engine.named_weights()}
    engine.discard_gradient()
    return found


class Masked(nn.Module):
    """Dropout with numbers that were chosen elsewhere, in the place of that of `peft`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.keys = name, torch.zeros(0, dtype=torch.int64)

    def forward(self, values: Tensor) -> Tensor:
        kept = [
            [not is_dropped(key, key_of(self.name), one, RATE) for one in range(values.shape[-1])]
            for key in self.keys.tolist()
        ]
        return values * torch.tensor(kept) / (1 - RATE)


def peft_of(engine: FsdpEngine, folder: Path) -> PeftModel:
    """The same model by `peft`, with dropout by `Masked`."""
    weights = {name: one.detach() for name, one in engine.named_weights()}
    write_adapters(folder, weights, settings())
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    twin = PeftModel.from_pretrained(base, folder, is_trainable=True)
    for name, module in twin.base_model.model.named_modules():
        if hasattr(module, "lora_dropout"):
            assert module.lora_dropout["default"].p == RATE
            module.lora_dropout["default"] = Masked(name)
    return twin


def test_a_pass_with_a_gradient_computes_and_learns_as_in_peft(tmp_path: Path) -> None:
    samples, engine = random_samples([(4, 3), (2, 4)]), engine_of(settings())
    twin = peft_of(engine, tmp_path)
    (micro_batch,) = engine.micro_batches(samples)
    outputs, keys = engine.forward(micro_batch), token_keys(micro_batch, SEED, 0)
    expected, begin = [], 0
    for family in micro_batch.families:
        tokens = micro_batch.tokens[begin : begin + family.num_tokens]
        for module in twin.modules():
            if isinstance(module, Masked):
                module.keys = keys[begin : begin + family.num_tokens]
        logits = twin(input_ids=tokens[None]).logits[0]
        chosen = (micro_batch.select >= begin) & (micro_batch.select < begin + family.num_tokens)
        scores = logits[micro_batch.select[chosen] - begin].log_softmax(1)
        expected.append(scores.gather(1, micro_batch.targets[chosen][:, None])[:, 0])
        begin += family.num_tokens
    torch.testing.assert_close(outputs.log_probs, torch.cat(expected), atol=1e-5, rtol=0)
    gain = torch.linspace(-1, 1, len(outputs.log_probs))
    (gain * outputs.log_probs).sum().backward()
    (gain * torch.cat(expected)).sum().backward()
    known = {name.replace(".default", ""): one.grad for name, one in twin.named_parameters() if one.grad is not None}
    found = {f"{PREFIX}{name}.weight": one.grad for name, one in engine.named_weights()}
    assert known.keys() == found.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, known[name], atol=1e-5, rtol=1e-4)
    assert (
        outputs.log_probs.detach() - engine.log_probs(samples).values[micro_batch.response_index]
    ).abs().max() > 0.01


def test_only_updates_drop_anything_and_each_something_else() -> None:
    samples = random_samples(LENGTHS, siblings=3)
    plain, engine = engine_of(settings(0.0)), engine_of(settings())
    expected = plain.log_probs(samples).values
    assert torch.equal(engine.log_probs(samples).values, expected)
    first = gradients(engine, samples)
    assert all(layer.current.dropout is None for _, layer in adapted_layers(engine.model))
    assert torch.equal(engine.log_probs(samples).values, expected), "also behind an update"
    with torch.no_grad():
        for micro_batch in engine.micro_batches(samples):
            assert torch.equal(engine.forward(micro_batch).log_probs, expected[micro_batch.response_index])
    assert all(torch.equal(one, first[name]) for name, one in gradients(engine, samples).items())
    others = [gradients(one, samples) for one in (plain, engine_of(settings(), seed=8))]
    engine.policy_version = 1
    for other in (*others, gradients(engine, samples)):
        assert all(not torch.allclose(one, first[name], rtol=1e-2) for name, one in other.items())


@pytest.mark.parametrize(
    ("changes", "max_tokens", "is_shared"),
    [({"gradient_checkpointing": True}, 16, True), ({}, 4096, False), ({}, 9, False)],
    ids=str,
)
def test_gradients_do_not_depend_on_micro_batches_nor_on_recomputing(
    changes: dict[str, object], max_tokens: int, is_shared: bool
) -> None:
    expected = gradients(engine_of(settings()), random_samples(LENGTHS, siblings=3))
    samples = random_samples(LENGTHS, siblings=3, is_shared=is_shared)
    samples = samples.select(torch.arange(len(samples)).flip(0))
    engine = engine_of(settings().model_copy(update=changes), max_tokens=max_tokens)
    for name, one in gradients(engine, samples).items():
        assert (one - expected[name]).abs().max() < 1e-5 * expected[name].abs().max(), name


def test_a_layer_without_the_attention_of_its_pass_is_an_error() -> None:
    model = load_causal_lm(settings(), "policy")
    layer = cast("CausalLM", model).text_model.layers[0]
    with pytest.raises(RuntimeError, match="a layer of type Qwen3DecoderLayer was called without the attention"):
        layer(torch.zeros(1, 3, 16))


def test_dropout_is_read_from_a_folder_and_written_back(tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_model("qwen3"), dtype=torch.float32)
    config = PeftConfig(r=2, target_modules="all-linear", lora_dropout=0.15)
    get_peft_model(base, config).save_pretrained(tmp_path)
    begun = ModelConfig(path=tiny_model("qwen3"), lora=LoraConfig(adapter=str(tmp_path)))
    engine = engine_of(begun)
    assert engine.dropout == 0.15
    other = begun.model_copy(update={"lora": LoraConfig(adapter=str(tmp_path), dropout=0.0)})
    lora = lora_of(other, "models.policy")
    assert lora is not None
    assert (lora.dropout, lora.rank) == (0.0, 2)
    (tmp_path / "again").mkdir()
    engine.write_description(tmp_path / "again")
    assert json.loads((tmp_path / "again/adapter_config.json").read_text())["lora_dropout"] == 0.15
    again = described(tmp_path / "again", "models.policy").lora
    assert again is not None
    assert again.dropout == 0.15


@pytest.mark.parametrize("rate", [-0.1, 1.0])
def test_a_rate_is_a_probability_below_one(rate: float) -> None:
    with pytest.raises(ValueError, match=r"dropout\n.*(greater than or equal to 0|less than 1)"):
        LoraConfig(dropout=rate)


def test_a_plan_counts_what_dropping_takes(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    widths = {"q_proj": config["hidden_size"], "down_proj": config["intermediate_size"]}
    for tp, target in ((1, "q_proj"), (2, "q_proj"), (1, "down_proj"), (2, "down_proj")):
        found = []
        for rate in (0.0, 0.1):
            lora = {"targets": [target], "dropout": rate}
            plan = plan_of(
                "grpo",
                tp,
                models={"policy": {"path": path, "lora": lora}},
                layout={"policy": {"tp": tp}, "rollout": {"dp": tp}},
            )
            assert plan.memory is not None
            found.append(plan.memory.cpu.phases["policy trains"].get("dropout of adapters", 0))
        width = widths[target] // (tp if target == "down_proj" else 1)
        assert found[0] == 0
        assert (found[1] - 24 * dropout.MAX_WORDS) % (5 * width) == 0 < found[1] - 24 * dropout.MAX_WORDS
