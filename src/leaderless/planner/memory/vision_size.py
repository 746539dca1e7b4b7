"""The size of the part of a model that sees images, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from leaderless.planner.memory.layers import TOWERS, Linear

TEXT: Mapping[str, tuple[str, ...]] = {
    "qwen2_vl": ("qwen2",),
    "qwen2_5_vl": ("qwen2",),
    "qwen3_vl": ("qwen3",),
    "qwen3_vl_moe": ("qwen3_moe",),
    "llava": ("llama", "qwen2", "qwen3"),
    "paligemma": ("gemma",),
}
"""Families whose weights are counted, and the families whose layers they may have for text."""
UNSAID: Mapping[str, Mapping[str, int]] = {
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 2048,
    },
    "gemma": {"head_dim": 256, "max_position_embeddings": 8192},
}
"""Values of layers for text where their section does not say: published files leave out what is as `transformers` has
it by default."""


@dataclass(frozen=True)
class VisionSize:
    """Sizes of a vision tower on which memory depends.

    A token of the prompt stands for `patches_per_token`, which go through `num_layers` of width `hidden_size`;
    `intermediate_size` is the width of their feed-forward part, which `is_gated` or not. A patch has `patch_values`
    numbers. What some of its layers have seen is added behind the first `num_added` layers for text.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    patches_per_token: int
    is_gated: bool
    num_frozen: int = 0
    num_added: int = 0
    patch_values: int = 0

    @property
    def is_frozen(self) -> bool:
        """Whether its layers are not trained; what makes embeddings of their outputs may be."""
        return self.num_frozen > 0

    def layer_values(self) -> int:
        """Numbers that a layer keeps of each token for its backward pass.

        Each norm keeps its input and its output; attention keeps what it multiplies, before and after its rotation, and
        its output; the feed-forward part keeps its inner features before and after the activation, and more if gated.
        """
        inner = (4 if self.is_gated else 2) * self.intermediate_size
        return self.patches_per_token * (10 * self.hidden_size + inner) * (not self.is_frozen)

    def held_values(self) -> int:
        """Numbers of each token that a pass without a gradient holds in a layer's feed-forward part."""
        inner = (3 if self.is_gated else 2) * self.intermediate_size
        return self.patches_per_token * (3 * self.hidden_size + inner)

    def pixel_bytes(self, width: int) -> int:
        """Bytes of the pixels of each token: in float32, as they come from the host, and in `width` bytes each."""
        return self.patches_per_token * self.patch_values * (4 + (width if width != 4 else 0))

    def kept_values(self, *, gradient_checkpointing: bool) -> int:
        """Numbers of each token that are held when the backward pass begins, and those that its last layer makes."""
        if not gradient_checkpointing or self.is_frozen:
            return self.num_layers * self.layer_values()
        return self.num_layers * self.patches_per_token * self.hidden_size + self.layer_values()


