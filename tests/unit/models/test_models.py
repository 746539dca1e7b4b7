"""Which models are accepted, and what they do in a pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
import transformers
from tests.tiny import add_gradients, random_samples, tiny_model
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PretrainedConfig, initialization
from transformers.modeling_outputs import CausalLMOutputWithPast

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.distributed.activity import Activity
from leaderless.distributed.in_flight import Backlog
from leaderless.distributed.transport import ProcessGroup
from leaderless.embodied.policies.protocol import DecisionScores
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.causal_lm import CausalLM, TokenOutputs, empty_causal_lm, load_causal_lm
from leaderless.models.decoder import ALIGNMENT_BYTES
from leaderless.models.gradient_checkpointing import recompute_layers
from leaderless.models.loading.sharded_loading import open_model
from leaderless.models.loading.support import check_supported
from leaderless.models.value_model import load_value_model
from leaderless.training import sharded
from leaderless.training.fsdp import FsdpEngine

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
ALL = torch.arange(5)
SMALL = {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}


def saved(folder: Path, config: PretrainedConfig) -> ModelConfig:
    """An untrained model on disk."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return ModelConfig(path=str(folder))


def packed_logits(model: CausalLM, sequences: list[Tensor]) -> Tensor:
    """Logits of all tokens of sequences that share a pass."""
    lengths = [len(sequence) for sequence in sequences]
    positions = torch.cat([torch.arange(length) for length in lengths])
    everywhere = torch.arange(sum(lengths))
    logits = model(torch.cat(sequences), positions, PackedAttention(lengths, torch.device("cpu")), everywhere)
    assert isinstance(logits, Tensor)
    return logits


TAKEN = {
    "llama": transformers.LlamaConfig(**SIZES),
    "qwen3 with heads of its own size": transformers.Qwen3Config(head_dim=16, **SIZES),
    "mixture of experts": transformers.Qwen3MoeConfig(
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8, **SIZES
    ),
    "yarn": transformers.Qwen2Config(
        rope_parameters={
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 1e4,
            "original_max_position_embeddings": 64,
        },
        **SIZES,
    ),
    "gpt2": transformers.GPT2Config(**SMALL),
    "windows in all layers": transformers.MistralConfig(sliding_window=20, **SIZES),
    "windows in some layers": transformers.Qwen2Config(
        use_sliding_window=True, sliding_window=8, max_window_layers=1, **SIZES
    ),
    "windows that are not passed on to the attention": transformers.PhimoeConfig(sliding_window=20, **SIZES),
    "sinks": transformers.GptOssConfig(
        sliding_window=8, num_local_experts=4, num_experts_per_tok=2, head_dim=8, **SIZES
    ),
    "divided logits": transformers.GraniteConfig(logits_scaling=0.3, **SIZES),
    "multiplied logits": transformers.CohereConfig(logit_scale=3.0, **SIZES),
    "capped logits": transformers.NanoChatConfig(final_logit_softcapping=0.2, **SIZES),
    "values that are narrower than queries": transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=8,
        v_head_dim=8,
    ),
}


