"""The network of pi0.5: PaliGemma, and a smaller expert whose norms are set by the time.

Differences from pi0: the time does not go through the actions, but scales, shifts and gates what each layer of the
expert computes (adaRMS); the robot's state has no place of its own, as it is a part of the prompt. Weights have the
names of LeRobot's checkpoints, less what these put in front of them; see `PREFIXES`.

Source: pi0.5, arXiv 2504.16054; the published implementations of it, openpi and LeRobot.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import GemmaConfig, PaliGemmaConfig, PaliGemmaModel
from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaMLP, GemmaRotaryEmbedding

from leaderless.embodied.policies.pretrained import PaliGemmaPrefix, needs_weights, with_cache

WEIGHTS = "model.safetensors"
VOCABULARY = 257152
PREFIXES: Mapping[str, str] = {
    "paligemma_with_expert.paligemma.lm_head.": "vlm.language_model.embed_tokens.",
    "paligemma_with_expert.paligemma.model.vision_tower.vision_model.": "vlm.vision_tower.",
    "paligemma_with_expert.paligemma.model.": "vlm.",
    "paligemma_with_expert.gemma_expert.model.": "expert.",
}
"""How names of published weights begin, and how they begin here; a `model.` in front of all is left out."""
UNUSED = "paligemma_with_expert.gemma_expert.lm_head."
"""How names of published weights begin that nothing depends on."""
EPSILON = 1e-6
"""Number that Gemma's norms add to a mean of squares."""


@dataclass(frozen=True)
class Variant:
    """Sizes of a Gemma.

    Attributes:
        width: Features of a token.
        depth: Layers.
        mlp_size: Width within its layers.
        num_heads: Heads of its attention.
        head_dim: Features of a head.
        vision: Sizes of the tower that sees for it.
        vocabulary: Words that it knows.
    """

    width: int
    depth: int
    mlp_size: int
    num_heads: int
    head_dim: int
    vision: tuple[int, int, int, int] = (1152, 27, 4304, 16)
    vocabulary: int = VOCABULARY


VARIANTS: Mapping[str, Variant] = {
    "gemma_2b": Variant(2048, 18, 16384, 8, 256),
    "gemma_300m": Variant(1024, 18, 4096, 8, 256),
    # Small ones of the same kind, for tests and examples.
    "tiny": Variant(32, 2, 40, 2, 16, (24, 2, 40, 2), 300),
    "tiny_expert": Variant(24, 2, 40, 2, 16),
}
"""Sizes by the names that configurations give them; all have one head for keys and values."""


@dataclass(frozen=True)
class Pi05Config:
    """Contents of `config.json` about the network.

    Attributes:
        vlm: Sizes of PaliGemma's layers for text.
        expert: Sizes of the expert.
        image_size: Side of an image in pixels.
        horizon: Steps that it plans.
        max_state_dim: Numbers of a state, at most.
        max_action_dim: Numbers of an action, at most.
        periods: Shortest and longest period of the waves that encode the time.
    """

    vlm: Variant
    expert: Variant
    image_size: int
    horizon: int
    max_state_dim: int
    max_action_dim: int
    periods: tuple[float, float]

    @classmethod
    def read(cls, folder: Path) -> Pi05Config:
        """Read it.

        Raises:
            ValueError: It cannot be read, or belongs to another kind of policy.
        """
        try:
            about = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"path='{folder}': no pi0.5 can be read: {error}") from error
        if about.get("type") != "pi05":
            raise ValueError(
                f"path='{folder}': its config.json has the type {about.get('type')}, not pi05: give a checkpoint in "
                "the form of LeRobot"
            )
        defaults = {"paligemma": "gemma_2b", "action_expert": "gemma_300m"}
        names = [about.get(f"{name}_variant", sizes) for name, sizes in defaults.items()]
        if unknown := [name for name in names if name not in VARIANTS]:
            raise ValueError(f"path='{folder}': unknown sizes '{unknown[0]}': known are {', '.join(VARIANTS)}")
        if on := [name for name in ("use_proprioceptive_memory", "use_visual_memory") if about.get(name)]:
            raise ValueError(f"path='{folder}': {on[0]} is not supported: this policy sees the present alone")
        sides = about.get("image_resolution", (224, 224))
        return cls(
            VARIANTS[names[0]],
            VARIANTS[names[1]],
            int(sides[0]),
            int(about.get("chunk_size", 50)),
            int(about.get("max_state_dim", 32)),
            int(about.get("max_action_dim", 32)),
            (float(about.get("min_period", 4e-3)), float(about.get("max_period", 4.0))),
        )