NO_VISION = VisionSize(0, 0, 0, 0, 0, is_gated=False)
"""Vision size of a model that sees nothing."""


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the layers for text, as a model of text has it; older files have no section for it.

    Raises:
        ValueError: The layers for text are of a family that is not counted.
    """
    kind, own = str(config["model_type"]), config.get("text_config", config)
    assert isinstance(own, dict)
    family = TEXT[kind][0] if kind.startswith("qwen") else str(own.get("model_type", TEXT[kind][0]))
    if family not in TEXT[kind]:
        raise ValueError(f"layers of type {family} are not counted")
    is_tied = config.get("tie_word_embeddings", own.get("tie_word_embeddings", kind == "paligemma"))
    if kind == "llava":  # tied if either says so
        is_tied = is_tied or own.get("tie_word_embeddings", False)
    unsaid = {} if kind.startswith("qwen") else UNSAID.get(family, {})
    return {**unsaid, **own, "model_type": family, "tie_word_embeddings": is_tied}


def vision_tower(config: Mapping[str, object], *, is_frozen: bool) -> tuple[VisionSize, Sequence[Linear]]:
    """Count the weights of the part that sees, which may be frozen, and list its linear layers.

    Raises:
        ValueError: Its layers are of a family that is not counted.
    """
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    size, layers = _tower_of(config, vision)
    others = size.num_parameters
    frozen = sum(layer.num_weights for layer in layers if layer.name.startswith(TOWERS)) + others
    total = sum(layer.num_weights for layer in layers) + others
    return replace(size, num_parameters=total, num_frozen=frozen if is_frozen else 0), layers


def _tower_of(config: Mapping[str, object], vision: Mapping[str, Any]) -> tuple[VisionSize, list[Linear]]:
    """The part that sees, with weights that are in no linear layer, and its linear layers, all of which have a bias."""
    if str(config["model_type"]).startswith("qwen"):
        return _tower_of_qwen(str(config["model_type"]), vision)
    text, features = text_config(config), config.get("vision_feature_layer", -2)
    out, num_features = int(str(text["hidden_size"])), len(features) if isinstance(features, list) else 1
    width, name = vision["hidden_size"], "model.multi_modal_projector.linear"
    if config["model_type"] == "paligemma":
        projector = [Linear(name, width, int(str(config.get("projection_dim", 2048))))]
    else:
        projector = [Linear(f"{name}_1", width * num_features, out), Linear(f"{name}_2", out, out)]
        if config.get("multimodal_projector_bias", True) is not True:
            raise ValueError("projectors without a bias are not counted")
    size, layers = _tower_of_clip(vision)
    return size, [*layers, *projector]


def _tower_of_qwen(family: str, vision: Mapping[str, Any]) -> tuple[VisionSize, list[Linear]]:
    depth, merge = vision["depth"], vision["spatial_merge_size"] ** 2
    if family == "qwen2_vl":
        width, out = vision["embed_dim"], vision["hidden_size"]
        inner = int(width * vision["mlp_ratio"])
    else:
        width, inner, out = vision["hidden_size"], vision["intermediate_size"], vision["out_hidden_size"]
    merged, prefix = width * merge, "model.visual"
    names = {
        "qwen2_vl": ("fc1", "fc2"),
        "qwen2_5_vl": ("gate_proj", "up_proj", "down_proj"),
    }.get(family, ("linear_fc1", "linear_fc2"))
    layers = []
    for number in range(depth):
        attention, mlp = f"{prefix}.blocks.{number}.attn", f"{prefix}.blocks.{number}.mlp"
        layers += [Linear(f"{attention}.qkv", width, 3 * width), Linear(f"{attention}.proj", width, width)]
        layers += [Linear(f"{mlp}.{name}", width, inner) for name in names[:-1]]
        layers += [Linear(f"{mlp}.{names[-1]}", inner, width)]
    is_newer = family.startswith("qwen3")
    num_stacked = len(vision["deepstack_visual_indexes"]) if is_newer else 0
    ends = ("linear_fc1", "linear_fc2") if is_newer else ("mlp.0", "mlp.2")
    for merger in ("merger", *(f"deepstack_merger_list.{number}" for number in range(num_stacked))):
        layers += [
            Linear(f"{prefix}.{merger}.{ends[0]}", merged, merged),
            Linear(f"{prefix}.{merger}.{ends[1]}", merged, out),
        ]
    patch = vision.get("in_channels", 3) * vision.get("temporal_patch_size", 2) * vision["patch_size"] ** 2
    norm = width if family == "qwen2_5_vl" else 2 * width  # some have no bias
    others = patch * width + 2 * depth * norm + norm
    if is_newer:
        others += width + vision["num_position_embeddings"] * width + 2 * merged * num_stacked
    gated = family == "qwen2_5_vl"
    return VisionSize(others, depth, width, inner, merge, gated, num_added=num_stacked, patch_values=patch), layers


def _tower_of_clip(vision: Mapping[str, int]) -> tuple[VisionSize, list[Linear]]:
    """A tower of type CLIP or SigLIP, of which each patch is a token."""
    kind = str(vision["model_type"])
    is_siglip = kind == "siglip_vision_model"
    if kind not in {"clip_vision_model", "siglip_vision_model"} or (is_siglip and vision.get("vision_use_head", True)):
        raise ValueError(f"towers of type {kind} are not counted, or not with a head")
    width, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["num_hidden_layers"]
    layers, prefix = [], "model.vision_tower.encoder.layers"
    for number in range(depth):
        attention, mlp = f"{prefix}.{number}.self_attn", f"{prefix}.{number}.mlp"
        layers += [Linear(f"{attention}.{name}", width, width) for name in ("k_proj", "v_proj", "q_proj", "out_proj")]
        layers += [Linear(f"{mlp}.fc1", width, inner), Linear(f"{mlp}.fc2", inner, width)]
    side = vision.get("patch_size", 16 if is_siglip else 32)
    patches = (vision.get("image_size", 224) // side) ** 2
    values = vision.get("num_channels", 3) * side**2
    others = values * width + patches * width + (4 * depth + 2) * width
    others += width if is_siglip else (1 + 1 + 2) * width  # a bias; or a class with its place, and a norm before
    return VisionSize(others, depth, width, inner, 1, is_gated=False, patch_values=values), layers
