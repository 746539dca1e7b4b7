"""The native engine draws what the trainer scores, whatever the form of attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.tiny import tiny_model
from tests.tiny_families import tiny_config
from tests.unit.models.test_attention_forms import KINDS
from tests.unit.rollout.test_conversations import turns
from tests.unit.rollout.test_native_engine import PROMPTS, engine_of, requests, sample
from torch import Tensor
from transformers import AutoModelForCausalLM

from leaderless.config.models import ModelConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.models.attention.packed import ATTENTION_NAME, PackedAttention
from leaderless.models.causal_lm import CausalLM, load_causal_lm
from leaderless.rollout.engine import Completion, Delta, Request, SamplingParams, generate
from leaderless.rollout.native import engine as native
from leaderless.rollout.native import kv_cache, later_parts
from leaderless.rollout.native.lean_forward import forward_of

CPU = torch.device("cpu")
FAMILIES = ["gpt_oss", "gemma3_text", "olmo3", "mimo_v2_flash", "mistral"]
"""Sinks, and layers with and without windows."""
TUNED = ["llama4_text"]
"""Temperatures by positions."""
RECURRENT = ["qwen3_next", "qwen3_5_text", "kimi_linear", "lfm2", "bamba", "falcon_h1", "nemotron_h", "olmo_hybrid"]
RECURRENT += ["mamba", "falcon_mamba", "jamba", "minimax"]
"""Linear attention, state spaces and short convolutions."""


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
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_tokens_are_drawn_by_the_log_probabilities_of_the_trainer(
    name: str, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_split:  # prompts are read in parts, and segments move
        monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
        monkeypatch.setattr(later_parts, "QUERY_BLOCK", 7)
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


def model_of(family: str) -> CausalLM:
    config = tiny_config(family, vocab_size=83, max_position_embeddings=256)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
        for parameter in model.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
    return CausalLM(model)


@torch.no_grad()
def check_greedy(model: CausalLM, completions: list[Completion]) -> None:
    """Each token is the likeliest one by the modules of `transformers`."""
    reference = model.model
    reference.set_attn_implementation("eager")
    asked = [request.prompt for request in requests() for _ in request.sample_ids]
    for prompt, completion in zip(asked, completions, strict=True):
        logits = reference(torch.tensor([prompt + completion.tokens]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(completion.tokens)[:, None])[:, 0]
        torch.testing.assert_close(chosen, logits.amax(1), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", [*FAMILIES, *RECURRENT, *TUNED])
def test_tokens_of_each_family_are_those_of_transformers(family: str) -> None:
    model = model_of(family)
    check_greedy(model, sample(engine_of(model, max_sequences=4), temperature=0))
    window = model.model.config.get_text_config().to_dict().get("sliding_window")
    assert family not in FAMILIES or len(PROMPTS[3]) > 8 * window, "windows are exceeded"


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "nemotron_h", "jamba", "minimax", "gpt_oss", "olmo3"])
def test_texts_continue_where_prompts_are_read_in_parts_and_weights_change(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "PREFILL_TOKENS", 16)
    monkeypatch.setattr(kv_cache, "SMALLEST_SLOT", 2)
    model = model_of(family)
    engine = engine_of(model, max_sequences=4)
    step = engine.step

    def step_with_stale_keys() -> list[Delta]:
        """Step as after new weights: nothing of before is of use."""
        engine._unread_waiting()
        for slots in (one for store in (engine._prompts, engine._responses) for one in store._sizes.values()):
            for keys, values in slots._layers.values():
                keys.fill_(3.0), values.fill_(3.0)
        engine._is_stale = bool(engine._active)
        return step()

    monkeypatch.setattr(engine, "step", step_with_stale_keys)
    check_greedy(model, sample(engine, temperature=0))


@pytest.mark.parametrize("num_siblings", [1, 2])
def test_a_conversation_is_kept_after_a_response_of_one_token(num_siblings: int) -> None:
    engine, start = engine_of(model_of("qwen3_next"), max_sequences=8), [5, 9, 11, 2]
    params = SamplingParams(SamplingConfig(temperature=0.0), max_tokens=1)
    asked = [Request(start, [number], conversation=number) for number in range(num_siblings)]
    first = generate(engine, asked, params)[0][0]
    again = [*start, *first.tokens, 7, 8]
    (found, known), *_ = turns(engine, [Request(again, [20], conversation=0)])
    (expected, _), *_ = turns(engine_of(model_of("qwen3_next")), [Request(again, [20])])
    assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    assert known == len(start)


def test_states_take_memory_for_themselves_alone() -> None:
    """Neither the inputs of a prompt's convolution nor the states of other responses stay with them."""
    engine = engine_of(model_of("qwen3_next"), max_sequences=8)
    asked = [Request([*range(1, 40 + number)], [number], conversation=number) for number in range(4)]
    turns(engine, asked)  # decoded together
    for number in range(len(asked)):
        kept = engine._kept._kept[number].segment.states
        for states in kept.values():
            for tensor in (*states.convolutions.values(), *states.recurrences.values()):
                assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("num_siblings", [1, 3])
def test_a_turn_continues_the_states_of_its_conversation(num_siblings: int) -> None:
    """What is known is not read again; but states cannot go back behind a token that has changed."""
    engine, start = engine_of(model_of("qwen3_next"), max_sequences=8), [5, 9, 11, 2]
    others = [Request(start, [*range(1, num_siblings)])] if num_siblings > 1 else []
    (first, _), *_ = turns(engine, [Request(start, [0], conversation=0), *others])
    again = [*start, *first.tokens, 7, 8]
    changed = [*again]
    changed[6] = 50
    for prompt, num_known in ((again, len(start) + len(first.tokens) - 1), (changed, 0)):
        (found, known), *_ = turns(engine, [Request(prompt, [20], conversation=0)])
        (expected, _), *_ = turns(engine_of(model_of("qwen3_next")), [Request(prompt, [20])])
        assert found.tokens == expected.tokens
        assert found.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
        assert known == num_known