class AdaRmsNorm(nn.Module):
    """RMS norm that a condition scales and shifts; it also gives the factor of what is added to the residual."""

    def __init__(self, width: int) -> None:
        """Make the layer; with no condition, it is the plain norm, and nothing is added to the residual."""
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Normalize x [n, length, width] under a condition [n, width].

        Returns:
            norm(x) (1 + scale) + shift, and the gate [n, 1, width].
        """
        scale, shift, gate = self.dense(condition.to(self.dense.weight.dtype))[:, None].chunk(3, dim=-1)
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPSILON)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class ExpertLayer(nn.Module):
    """A layer of the expert."""

    def __init__(self, config: GemmaConfig, number: int) -> None:
        """Make the layer with a number, from 0."""
        super().__init__()
        self.self_attn, self.mlp = GemmaAttention(config, number), GemmaMLP(config)
        self.input_layernorm, self.post_attention_layernorm = (AdaRmsNorm(config.hidden_size) for _ in range(2))

    def forward(self, x: Tensor, condition: Tensor, **attention: object) -> Tensor:
        """[m, steps, width] of x of the same shape, under a condition [m, width]."""
        inner, gate = self.input_layernorm(x, condition)
        x = x + gate * self.self_attn(inner, **attention)[0]
        inner, gate = self.post_attention_layernorm(x, condition)
        found: Tensor = x + gate * self.mlp(inner)
        return found


@dataclass(frozen=True)
class _After:
    """Keys and values of a prefix, in the form of a cache that keeps nothing of what follows."""

    prefix: PaliGemmaPrefix

    def update(self, keys: Tensor, values: Tensor, layer: int, **_: object) -> tuple[Tensor, Tensor]:
        """Keys and values of the prefix with those that follow."""
        before = self.prefix.layers[layer]
        return torch.cat([before[0], keys], dim=2), torch.cat([before[1], values], dim=2)


class Expert(nn.Module):
    """The layers that actions go through. They attend to the prefix, and to one another."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(ExpertLayer(config, number) for number in range(config.num_hidden_layers))
        self.norm = AdaRmsNorm(config.hidden_size)
        self.rotary_emb = GemmaRotaryEmbedding(config=config)

    def forward(self, x: Tensor, condition: Tensor, prefix: PaliGemmaPrefix) -> Tensor:
        """[m, steps, width] of embedded actions of the same shape."""
        n, steps = x.shape[:2]
        places = prefix.is_real.sum(1, keepdim=True) + torch.arange(steps, device=x.device)
        is_seen = torch.cat([prefix.is_real, prefix.is_real.new_ones(n, steps)], dim=1)
        mask = is_seen[:, None, None].expand(n, 1, steps, is_seen.shape[1])
        angles, after = self.rotary_emb(x, position_ids=places), _After(prefix)
        for layer in self.layers:
            x = layer(x, condition, attention_mask=mask, position_embeddings=angles, **with_cache(after))
        found: Tensor = self.norm(x, condition)[0]
        return found


class Pi05Network(nn.Module):
    """See the module."""

    def __init__(self, config: Pi05Config) -> None:
        super().__init__()
        self.config = config
        width, numbers = config.expert.width, config.max_action_dim
        self.vlm = PaliGemmaModel(_paligemma(config))
        gemma = _gemma(config.expert)
        gemma._attn_implementation = "sdpa"  # noqa: SLF001 - the layers are used without the model that sets it
        self.expert = Expert(gemma)
        self.action_in_proj, self.action_out_proj = nn.Linear(numbers, width), nn.Linear(width, numbers)
        self.time_mlp_in, self.time_mlp_out = nn.Linear(width, width), nn.Linear(width, width)

    def velocity(self, prefix: PaliGemmaPrefix, x: Tensor, times: Tensor) -> Tensor:
        """Velocities [m, horizon, numbers] at points x of the same shape, at times [m] float32 from 0 to 1."""
        kind = self.action_in_proj.weight.dtype
        # Sines and then cosines of the times, of periods that grow by a constant factor.
        shortest, longest = self.config.periods
        shares = torch.linspace(0, 1, self.config.expert.width // 2, dtype=torch.float64, device=times.device)
        angles = times.double()[:, None] * (2 * math.pi / (shortest * (longest / shortest) ** shares))
        waves = torch.cat([angles.sin(), angles.cos()], dim=1).to(kind)
        condition = functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(waves))))
        found: Tensor = self.action_out_proj(self.expert(self.action_in_proj(x.to(kind)), condition, prefix))
        return found.float()


def _gemma(sizes: Variant) -> GemmaConfig:
    return GemmaConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        intermediate_size=sizes.mlp_size,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=1,
        head_dim=sizes.head_dim,
        vocab_size=sizes.vocabulary,
        rms_norm_eps=EPSILON,
    )


def _paligemma(config: Pi05Config) -> PaliGemmaConfig:
    width, depth, mlp_size, num_heads = config.vlm.vision
    return PaliGemmaConfig(
        text_config={"model_type": "gemma", **_gemma(config.vlm).to_diff_dict()},
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": width,
            "num_hidden_layers": depth,
            "intermediate_size": mlp_size,
            "num_attention_heads": num_heads,
            "patch_size": 14,
            "image_size": config.image_size,
            "vision_use_head": False,
            "projection_dim": config.vlm.width,
        },
        projection_dim=config.vlm.width,
        image_token_id=config.vlm.vocabulary - 1,
    )


def own_name(published: str) -> str | None:
    """The name of a published weight here; None if nothing depends on it."""
    name = published.removeprefix("model.")
    if name.startswith(UNUSED):
        return None
    for theirs, ours in PREFIXES.items():
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return name


def read_network(folder: Path) -> Pi05Network:
    """Read a network, and its weights if they are needed; see `needs_weights`.

    Raises:
        ValueError: It cannot be read, or weights are missing, unknown, or of other shapes.
    """
    network = Pi05Network(Pi05Config.read(folder))
    if not needs_weights(folder):
        return network.eval()
    try:
        published = load_file(folder / WEIGHTS)
    except OSError as error:
        raise ValueError(f"path='{folder}': {WEIGHTS} cannot be read: {error}") from error
    found = {name: tensor for theirs, tensor in published.items() if (name := own_name(theirs)) is not None}
    wanted = dict(network.named_parameters())
    for name, parameter in wanted.items():
        if name not in found or found[name].shape != parameter.shape:
            what = "lacks" if name not in found else f"has {tuple(found[name].shape)} numbers of"
            raise ValueError(f"path='{folder}': it {what} the weight '{name}' of shape {tuple(parameter.shape)}")
        parameter.data.copy_(found[name])
    if unknown := sorted(found.keys() - wanted.keys()):
        raise ValueError(f"path='{folder}': it has weights that are unknown, such as '{unknown[0]}'")
    return network.eval()
