"""Sizes of families whose layers are not alike, next to models that are really built, and the resulting memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.tiny_families import tiny_config
from tests.unit.recipes import plan_of
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from leaderless.config.models import ModelConfig
from leaderless.models.attention.form import AttentionForm, LayerPass, passing
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.packed import ATTENTION_NAME
from leaderless.models.attention.recurrence import LayerStates, Mixer, RecurrentLayer, is_mixer
from leaderless.models.attention.shared_prompts import Family, blocks_of
from leaderless.models.causal_lm import CausalLM
from leaderless.planner import Plan
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.memory.layer_parts import DELTA_CHUNK
from leaderless.planner.memory.model_size import UNLIKE, read_model_size

INDEXED = {"deepseek_v32", "glm_moe_dsa"}
"""Families that are planned, and not computed."""
NOT_BY_DEFAULT = {"lfm2_moe", "ministral"}
"""Families of which `transformers` makes no model without settings."""
RECURRENT = ["bamba", "falcon_h1", "kimi_linear", "lfm2", "nemotron_h", "qwen3_5_text", "qwen3_next"]


def written(config: PretrainedConfig, folder: Path) -> str:
    config.save_pretrained(folder)
    return str(folder)


def size_of(path: str, **settings: object) -> ModelSize:
    size = read_model_size(ModelConfig.model_validate({"path": path, **settings}))
    assert size is not None
    return size


def empty(config: PretrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def check_counts(size: ModelSize, model: PreTrainedModel) -> None:
    counts = {name: parameter.numel() for name, parameter in model.named_parameters()}
    assert size.num_parameters == sum(counts.values())
    assert size.num_expert_parameters == sum(count for name, count in counts.items() if ".experts." in name)
    layers = [0] * size.num_layers
    for name, count in counts.items():
        if ".layers." in name and "_tower." not in name:
            layers[int(name.partition(".layers.")[2].partition(".")[0])] += count
    assert [layer.num_parameters for layer in size.layers] == layers
    assert size.num_layer_parameters == sum(layers)


@pytest.mark.parametrize("family", sorted(UNLIKE))
def test_weights_are_counted_as_the_model_has_them(tmp_path: Path, family: str) -> None:
    tiny = tiny_config(family)
    check_counts(size_of(written(tiny, tmp_path / "tiny")), empty(tiny))
    if family not in NOT_BY_DEFAULT:
        usual = CONFIG_MAPPING[family]()
        size = size_of(written(usual, tmp_path / "usual"))
        check_counts(size, empty(usual))
        assert size.max_positions == usual.get_text_config().max_position_embeddings


@pytest.mark.parametrize("family", sorted(UNLIKE))
def test_adapters_are_on_all_linear_layers(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    size = size_of(written(config, tmp_path), lora={"rank": 2})
    linears = {name: one for name, one in empty(config).named_modules() if type(one) is nn.Linear and name != "lm_head"}
    assert {*size.adapted} == {*linears}
    assert size.num_adapter_parameters == sum(2 * (one.in_features + one.out_features) for one in linears.values())


PUBLISHED: dict[str, dict[str, object]] = {
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 16,
            "num_heads": 2,
            "short_conv_kernel_size": 3,
        },
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "moe_intermediate_size": 8,
        "num_experts": 4,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "model_max_length": 512,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "pad_token_id": 0,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "kv_lora_rank": 8,
        "intermediate_size": 64,
        "tie_word_embeddings": False,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-ME*E",
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "n_groups": 2,
        "ssm_state_size": 8,
        "conv_kernel": 4,
        "chunk_size": 16,
        "max_position_embeddings": 512,
        "n_routed_experts": 4,
        "moe_intermediate_size": 16,
        "moe_latent_size": 8,
        "num_experts_per_tok": 2,
        "moe_shared_expert_intermediate_size": 24,
        "use_bias": True,
        "mlp_bias": True,
    },
    "granitemoehybrid": {
        "layer_types": ["mamba", "attention", "mamba"],
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 16,
        "shared_intermediate_size": 24,
        "num_local_experts": 0,
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
    },
    "lfm2": {
        "full_attn_idxs": [1],
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "block_ff_dim": 96,
        "block_multiple_of": 10,
        "block_ffn_dim_multiplier": 1.3,
        "block_auto_adjust_ff_dim": True,
        "conv_bias": True,
        "max_position_embeddings": 512,
    },
    "gemma3_text": {
        "sliding_window_pattern": 2,
        "sliding_window": 16,
        "num_hidden_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": 64,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
    },
    "gemma4": {
        "text_config": {
            "model_type": "gemma4_text",
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "global_head_dim": 16,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 64,
            "vocab_size": 64,
            "intermediate_size": 48,
            "max_position_embeddings": 512,
            "attention_bias": True,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 20,
            "standardize": True,
        },
        "audio_config": {
            "model_type": "gemma4_audio",
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "subsampling_conv_channels": [8, 4],
            "conv_kernel_size": 3,
            "output_proj_dims": 24,
        },
    },
    "gemma4_text": {
        "num_hidden_layers": 6,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "vocab_size": 64,
        "intermediate_size": 48,
        "max_position_embeddings": 512,
    },
    "qwen3_5_moe": {
        "tie_word_embeddings": False,
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "full_attention_interval": 2,
            "num_hidden_layers": 4,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "vocab_size": 64,
            "moe_intermediate_size": 8,
            "shared_expert_intermediate_size": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "max_position_embeddings": 512,
        },
    },
    "glm_moe_dsa": {
        "index_topk_pattern": "FSF",
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 8,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_topk": 4,
        "max_position_embeddings": 512,
        "attention_bias": True,
    },
}
"""Descriptions with the names and patterns that published files have."""


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_files_are_read_as_transformers_reads_them(tmp_path: Path, family: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **PUBLISHED[family]}))
    config = AutoConfig.from_pretrained(tmp_path)
    size = size_of(str(tmp_path))
    check_counts(size, empty(config))
    types = config.get_text_config().layer_types
    assert [kind.is_recurrent for kind in size.kinds] == [one in {"linear_attention", "conv"} for one in types]
    assert [kind.window is not None for kind in size.kinds] == [one == "sliding_attention" for one in types]
    again = size_of(written(config, tmp_path / "again"))
    assert again == size


class Recorded:
    """Attention that notes the keys and values of a token in each layer, and the bytes of states of a sequence."""

    def __init__(self, num_tokens: int) -> None:
        self._attention = JoinedAttention([*blocks_of([Family(num_tokens, ())])], torch.device("cpu"))
        self.values, self.states = dict[int, int](), dict[int, int]()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        self.values[layer] = key[0].numel() + value[0].numel()
        return self._attention.attend(layer, query, key, value, form)

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        states = LayerStates()
        mixer(hidden.unsqueeze(0), states)
        self.states[layer] = bytes_of(states)
        return self._attention.recur(layer, mixer, hidden)


def bytes_of(states: LayerStates) -> int:
    return sum(one.nbytes for one in (*states.convolutions.values(), *states.recurrences.values()))


@cache
def recorded(family: str, dtype: torch.dtype) -> Recorded:
    model = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation=ATTENTION_NAME).eval()
    decoder, tokens = CausalLM(model.to(dtype)), torch.arange(9)
    found = Recorded(len(tokens))
    with torch.no_grad(), passing(LayerPass(found, decoder.attention_kinds, tokens)):
        decoder.text_model(input_ids=tokens[None], position_ids=tokens[None], use_cache=False, attention=found)
    return found


@pytest.mark.parametrize("family", sorted(UNLIKE - INDEXED))
def test_keys_and_values_are_those_of_layers_that_attend_and_states_of_those_that_recur(
    tmp_path: Path, family: str
) -> None:
    size = size_of(written(tiny_config(family), tmp_path))
    for dtype in (torch.float32, torch.bfloat16):
        found = recorded(family, dtype)
        assert size.kv_values_per_token == sum(found.values.values())
        assert size.state_bytes(dtype.itemsize) == sum(found.states.values())
    assert (size.num_attention_layers, size.num_recurrent_layers) == (len(found.values), len(found.states))
    assert bool(found.states) == any(kind.is_recurrent for kind in size.kinds)


@pytest.mark.parametrize("family", sorted(INDEXED | {"deepseek_v3", "kimi_linear"}))
def test_engines_that_keep_latents_have_what_projections_make(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    modules = dict(empty(config).named_modules())
    size = size_of(written(config, tmp_path))
    made = sum(one.out_features for name, one in modules.items() if name.endswith((".kv_a_proj_with_mqa", ".wk")))
    assert size.compressed_values_per_token == made
    assert size.compressed_values_per_token < size.kv_values_per_token
    assert not size.is_plain, "values are narrower than keys"


def layer_of(family: str, folder: Path, **settings: object) -> tuple[ModelSize, Callable[[Tensor], Tensor], nn.Module]:
    """The size of a model with one layer that reads by recurrence, this layer, and its module."""
    config = CONFIG_MAPPING[family](
        vocab_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), 0),
        **settings,
    )
    model = AutoModelForCausalLM.from_config(config)
    module = next(one for one in model.modules() if is_mixer(one))
    return size_of(written(config, folder)), RecurrentLayer(module).mixer, module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        (
            "qwen3_5_text",
            {"layer_types": ["linear_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        ),
        (
            "kimi_linear",
            {"layer_types": ["linear_attention"], "mlp_layer_types": ["dense"], "linear_num_heads": 2},
        ),
        ("bamba", {"mamba_n_heads": 4, "mamba_d_head": 64, "mamba_d_state": 64}),
        ("lfm2", {"layer_types": ["conv"], "num_attention_heads": 4}),
    ],
)
def test_what_recurrences_keep_for_the_backward_pass_is_what_torch_keeps(
    tmp_path: Path, family: str, settings: dict[str, object], dtype: torch.dtype
) -> None:
    size, read, module = layer_of(family, tmp_path, hidden_size=128, **settings)
    hidden = torch.randn(1, 16 * DELTA_CHUNK, 128, dtype=dtype, requires_grad=True)
    known = {one.untyped_storage().data_ptr() for one in (hidden, *module.to(dtype).parameters())}
    kept, alive = dict[int, int](), list[Tensor]()

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # else another one could have its address
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes() * (storage.data_ptr() not in known)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        read(hidden)
    (layer,) = size.layers
    expected = 4 * size.recurrence.num_kept + dtype.itemsize * layer.num_kept
    assert expected == pytest.approx(sum(kept.values()) / hidden.shape[1], rel=0.15)


# Memory of the fullest rank


def plan_with(family: str, folder: Path, **sections: object) -> Plan:
    policy = {"path": written(tiny_config(family), folder), "compute_dtype": "bfloat16"}
    settings = {"models": {"policy": policy}, "data": {"train": {"path": "a"}, "max_prompt_tokens": 32}}
    batch = {"prompts_per_step": 8, "responses_per_prompt": 4, "updates_per_step": 1, "micro_batch_tokens": 1024}
    rollout = {"engine": "native", "max_response_tokens": 32}
    return plan_of("grpo", 1, **{**settings, "batch": batch, "rollout": rollout, **sections})


@pytest.mark.parametrize("family", sorted(UNLIKE - INDEXED))
def test_the_planned_bytes_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    memory = plan_with(family, tmp_path).memory
    assert memory is not None
    device, weights = memory.accelerator, sum(one.numel() for one in empty(tiny_config(family)).parameters())
    assert device.resident["policy weights"] == 4 * weights
    assert device.phases["policy trains"]["gradients"] == 4 * weights
    found, generates = recorded(family, torch.bfloat16), memory.cpu.phases["policy generates"]
    # On a CPU, 32 responses of up to 32 tokens and 8 prompts have a slot of 64 each.
    assert generates["kv cache"] == 2 * sum(found.values.values()) * 64 * (32 + 8)
    states = sum(found.states.values())
    one_layer = max(found.states.values(), default=0)
    assert generates.get("states", 0) == (32 + 8) * states + 32 * one_layer


@pytest.mark.parametrize("family", RECURRENT)
def test_states_of_prompts_and_responses_are_there_while_a_pass_trains(tmp_path: Path, family: str) -> None:
    def training(*, checkpointing: bool) -> dict[str, int]:
        model = {"path": str(tmp_path), "compute_dtype": "bfloat16", "gradient_checkpointing": checkpointing}
        plan = plan_with(family, tmp_path, models={"policy": model})
        assert plan.memory is not None
        return dict(plan.memory.accelerator.phases["policy trains"])

    found = recorded(family, torch.bfloat16).states
    # 8 prompts with 4 responses each, which fit into a pass.
    assert training(checkpointing=False)["states"] == 8 * 5 * sum(found.values())
    assert training(checkpointing=True)["states"] == 8 * 5 * max(found.values())


def test_layers_without_attention_keep_what_their_recurrence_keeps(tmp_path: Path) -> None:
    """Without recomputation, the values of all layers are kept, each as its kind has them."""
    kinds = ["linear_attention", "full_attention"]
    found = {}
    for types in (kinds[:1], kinds[1:], kinds):
        config = tiny_config("qwen3_next", num_hidden_layers=len(types), layer_types=types)
        path = written(config, tmp_path / "-".join(types))
        plan = plan_with("qwen3_next", tmp_path / "other", models={"policy": path})
        assert plan.memory is not None
        found[len(types), types[0]] = plan.memory.accelerator.phases["policy trains"]["activations"]
    recurrent, attending, both = found.values()
    assert recurrent > attending
    size, tokens = size_of(str(tmp_path / kinds[0])), 8 * (32 + 4 * 31)
    assert both == pytest.approx(recurrent + attending, rel=0.05)
    assert recurrent > tokens * 4 * size.recurrence.num_kept


def test_engines_divide_neither_latents_nor_know_keys(tmp_path: Path) -> None:
    rollout = {"engine": "vllm", "max_response_tokens": 32, "external": {"python": "python3"}}
    sections = {"rollout": rollout, "layout": {"rollout": {"tp": 2}}}
    policy = {"path": written(tiny_config("kimi_linear"), tmp_path), "compute_dtype": "bfloat16"}
    settings = {"models": {"policy": policy}, "data": {"train": {"path": "a"}, "max_prompt_tokens": 32}}
    batch = {"prompts_per_step": 8, "responses_per_prompt": 4, "micro_batch_tokens": 1024}
    plan = plan_of("grpo", 2, **settings, batch=batch, **sections)
    assert plan.memory is not None
    size, generates = size_of(policy["path"]), plan.memory.accelerator.phases["policy generates"]
    assert generates["kv cache"] == 32 * 64 * size.compressed_values_per_token * 2
    assert generates["states"] == 32 * size.state_bytes(2) // 2


@pytest.mark.parametrize("family", ["glm_moe_dsa", "kimi_linear", "nemotron_h"])
def test_stages_have_the_sizes_of_their_own_layers(tmp_path: Path, family: str) -> None:
    config = AutoConfig.for_model(family, **PUBLISHED[family])
    size = size_of(written(config, tmp_path))
    stages = [size.stage(3, stage) for stage in range(3)]
    assert sum(stage.num_layer_parameters for stage in stages) == size.num_layer_parameters
    assert sum(stage.num_expert_parameters for stage in stages) == size.num_expert_parameters
    assert sum(stage.num_recurrent_layers for stage in stages) == size.num_recurrent_layers
    assert sum(stage.num_indexers for stage in stages) == size.num_indexers
    assert [stage.num_layers for stage in stages] == [len(stage.layers) for stage in stages]
    for stage in stages:
        assert stage.num_layer_parameters == sum(layer.num_parameters for layer in stage.layers)


def test_ranks_along_tp_and_ep_divide_layers_and_experts(tmp_path: Path) -> None:
    size = size_of(written(tiny_config("gpt_oss"), tmp_path))
    part = size.part(2, 4)
    assert part.num_expert_parameters == size.num_expert_parameters // 4
    assert sum(layer.num_expert_parameters for layer in part.layers) == part.num_expert_parameters
    assert part.num_layer_parameters == pytest.approx(sum(layer.num_parameters for layer in part.layers), abs=4)


def test_adapters_of_experts_are_not_counted(tmp_path: Path) -> None:
    path = written(tiny_config("qwen3_next"), tmp_path)
    assert read_model_size(ModelConfig.model_validate({"path": path, "lora": {"rank": 2, "expert_rank": 1}})) is None


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3_next", {"layer_types": ["full_attention", "none_such"]}),
        ("qwen3_next", {"linear_num_key_heads": None}),
        ("qwen3_5", {"text_config": None}),
        ("glm_moe_dsa", {"indexer_types": ["full"]}),
        ("kimi_linear", {"mlp_layer_types": ["dense"]}),
        ("nemotron_h", {"chunk_size": 0}),
        ("gpt_oss", {"num_experts_per_tok": None}),
    ],
)
def test_a_description_that_lacks_something_gives_no_size(
    tmp_path: Path, family: str, changes: dict[str, object]
) -> None:
    path = Path(written(tiny_config(family), tmp_path), "config.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    assert read_model_size(ModelConfig(path=str(tmp_path))) is None


def test_ministral_is_plain_without_a_window(tmp_path: Path) -> None:
    config = tiny_config("ministral3", sliding_window=None)
    size = size_of(written(config, tmp_path))
    assert size.is_plain
    assert not size_of(written(tiny_config("ministral"), tmp_path / "window")).is_plain