@torch.no_grad()
@pytest.mark.parametrize("name", TAKEN)
def test_packed_sequences_get_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    config = saved(tmp_path, TAKEN[name])
    sequences = [torch.arange(length) * 5 % 64 for length in (40, 7)]
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    expected = torch.cat([reference(input_ids=sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(packed_logits(load_causal_lm(config, "policy"), sequences), expected, atol=1e-5, rtol=0)


REFUSED = {
    "alibi": transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4),
    "attention that cannot be replaced": transformers.FalconConfig(**SIZES),
    "a mask of its own": transformers.DogeConfig(**SIZES),
    "attention of its own": transformers.OpenAIGPTConfig(**SMALL),
    "state that runs through the pass": transformers.RwkvConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=256
    ),
    "a cap that the family does not apply": transformers.LlamaConfig(final_logit_softcapping=15.0, **SIZES),
    "a factor that the family does not apply": transformers.LlamaConfig(logit_scale=0.5, **SIZES),
    "rotary embeddings that depend on the pass": transformers.Qwen2Config(
        rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, **SIZES
    ),
}


@pytest.mark.parametrize("load", [load_causal_lm, open_model])
@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_would_be_computed_wrongly_is_refused(
    tmp_path: Path, name: str, load: Callable[[ModelConfig, str], object]
) -> None:
    config = saved(tmp_path, REFUSED[name])
    with pytest.raises(RecipeError, match="not supported") as caught:
        load(config, "policy")
    assert caught.value.problems[0].key == "models.policy"


def test_a_cap_that_has_no_meaning_is_refused_by_its_name(tmp_path: Path) -> None:
    config = saved(tmp_path, transformers.NanoChatConfig(final_logit_softcapping=0.0, **SIZES))
    message = r"^models.policy: final_logit_softcapping=0.0 is not supported, only numbers above 0 \(type nanochat\)"
    with pytest.raises(RecipeError, match=message):
        load_causal_lm(config, "policy")


@pytest.mark.parametrize("load", [load_causal_lm, empty_causal_lm, load_value_model])
def test_a_model_of_images_of_another_family_is_refused(
    tmp_path: Path, load: Callable[[ModelConfig, str], object]
) -> None:
    transformers.LlavaNextConfig().save_pretrained(tmp_path)
    with pytest.raises(RecipeError, match=r"^models.policy: models of type llava_next read images and text, which is"):
        load(ModelConfig(path=str(tmp_path)), "policy")


def test_an_empty_model_draws_no_numbers_for_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    config, drawn = ModelConfig(path=tiny_model()), []
    for name in ("normal_", "uniform_", "trunc_normal_", "zeros_", "ones_"):
        monkeypatch.setitem(initialization.TORCH_INIT_FUNCTIONS, name, lambda *_, name=name, **__: drawn.append(name))
    empty = empty_causal_lm(config, "policy").model
    assert drawn == []
    monkeypatch.undo()
    computed = dict(empty.named_buffers())
    for name, buffer in load_causal_lm(config, "policy").model.named_buffers():
        torch.testing.assert_close(computed.pop(name), buffer, rtol=0, atol=0)
    assert not computed


@pytest.mark.parametrize("change", [lambda logits: 2 * logits, lambda logits: 50 * (logits / 50).tanh()])
def test_a_model_that_does_more_to_its_logits_than_is_known_is_refused(change: Callable[[Tensor], Tensor]) -> None:
    """A cap is noticed too, though it hardly changes the logits of a model with random weights."""
    model = load_causal_lm(ModelConfig(path=tiny_model()), "policy").model
    check_supported(model, "models.policy")

    def changed(module: object, arguments: object, output: CausalLMOutputWithPast) -> None:
        assert output.logits is not None
        output.logits = change(output.logits)

    model.register_forward_hook(changed)
    with pytest.raises(RecipeError, match="packed sequences give other logits than each alone"):
        check_supported(model, "models.policy")


def test_the_trial_leaves_the_head_as_it_was(tmp_path: Path) -> None:
    model = load_causal_lm(saved(tmp_path, TAKEN["capped logits"]), "policy").model
    head = model.get_output_embeddings()
    assert not head._forward_pre_hooks
    assert torch.equal(head.weight, AutoModelForCausalLM.from_pretrained(tmp_path).get_output_embeddings().weight)


def test_values_have_no_form_of_logits(tmp_path: Path) -> None:
    values, kinds = [], {"layer_types": ["full_attention"] * 2, "attn_logit_softcapping": None, "head_dim": 8}
    for softcap in (None, 0.01):
        family = transformers.Gemma2Config(final_logit_softcapping=softcap, **kinds, **SIZES)
        model = load_value_model(saved(tmp_path / str(softcap), family), "critic")
        torch.nn.init.ones_(model.model.score.weight)
        with torch.no_grad():
            values.append(model(ALL + 1, ALL, PackedAttention([5], torch.device("cpu")), ALL))
    assert values[0].abs().min() > 0.01
    assert torch.equal(*values)


def engine_of(config: ModelConfig) -> FsdpEngine:
    """A trained instance on one rank."""
    model, group = load_causal_lm(config, "policy"), cast("ProcessGroup", Alone())
    return FsdpEngine(model, config, group, torch.device("cpu"), 256, optimizer=OptimizerConfig(), num_updates=1)


def test_memory_is_returned_where_a_gradient_was_discarded_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(sharded, "trim_host_memory", lambda: calls.append(None))
    engine = engine_of(ModelConfig(path=tiny_model()))
    for parameter in engine.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.discard_gradient()
    engine.discard_gradient()
    assert len(calls) == 1
    assert all(parameter.grad is None for parameter in engine.model.parameters())


class Alone:
    """A group of one rank."""

    rank, size, ranks, handle, activity, backlog = 0, 1, (0,), None, Activity(), Backlog()

    def max(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
        """The maximum over one rank."""
        return values


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_activations_are_recomputed_from_the_first_pass_on(*, gradient_checkpointing: bool) -> None:
    engine = engine_of(ModelConfig(path=tiny_model(), gradient_checkpointing=gradient_checkpointing))
    batch, calls = random_samples([(3, 5)]), list[int]()
    for number, layer in enumerate(engine.model.model.base_model.layers):
        layer.mlp.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    add_gradients(engine, batch, lambda outputs, _: -outputs.log_probs.sum())
    assert calls == ([0, 1, 1, 0] if gradient_checkpointing else [0, 1])
    calls.clear()
    engine.log_probs(batch)
    assert calls == [0, 1]


NOISY = {
    "dropout of modules": transformers.GPT2Config(resid_pdrop=0.5, embd_pdrop=0.5, **SMALL),
    "dropout of functions": transformers.Starcoder2Config(residual_dropout=0.5, embedding_dropout=0.5, **SIZES),
    "layers that are skipped": transformers.OPTConfig(
        layerdrop=0.5,
        ffn_dim=64,
        word_embed_proj_dim=32,
        **{k: v for k, v in SIZES.items() if k != "intermediate_size"},
    ),
    "noise on a router": transformers.MixtralConfig(router_jitter_noise=0.5, num_local_experts=4, **SIZES),
    "experts that are drawn": transformers.PhimoeConfig(input_jitter_noise=0.5, num_local_experts=4, **SIZES),
}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
@pytest.mark.parametrize("name", NOISY)
def test_training_adds_no_noise(tmp_path: Path, name: str, *, gradient_checkpointing: bool) -> None:
    path = saved(tmp_path, NOISY[name]).path
    plain = engine_of(ModelConfig(path=path))
    engine = engine_of(ModelConfig(path=path, gradient_checkpointing=gradient_checkpointing))
    batch = random_samples([(3, 5), (4, 6)])
    for trained in (plain, engine):
        trained.model.train(trained is engine)
        add_gradients(trained, batch, lambda outputs, _: -outputs.log_probs.sum())
    assert torch.equal(engine.log_probs(batch).values, plain.log_probs(batch).values)
    pairs = zip(engine.model.parameters(), plain.model.parameters(), strict=True)
    gradients = [(one.grad, other.grad) for one, other in pairs if one.grad is not None and other.grad is not None]
    assert gradients
    assert all(torch.equal(one, other) for one, other in gradients)


def test_a_family_that_recomputes_no_activations_says_so(tmp_path: Path) -> None:
    config = saved(tmp_path, transformers.GPT2Config(**SMALL))
    model = load_causal_lm(config, "policy").model
    for layer in model.base_model.h:
        layer.__class__ = type(layer.__class__.__name__, (torch.nn.Module,), {})
    with pytest.raises(RecipeError, match="models of type gpt2 cannot recompute activations: set it to false"):
        recompute_layers(model, "models.policy")


def test_weights_lie_at_the_same_alignment_in_every_process(tmp_path: Path) -> None:
    # Read one by one, weights would lie wherever the heap has room, and sums could end in other digits after a restart.
    for name in ("llama", "gpt2"):
        model = load_causal_lm(saved(tmp_path / name, TAKEN[name]), "policy")
        assert not [key for key, weight in model.named_parameters() if weight.data_ptr() % ALIGNMENT_BYTES]


@pytest.mark.parametrize("kind", [TokenOutputs, DecisionScores])
def test_fsdp_finds_the_tensors_that_a_model_returns(kind: type[TokenOutputs] | type[DecisionScores]) -> None:
    """Torch 2.11 sees nothing in data classes: a model that is one unit would get no gradient."""
    log_probs, entropies = torch.zeros(3), torch.ones(3)
    found = tree_leaves(kind(log_probs, entropies))
    assert found[0] is log_probs
    assert found[1] is entropies
