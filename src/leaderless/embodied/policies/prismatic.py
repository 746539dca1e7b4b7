"""The model of OpenVLA and OpenVLA-OFT: two towers that see, a projector, and a Llama that reads and acts.

Source: OpenVLA, arXiv 2406.09246; OpenVLA-OFT, arXiv 2502.19645. Weights have the names of published checkpoints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from leaderless.base.values import Json
from leaderless.config import nearest
from leaderless.embodied.policies.vision_towers import TOWERS, Tower


@dataclass(frozen=True)
class VlaConfig:
    """Contents of the `config.json` of a checkpoint.

    Attributes:
        towers: Names of the towers.
        image_size: Side of the images that they see.
        text: Sizes of the Llama.
        num_padded: Rows of its table of words that no word has.
        statistics: Statistics of actions, by dataset.
    """

    towers: tuple[str, ...]
    image_size: int
    text: LlamaConfig
    num_padded: int
    statistics: Json

    @property
    def num_words(self) -> int:
        """Size of the vocabulary; its last ids stand for bins of actions."""
        return int(self.text.vocab_size) - self.num_padded

    @classmethod
    def read(cls, folder: Path) -> VlaConfig:
        """Read a configuration.

        Raises:
            ValueError: There is none, or it is of another model.
        """
        file = folder / "config.json"
        try:
            about = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"path='{folder}': its config.json cannot be read: {error}") from error
        names = about.get("timm_model_ids", []) if isinstance(about, dict) else []
        if not names:
            raise ValueError(f"path='{folder}': its config.json is not that of an OpenVLA, which has timm_model_ids")
        if unknown := [name for name in names if name not in TOWERS]:
            raise ValueError(f"path='{folder}': unknown tower '{unknown[0]}'{nearest(unknown[0], TOWERS)}")
        if len({*about["image_sizes"]}) != 1:
            raise ValueError(f"path='{folder}': image_sizes={about['image_sizes']}: both towers must see one size")
        text = LlamaConfig(**{key: value for key, value in about["text_config"].items() if key != "model_type"})
        return cls(
            tuple(names),
            int(about["image_sizes"][0]),
            text,
            int(about.get("pad_to_multiple_of", 64)),
            cast("Json", about.get("norm_stats", {})),
        )


class _Vision(nn.Module):
    """Features of all towers, next to each other."""

    def __init__(self, config: VlaConfig) -> None:
        super().__init__()
        self.featurizer = Tower(TOWERS[config.towers[0]], config.image_size)
        self.fused_featurizer = Tower(TOWERS[config.towers[1]], config.image_size) if len(config.towers) > 1 else None

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self.featurizer(images)
        return found if self.fused_featurizer is None else torch.cat([found, self.fused_featurizer(images)], dim=2)


class _Projector(nn.Module):
    """Features of patches as words."""

    def __init__(self, width: int, hidden_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, 4 * width)
        self.fc2 = nn.Linear(4 * width, hidden_size)
        self.fc3 = nn.Linear(hidden_size, hidden_size)

    def forward(self, features: Tensor) -> Tensor:
        found: Tensor = self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(features)))))
        return found


@dataclass(frozen=True)
class PrismaticPrefix:
    """Prefix of the actions: the first word, the patches, the other words.

    Attributes:
        embeddings: [n, length, hidden_size].
        places: [n, length] int64, position of each; after the last word, the first action's.
        is_real: [n, length] bool, whether there is anything.
        last: [n] int64, index of the last word.
        lengths: [n] int64, number of real places.
    """

    embeddings: Tensor
    places: Tensor
    is_real: Tensor
    last: Tensor
    lengths: Tensor


class Prismatic(nn.Module):
    """The whole model."""

    def __init__(self, config: VlaConfig) -> None:
        super().__init__()
        self.vision_backbone = _Vision(config)
        width = sum(TOWERS[name].width for name in config.towers)
        self.projector = _Projector(width, int(config.text.hidden_size))
        self.language_model = LlamaForCausalLM(config.text)

    def prefix(self, images: Sequence[Tensor], ids: Tensor, lengths: Tensor) -> PrismaticPrefix:
        """Embed what is seen and said.

        Args:
            images: [n, 3, size, size] float32 of each camera.
            ids: [n, longest] int64, instructions; the first id begins every text.
            lengths: [n] int64, at least 1.
        """
        dtype = self.projector.fc1.weight.dtype
        seen = torch.cat([self.projector(self.vision_backbone(one.to(dtype))) for one in images], dim=1)
        words = self.language_model.get_input_embeddings()(ids)
        embeddings = torch.cat([words[:, :1], seen, words[:, 1:]], dim=1)
        total = lengths + seen.shape[1]
        index = torch.arange(embeddings.shape[1], device=ids.device).expand(len(ids), -1)
        return PrismaticPrefix(
            embeddings, torch.minimum(index, total[:, None]), index < total[:, None], total - 1, lengths=total
        )

    def logits(self, hidden: Tensor, num_words: int, num_bins: int) -> Tensor:
        """Logits of bins, of which the first one is the last word: [..., num_bins] float32."""
        logits: Tensor = self.language_model.lm_head(hidden)
        return logits[..., num_words - num_bins : num_words].flip(-1).float()


UNUSED = re.compile(
    r"vision_backbone\.(fused_)?featurizer\.(norm\.|attn_pool\.|blocks\.(?P<block>\d+)\.)|.*rotary_emb\.inv_freq$"
)
"""Weights of checkpoints on which nothing depends; of blocks, only the last."""


def _is_unused(name: str, config: VlaConfig) -> bool:
    found = UNUSED.match(name)
    if found is None:
        return False
    if found["block"] is None:
        return True
    tower = TOWERS[config.towers[1 if found[1] else 0]]
    return int(found["block"]) == tower.depth - 1


def load_prismatic(model: Prismatic, config: VlaConfig, folder: Path) -> None:
    """Load a checkpoint.

    Raises:
        ValueError: A weight is missing, has another shape, or is not one of the model.
    """
    wanted: Mapping[str, nn.Parameter] = dict(model.named_parameters())
    missing = set(wanted)
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no mapping)
                if _is_unused(name, config):
                    continue
                if name not in wanted:
                    raise ValueError(f"path='{folder}': it has a weight '{name}' that OpenVLA does not have")
                shape = tuple(tensors.get_slice(name).get_shape())
                if shape != tuple(wanted[name].shape):
                    raise ValueError(
                        f"path='{folder}': weight '{name}' has the shape {shape}, but its config.json says "
                        f"{tuple(wanted[name].shape)}"
                    )
                with torch.no_grad():
                    wanted[name].copy_(tensors.get_tensor(name))
                missing.discard(name)
    if missing:
        raise ValueError(f"path='{folder}': it lacks {len(missing)} weights, such as '{min(missing)}'")
