"""The native engine draws what the trainer scores, whatever the form of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.tiny import tiny_model
from tests.tiny_families import tiny_config
from tests.unit.models.test_attention_forms import KINDS
from tests.unit.rollout.test_native_engine import PROMPTS, engine_of, requests, sample
from torch import Tensor
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.models.attention.packed import ATTENTION_NAME, PackedAttention
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.rollout.engine import Completion
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import kv_cache, segment_attention
from leaderless.rollout.native.lean_forward import forward_of

CPU = torch.device("cpu")
FAMILIES = {"gpt_oss": {}, "gemma3_text": {}, "olmo3": {}, "mimo_v2_flash": {}, "phimoe": {}}
"""Sinks, and layers with and without windows."""


def scored(model: CausalLM, prompt: list[int], response: list[int]) -> Tensor:
    """Log-probabilities of a response in a pass of the trainer."""
    tokens = torch.tensor(prompt + response)
    attention = PackedAttention([len(tokens)], CPU)
    logits = model(tokens, torch.arange(len(tokens)), attention, torch.arange(len(prompt) - 1, len(tokens) - 1))
    return logits.log_softmax(-1).gather(1, tokens[len(prompt) :, None])[:, 0]


@torch.no_grad()
def check(model: CausalLM, completions: list[Completion]) -> None:
    asked = [request.prompt for request in requests() for _ in request.sample_ids]
    for prompt, completion in zip(asked, completions, strict=True):
        expected = scored(model, prompt, completion.tokens)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_drawn_by_the_log_probabilities_of_the_trainer(
    name: str, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_split:  # prompts are read in parts, and segments move
        monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
        monkeypatch.setattr(segment_attention, "QUERY_BLOCK", 7)
        monkeypatch.setattr(kv_cache, "SMALLEST_SLOT", 2)
    model = load_causal_lm(ModelConfig(path=tiny_model()), "policy").eval()
    plain = sample(engine_of(model, max_sequences=4), temperature=1.0)
    model.attention_kinds = tuple(replace(KINDS[name]) for _ in model.attention_kinds)
    engine = engine_of(model, max_sequences=4)
    assert (forward_of(model, enable_compile=False) is model) == (name != "full")
    completions = sample(engine, temperature=1.0)
    check(model, completions)
    if name in {"a window within prompts", "chunks", "bounded scores"}:
        assert [one.tokens for one in completions] != [one.tokens for one in plain]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_families_with_windows_and_sinks_are_those_of_transformers(family: str) -> None:
    config = tiny_config(family, vocab_size=83, max_position_embeddings=256, **FAMILIES[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        reference = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
        for parameter in reference.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    model = CausalLM(reference)
    completions = sample(engine_of(model, max_sequences=4), temperature=0)
    reference.set_attn_implementation("eager")
    asked = [request.prompt for request in requests() for _ in request.sample_ids]
    for prompt, completion in zip(asked, completions, strict=True):
        logits = reference(torch.tensor([prompt + completion.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(1), atol=1e-4, rtol=0)
    assert len(PROMPTS[3]) > 8 * (config.get_text_config().sliding_window or 0), "windows are exceeded"
