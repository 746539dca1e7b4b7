"""The size of the part of a model that sees images, from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TEXT = {"qwen2_5_vl": "qwen2", "qwen3_vl": "qwen3", "qwen3_vl_moe": "qwen3_moe"}
"""Families whose weights are counted, and the family whose layers they have for text."""
SIGHT = {"visual", "vision_tower", "multi_modal_projector"}
"""Modules that see images."""


def sees(name: str) -> bool:
    """Whether a weight or a module, by its name, belongs to the part of a model that sees images."""
    return not SIGHT.isdisjoint(name.split("."))


@dataclass(frozen=True)
class VisionSize:
    """What memory depends on.

    A token of the prompt stands for `patches_per_token`, which go through `num_layers` of width `hidden_size`;
    `intermediate_size` is that of their feed-forward part, which `is_gated` or not. What some of its layers have seen
    is added behind the first `num_added` layers for text.
    """

    num_parameters: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    patches_per_token: int
    is_gated: bool
    is_frozen: bool = False
    num_added: int = 0

    def layer_values(self) -> int:
        """Numbers that a layer keeps of each token for its backward pass.

        Each norm keeps its input and its output; attention keeps what it multiplies, before and after its rotation, and
        its output; the feed-forward part keeps its inner features before and after the activation, and more if gated.
        """
        inner = (4 if self.is_gated else 2) * self.intermediate_size
        return self.patches_per_token * (10 * self.hidden_size + inner) * (not self.is_frozen)

    def kept_values(self, *, gradient_checkpointing: bool) -> int:
        """Numbers of each token that are held when the backward pass begins, and those that its last layer makes."""
        if not gradient_checkpointing or self.is_frozen:
            return self.num_layers * self.layer_values()
        return self.num_layers * self.patches_per_token * self.hidden_size + self.layer_values()


def text_config(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the layers for text, as a model of text has it; older files have no section for it.

    Args:
        config: Configuration of a model of one of the families.
    """
    own = config.get("text_config", config)
    assert isinstance(own, dict)
    is_tied = config.get("tie_word_embeddings", own.get("tie_word_embeddings", False))
    return {**own, "model_type": TEXT[str(config["model_type"])], "tie_word_embeddings": is_tied}


def vision_size(config: Mapping[str, object], *, is_frozen: bool) -> VisionSize:
    """Count the weights of the part that sees.

    Args:
        config: Configuration of a model of one of the families.
        is_frozen: Whether it is not trained.
    """
    vision = config["vision_config"]
    assert isinstance(vision, dict)
    width, inner, depth = vision["hidden_size"], vision["intermediate_size"], vision["depth"]
    merged, out = width * vision["spatial_merge_size"] ** 2, vision["out_hidden_size"]
    patch = vision.get("in_channels", 3) * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    attention = 4 * width * width + 4 * width
    merger = merged * merged + merged + merged * out + out
    is_gated, num_added = config["model_type"] == "qwen2_5_vl", 0
    if is_gated:
        layer = attention + 3 * width * inner + 2 * inner + width + 2 * width
        count = patch * width + depth * layer + width + merger
    else:
        layer = attention + 2 * width * inner + inner + width + 4 * width
        num_added = len(vision["deepstack_visual_indexes"])
        stacked = num_added * (2 * merged + merger)
        places = vision["num_position_embeddings"] * width
        count = patch * width + width + places + depth * layer + 2 * width + merger + stacked
    return VisionSize(count, depth, width, inner, merged // width, is_gated, is_frozen, num_added)
