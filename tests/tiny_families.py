"""Tiny models of every family of language models of `transformers`, and what this package makes of them.

    python -m tests.tiny_families

writes the table of families, from which a page of the documentation is made.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple, cast

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from tests.tiny import add_gradients, random_samples
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, __version__
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig, OptimizerConfig
from leaderless.data.batch import Batch
from leaderless.distributed.activity import Activity
from leaderless.distributed.in_flight import Backlog
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.saved_buffers import saved_buffers
from leaderless.models.loading.sharded_loading import open_model
from leaderless.planner.memory.attention_kinds import (
    CHUNK_LAYER,
    FULL_LAYER,
    INDEXED_LAYER,
    RECURRENT_LAYERS,
    WINDOW_LAYER,
)
from leaderless.training.fsdp import FsdpEngine

FILE = Path(__file__).parents[1] / "docs/reference/families.json"
"""What becomes of each family, with the newest `transformers` that was tried."""
TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Largest error of a log-probability, and of a gradient in units of the largest one."""
NARROW = 6
"""Tokens of windows and chunks, of which all sequences have more."""
NOISE = 0.1
"""Rate of dropout, size of the noise on routers, and rate at which layers are skipped."""

_SIZES: Mapping[int | float, str] = {
    64: "vocab_size n_vocab pronunciation_vocab_size shape_vocab_size "
    "intermediate_size ffn_dim n_inner d_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size d_ff dim_ff "
    "expert_ffn_hidden_size intermediate_size_mlp dff encoder_hash_byte_group_vocab",
    32: "hidden_size n_embd d_model dim emb_dim embedding_size embedding_dim hidden_dim dim_model width "
    "decoder_hidden_size moe_intermediate_size shared_expert_intermediate_size expert_hidden_size "
    "shared_intermediate_size pronunciation_embed_dim shape_embed_dim",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth num_blocks num_key_value_heads num_kv_heads n_kv_heads kv_n_heads eos_token_id "
    "num_experts_per_tok num_experts_per_token moe_top_k top_k moe_topk moe_k top_k_experts indexer_compress_ratio",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts rotary_dim index_topk indexer_budget",
    16: "index_n_heads index_head_dim indexer_n_heads indexer_head_dim",
    8: "head_dim attention_head_size v_head_dim qk_nope_head_dim kv_lora_rank global_head_dim dim_head "
    "qk_rope_head_dim q_lora_rank mamba_n_heads mamba_d_head",
    1: "n_group num_group topk_group n_shared_experts num_shared_experts first_k_dense_replace bos_token_id "
    "indexer_kv_heads",
    128: "max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions "
    "max_source_positions max_sequence_length",
    0: "pad_token_id",
    3: "image_token_id audio_token_id video_token_id image_token_index",
    0.7: "embedding_multiplier residual_multiplier attention_multiplier logit_scale logits_scaling",
    1.5: "final_logit_softcapping",
}
_WINDOWS = ["sliding_window", "window_size", "attention_window_size", "attention_chunk_size"]
_SETTINGS = {name: value for value, names in _SIZES.items() for name in names.split()} | dict.fromkeys(_WINDOWS, NARROW)
"""Values of settings, by name; those of a kind that a family does not have are left out."""
_TIMES_FOUR = (8, 32, 64)
_WIDE_SETTINGS = _SETTINGS | {
    name: 4 * size
    for size in _TIMES_FOUR
    for name in _SIZES[size].split()
    if "vocab" not in name and not name.startswith("mamba_n")
}
_WIDE_SETTINGS |= {"index_head_dim": 128, "indexer_head_dim": 128}
_WIDE_SETTINGS |= {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "rotary_dim": 16}
_WIDE_SETTINGS |= dict.fromkeys(_SIZES[128].split(), 512)
"""The same, with heads as wide as kernels require."""
_MAY_BE_NONE = ("token_id", "n_routed_experts", "n_shared_experts", "num_experts_per_tok")
_MAY_BE_NONE += ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
_ALWAYS: Mapping[str, object] = {
    "is_decoder": True,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
}
"""Settings of every family that has them: causal, and without parts that are none in two layers."""
_OWN: Mapping[str, Mapping[str, object]] = {
    "bailing_hybrid": {"n_group": 1, "num_group": 1, "topk_group": 1},
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in ("full_attention", "sliding_attention")
        },
        "logit_scale": 0.7,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0, "attn_pdrop": NOISE}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "diffllama": {"attention_dropout": 0.0},
    "dots3_note_text": {
        "shared_experts_intermediate_size": 64,
        "swa_num_attention_heads": 2,
        "swa_num_key_value_heads": 2,
        "swa_head_dim": 16,
        **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "v_head_dim")},
    },
    "gemma3_text": {"final_logit_softcapping": 1.5},
    "gemma4_text": {
        "final_logit_softcapping": 1.5,
        "num_hidden_layers": 6,
        "layer_types": [WINDOW_LAYER, FULL_LAYER] * 3,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 128,
    },
    "gemma4_unified_text": {"global_head_dim": 16, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "gemma3n_text": {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "hy_v4": {"indexer_types": ["full", "shared"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 2},
    "longcat_flash": {"zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 8},
    "mpt": {"attn_config": {}},
    "nemotron": {"num_key_value_heads": 2},
    "xmod": {"default_language": "en_XX"},
    "youtu": {"pad_token_id": None},
    "zamba": {"layer_types": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs besides, or does not take."""
_PUBLISHED: Mapping[str, object] = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_OF_WIDE: Mapping[str, Mapping[str, object]] = {
    **dict.fromkeys(("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "axk1", "kimi_linear"), _PUBLISHED),
    "dots1": {**_PUBLISHED, "head_dim": 32},
    "gemma4_text": {"global_head_dim": 64},
    "gemma4_unified_text": {"global_head_dim": 64},
    "glm4_moe": {"head_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 256},
    "lfm2": {"conv_dim": 128, "block_dim": 128},
    "lfm2_moe": {"conv_dim": 128, "block_dim": 128},
    "hunyuan_v1_dense": {"head_dim": 32},
    "hunyuan_v1_moe": {"head_dim": 32},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid"},
    "llama4_text": {"attention_chunk_size": 128, "num_experts_per_tok": 1},
    "ministral": {"head_dim": 32},
    "nemotron_h": {"time_step_min": 1e-6},
}
"""The same where heads are wider, with what published settings have besides.

Single tokens of Nemotron-H have steps without the lower bound that texts have in `transformers`: here it is tiny.
"""
_OF_PARTS: Mapping[str, Mapping[str, object]] = {
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_text": _OWN["dots3_note_text"],
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 32, "adapter_out_dim": 32},
    "llama4_text": _OWN["llama4_text"],
    "mllama_text_model": {"cross_attention_layers": [1]},
}
"""The same for parts of families, by their types."""
_NEUTRAL: Mapping[str, object] = {
    "layer_types": ["full_attention"] * 2,
}
"""Settings that are accepted, for what families are refused with their usual ones."""


_NO_LAYER_INPUTS = {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
_USUAL: Mapping[str, Mapping[str, object]] = {"gemma4_assistant": {"text_config": _NO_LAYER_INPUTS}}
"""Settings without which a family's own are refused by `transformers`."""


class Verdict(NamedTuple):
    """What becomes of a family.

    Attributes:
        is_right: Whether it is computed right; else it is refused.
        reason: Reason why it is refused.
    """

    is_right: bool
    reason: str = ""


class Alone:
    """A group of one rank."""

    rank, size, ranks, handle, activity, backlog = 0, 1, (0,), None, Activity(), Backlog()

    def max(self, values: Tensor, what: str) -> Tensor:  # noqa: ARG002
        """The maximum over one rank."""
        return values


def tiny_config(family: str, **settings: object) -> PretrainedConfig:
    """Settings of a model of two layers, with dropout and noise wherever a family has them."""
    return _shrunk(CONFIG_MAPPING[family], {**_OWN.get(family, {}), **settings}, _SETTINGS)


def wide_config(family: str, **settings: object) -> PretrainedConfig:
    """The same with heads of 32 numbers, where `tiny_config` has 8."""
    own = {**_OWN.get(family, {}), **_OF_WIDE.get(family, {}), **settings}
    return _shrunk(CONFIG_MAPPING[family], own, _WIDE_SETTINGS)


def _usual(kind: type[PretrainedConfig]) -> PretrainedConfig:
    return kind(**_USUAL.get(kind.model_type, {}))


def _shrunk(
    kind: type[PretrainedConfig], settings: Mapping[str, object], sizes: Mapping[str, object]
) -> PretrainedConfig:
    usual = _usual(kind)
    chosen: dict[str, object] = {}
    for name, value in usual.to_dict().items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if name in sizes and (is_number or (value is None and name.endswith(_MAY_BE_NONE))):
            chosen[name] = sizes[name]
        elif is_number and any(kind_of_noise in name for kind_of_noise in ("drop", "jitter_noise")):
            chosen[name] = NOISE
        elif name in _ALWAYS:
            chosen[name] = _ALWAYS[name]
    kinds = [*dict.fromkeys(usual.to_dict().get("layer_types") or ())]
    known = {FULL_LAYER, WINDOW_LAYER, CHUNK_LAYER, INDEXED_LAYER, *RECURRENT_LAYERS}
    if len(kinds) > 1 and {*kinds} <= known:  # both kinds, of which the first two layers may have but one
        chosen["layer_types"] = kinds[:2]
    if "kv_lora_rank" in chosen and "num_key_value_heads" in chosen:  # all heads share what is compressed
        chosen["num_key_value_heads"] = sizes["num_attention_heads"]
    if "qk_rope_head_dim" in chosen and "head_dim" in chosen:  # it has positions alone
        chosen["head_dim"] = chosen["qk_rope_head_dim"]
    for name in kind.sub_configs or ():
        part = getattr(usual, name, None)
        if isinstance(part, PretrainedConfig) and name not in settings:
            chosen[name] = _shrunk(type(part), _OF_PARTS.get(part.model_type, {}), sizes)
    return kind(**{**chosen, **settings})


def judge_family(family: str, folder: Path) -> tuple[Verdict, Verdict | None]:
    """Judge a family with its usual settings and, if it is refused with these, with accepted ones.

    Raises:
        AssertionError: A model is accepted, and computed wrongly.
    """
    try:
        usual = judge(tiny_config(family), folder / "usual")
    except (StrictDataclassError, ValueError):  # some are valid with all of their own numbers only
        usual = judge(_usual(CONFIG_MAPPING[family]), folder / "usual", is_tiny=False)
    names = _usual(CONFIG_MAPPING[family]).to_dict()
    chosen = {name: value for name, value in _NEUTRAL.items() if name in names}
    neutral = None
    if not usual.is_right and chosen:
        with suppress(StrictDataclassError, ValueError):  # some have to have other layers
            neutral = judge(tiny_config(family, **chosen), folder / "neutral")
    return usual, neutral


def judge(config: PretrainedConfig, folder: Path, *, is_tiny: bool = True) -> Verdict:
    """Make a model, and compare what this package computes with what the model computes itself.

    One that is not tiny has its settings read only.

    Raises:
        AssertionError: The model is accepted, and computed wrongly.
    """
    settings = ModelConfig(path=str(folder))
    try:
        if not is_tiny:
            raise ValueError(config.model_type)
        write_family(config, folder)
    except Exception as error:  # noqa: BLE001
        # Of every kind; its settings alone may be a reason to refuse it.
        config.save_pretrained(folder)
        with pytest.raises(RecipeError) as caught:
            load_causal_lm(settings, "policy")
        if "cannot be loaded" in str(caught.value):
            return Verdict(is_right=False, reason=f"`transformers` cannot make it: {type(error).__name__}")
        return Verdict(is_right=False, reason=_shorter(str(caught.value)))
    try:
        model = load_causal_lm(settings, "policy")
        _check_parts(settings, model)
        group = cast("ProcessGroup", Alone())
        engine = FsdpEngine(
            model, settings, group, torch.device("cpu"), 256, optimizer=OptimizerConfig(), num_updates=1
        )
        _compare(engine, AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval())
    except RecipeError as error:
        return Verdict(is_right=False, reason=_shorter(str(error)))
    return Verdict(is_right=True)


def _check_parts(settings: ModelConfig, whole: torch.nn.Module) -> None:
    """A model that is read in parts is accepted, and has the same weights and buffers."""
    opened = open_model(settings, "policy")
    opened.decoder.complete(lambda _, weight: weight, torch.device("cpu"))
    states = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in (opened.decoder, whole)]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


def write_family(config: PretrainedConfig, folder: Path) -> None:
    """Write a model whose vectors and buffers are not all zeros or ones, with which mistakes could hide."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape)
            elif parameter.ndim == 2 and parameter.std() < 0.05:
                parameter.data.normal_(0, 0.15)
        for name, buffer in saved_buffers(model).items():
            if buffer.is_floating_point() and not name.endswith(("slope_rate", "_decay")):  # which follow from others
                buffer.add_(0.1 * torch.randn(buffer.shape))
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # that of all its parts, from which only the text part was made


def _compare(engine: FsdpEngine, reference: PreTrainedModel) -> None:
    batch = random_samples([(5, 4), (5, 6), (4, 3), (6, 7)], siblings=2)
    found, again = engine.log_probs(batch).values, engine.log_probs(batch).values
    expected = torch.cat(list(log_probs_of(reference, batch)))
    assert torch.equal(found, again), "two passes differ"
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    add_gradients(engine, batch, lambda outputs, _: -outputs.log_probs.sum())
    (-expected.sum()).backward()
    gradients = {name: parameter.grad for name, parameter in engine.model.model.named_parameters()}
    largest = max(float(p.grad.abs().max()) for p in reference.parameters() if p.grad is not None)
    for name, parameter in reference.named_parameters():
        wanted = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradient = gradients[name]
        taken = torch.zeros_like(parameter) if gradient is None else gradient
        torch.testing.assert_close(
            taken, wanted, atol=GRADIENT_TOLERANCE * largest, rtol=0, msg=lambda text, n=name: n + text
        )


def log_probs_of(model: PreTrainedModel, batch: Batch) -> Iterator[Tensor]:
    """Log-probabilities of sampled tokens by a model's own forward pass, sample by sample."""
    columns = (batch.jagged(name).to_lists() for name in ("prompt_tokens", "tokens"))
    for prompt, response in zip(*columns, strict=True):
        logits = model(input_ids=torch.tensor([prompt + response]), use_cache=False).logits[0].float()
        log_probs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        yield log_probs.gather(1, torch.tensor(response)[:, None]).squeeze(1)


_SAID = {
    "has no attribute 'to'": "a bias of attention scores",
    "last_hidden_state": "no hidden states apart from logits",
    "attention runs": "attention that cannot be replaced, or another number of calls than layers",
    "attention is fixed": "attention that cannot be replaced",
    "give other logits": "packed sequences would give other logits: positions or a direction of its own",
}


def _shorter(message: str) -> str:
    """Shorten the message of a refusal to the reason."""
    for words, reason in _SAID.items():
        if words in message:
            return reason
    reason = message.removeprefix("models.policy: ").split(" are not supported: ")[-1]
    return reason.removeprefix("a forward pass fails: ").split(" are not supported")[0].split(" is not supported")[0]


def write_table() -> None:
    """Judge every family, and write down what becomes of it."""
    families: dict[str, dict[str, str]] = {}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        with TemporaryDirectory() as folder:
            usual, neutral = judge_family(family, Path(folder))
        families[family] = {} if usual.is_right else {"refused": usual.reason}
        if neutral and neutral.is_right:
            families[family]["otherwise"] = "right"
    table = {"transformers": __version__, "families": families}
    FILE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_table()
