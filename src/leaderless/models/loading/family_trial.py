"""A small model in the place of a large one, to try whether this package computes its family right.

What it has to show follows from the family and its settings, not from sizes: a few layers, heads and experts with
random weights do.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping

import torch
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel

from leaderless.models.loading.support import attention_names

NUM_LAYERS = 4
"""Layers of a small model: some families have experts in every other layer only, or not in the first three."""
_LARGEST: Mapping[str, int] = {
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
    "hidden_size": 256,
    "hidden_size_per_layer_input": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "ffn_dim": 128,
    "q_lora_rank": 64,
    "num_local_experts": 8,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "depth": 1,
    "embed_dim": 320,
}
"""Sizes of a small model, where a large one has more."""
_STATE_HEADS = (("mamba_n_heads", "mamba_d_head"), ("n_mamba_heads", "mamba_headdim"))
"""Number and size of the heads of state spaces."""
_PER_LAYER = {"deepstack_visual_indexes": [0], "fullatt_block_indexes": [0]}
"""Layers of the part that sees, whose outputs go elsewhere, too."""


def trial_model(described: PreTrainedConfig, kind: type[AutoModel], *, trust_remote_code: bool) -> PreTrainedModel:
    """Make a small model with the settings of a large one, with random weights, the same in every process.

    Args:
        described: Description of the large model.
        kind: Class of `transformers` that makes it.
        trust_remote_code: Whether code that comes with the model may run.

    Raises:
        Exception: Of any kind; the settings cannot describe a small model.
    """
    small = shrunk(described)
    with torch.random.fork_rng(devices=[]):  # without a look at accelerators, which would begin to use all of them
        torch.default_generator.manual_seed(0)
        model: PreTrainedModel = kind.from_config(
            small,
            dtype=torch.float32,
            attn_implementation=attention_names(small),
            trust_remote_code=trust_remote_code,
        )
        for parameter in model.parameters():  # with zeros and ones, or all but zero, mistakes could hide
            if parameter.ndim == 1:
                parameter.data += 0.1 * torch.randn(parameter.shape)
            elif parameter.ndim == 2 and parameter.std() < 0.05:
                parameter.data.normal_(0, 0.1)
    return model.eval()


def shrunk(described: PreTrainedConfig) -> PreTrainedConfig:
    """The description of a small model of the same family."""
    small = copy.deepcopy(described)
    for part in {id(one): one for one in (small, *_parts(small))}.values():
        _shrink(part)
    return small


def _parts(described: PreTrainedConfig) -> list[PreTrainedConfig]:
    """The descriptions of the parts of a model."""
    found = (getattr(described, name, None) for name in described.sub_configs or ())
    return [one for one in found if isinstance(one, PreTrainedConfig)]


def _shrink(part: PreTrainedConfig) -> None:
    """Change the description of a part into one of a smaller part."""
    if hasattr(part, "attn_config"):
        raise ValueError("its attention is described apart, so that the sizes that go together are not known")
    own_settings = _taken_out(part)
    layers, heads = getattr(part, "num_hidden_layers", None), getattr(part, "num_attention_heads", None)
    changed: dict[str, object] = {}
    if isinstance(heads, int) and heads > 2:
        changed |= _fewer_heads(part, heads)
    for name, largest in _LARGEST.items():
        value = getattr(part, name, None)
        if isinstance(value, int) and not isinstance(value, bool) and value > largest and name not in changed:
            changed[name] = largest
    chosen = [*range(layers)] if isinstance(layers, int) else []
    if len(chosen) > NUM_LAYERS:
        chosen = _chosen_layers(part, len(chosen))
        changed |= _of_layers(part, chosen)
    changed |= {name: value for name, value in _PER_LAYER.items() if getattr(part, name, None)}
    for number, size in _STATE_HEADS:  # together they are as wide as the layer
        has_own_width = getattr(part, "mamba_d_ssm", None) is not None
        if "hidden_size" in changed and hasattr(part, number) and not has_own_width:
            changed[number] = max(1, int(part.mamba_expand * changed["hidden_size"]) // getattr(part, size))
    for name, value in changed.items():
        setattr(part, name, value)
    if own_settings:
        part.per_layer_config = {new: own_settings[old] for new, old in enumerate(chosen) if old in own_settings}
    words = changed.get("vocab_size")
    if isinstance(words, int) and isinstance(padding := getattr(part, "pad_token_id", None), int) and padding >= words:
        part.pad_token_id = None


def _of_layers(part: PreTrainedConfig, chosen: list[int]) -> dict[str, object]:
    """Settings of a part that has but some of its layers."""
    layers = part.num_hidden_layers
    lists = json.loads(json.dumps({k: v for k, v in part.to_dict().items() if isinstance(v, list)}, default=str))
    found: dict[str, object] = {"num_hidden_layers": len(chosen)}
    found |= {name: [own[layer] for layer in chosen] for name, own in lists.items() if len(own) == layers}
    if modes := getattr(part, "kv_sharing_modes", None):  # which follow from this number
        found["num_kv_shared_layers"] = [modes[layer] for layer in chosen].count("reuse")
    if isinstance(with_attention := getattr(part, "attn_layer_indices", None), list):
        found["attn_layer_indices"] = [place for place, layer in enumerate(chosen) if layer in with_attention]
    return found


def _taken_out(part: PreTrainedConfig) -> dict[int, dict[str, object]]:
    """Settings that single layers have of their own, which are taken out of a description.

    With them in it, newer versions of `transformers` do not say what all other layers have.
    """
    if not getattr(part, "is_heterogeneous", False):
        return {}
    found = {int(layer): settings for layer, settings in part.to_dict()["per_layer_config"].items()}
    part.per_layer_config = None
    fewest = {"num_key_value_heads": 1}  # divides any number of heads
    if hasattr(part, "kv_lora_rank"):  # as many as heads
        fewest = {"num_key_value_heads": 2, "num_attention_heads": 2}
    return {layer: {name: fewest.get(name, value) for name, value in own.items()} for layer, own in found.items()}


def _chosen_layers(part: PreTrainedConfig, count: int) -> list[int]:
    """Layers of a part that a small one has: some of each type, and else the first ones.

    Layers that leave keys and values for later ones, and those that take them, are of other types than the rest.
    """
    kinds = getattr(part, "layer_types", None) or [None] * count
    types = [*zip(kinds, getattr(part, "kv_sharing_modes", None) or [None] * count, strict=True)]
    one_of_each = [types.index(one) for one in dict.fromkeys(types)]
    rest = [layer for layer in range(count) if layer not in one_of_each]
    return sorted([*one_of_each, *rest[: max(0, NUM_LAYERS - len(one_of_each))]])


def _fewer_heads(part: PreTrainedConfig, heads: int) -> dict[str, object]:
    """Two heads, for which there is one of keys where several shared them, each as large as before."""
    hidden, key_heads = getattr(part, "hidden_size", None), getattr(part, "num_key_value_heads", None)
    head_dim = getattr(part, "head_dim", None)
    if not isinstance(hidden, int):
        return {}
    if hasattr(part, "kv_lora_rank"):  # heads have several sizes of their own
        return {"num_attention_heads": 2, "num_key_value_heads": 2}
    changed: dict[str, object] = {"num_attention_heads": 2}
    if isinstance(key_heads, int):
        changed["num_key_value_heads"] = 2 if key_heads == heads else 1
    changed["hidden_size"] = 2 * (head_dim if isinstance(head_dim, int) else hidden // heads)
    return changed
