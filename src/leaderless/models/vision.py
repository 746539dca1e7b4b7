"""Language models that see images: Qwen's families of vision-language models.

A prompt has one token for each part of an image; the vision tower computes what stands in place of its embedding. The
position of such a token has three numbers, time, row and column; text counts on behind an image by the longer one of
its sides. `transformers` computes this with processors that need torchvision, which is done without here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.encode import Tokenizer
from leaderless.data.hub import unreachable_hub
from leaderless.data.images import ImageReader, PromptImage, decode_image
from leaderless.models.attention import Attention, check_window
from leaderless.models.causal_lm import CausalLM
from leaderless.models.seen import Seen, grid_positions
from leaderless.models.shared_prompts import Family
from leaderless.models.support import check_family, image_tokens, sees_images

IMPOSSIBLE = -1e9
"""Logit of a token that is never drawn: its probability is 0, and no number becomes infinite."""
TOWER = "model.visual."
"""How the names of the weights begin that see."""
KEPT_IMAGES = 256
"""Images of which a process keeps the pixels: those of a step are needed by several passes."""


@dataclass(frozen=True)
class Pixels:
    """Images of a pass, as the vision tower takes them.

    Attributes:
        patches: [p, values of a patch] float32, image by image.
        grids: [images, 3] int64: frames, rows and columns of patches.
        places: [n] int64, tokens of the pass that stand for parts of the images.
    """

    patches: Tensor
    grids: Tensor
    places: Tensor

    def to(self, device: torch.device) -> Pixels:
        """The same on a device."""
        return Pixels(self.patches.to(device), self.grids.to(device), self.places.to(device))


class QwenReader(ImageReader):
    """How a model reads images; see `ImageReader`. Ranks without its weights need it, too."""

    def __init__(self, processor: Qwen2VLImageProcessorPil, described: PreTrainedConfig) -> None:
        self.processor = processor
        self.token: int = described.image_token_id
        self.reserved = image_tokens(described)
        ends = (getattr(described, f"vision_{end}_token_id", None) for end in ("start", "end"))
        start, end = ([] if one is None else [one] for one in ends)
        self._marks = [*start, self.token, *end]
        self.fingerprint = hashlib.sha256(f"{self.token} {processor.to_json_string()}".encode()).hexdigest()
        self._pixels = lru_cache(KEPT_IMAGES)(self._read)

    def named(self, tokenizer: Tokenizer) -> QwenReader:
        """The same with the marker as the tokenizer writes it."""
        self.marker = tokenizer.decode(self._marks)
        return self

    @override
    def grid(self, height: int, width: int) -> tuple[int, int]:
        size, factor = self.processor.size, self.processor.patch_size * self.processor.merge_size
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        try:
            high, wide = smart_resize(height, width, factor, **limits)
        except ValueError as error:
            raise ValueError(f"an image of {width} x {height} pixels does not suit the model: {error}") from error
        return high // factor, wide // factor

    def _read(self, data: bytes) -> tuple[Tensor, Tensor]:
        read = self.processor(images=[decode_image(data)], return_tensors="pt")
        return read["pixel_values"], read["image_grid_thw"]

    def pixels(self, images: Sequence[PromptImage]) -> Pixels:
        """The images of a pass.

        Args:
            images: Images in the order of their tokens.

        Raises:
            RuntimeError: An image has another number of tokens than in its prompt.
        """
        patches, grids = zip(*(self._pixels(image.data) for image in images), strict=True)
        for image, grid in zip(images, grids, strict=True):
            found = int(grid.prod()) // self.processor.merge_size**2
            if found != image.num_tokens:
                raise RuntimeError(f"an image has {image.num_tokens} tokens in its prompt, but the model gives {found}")
        places = torch.cat([torch.arange(image.place, image.place + image.num_tokens) for image in images])
        return Pixels(torch.cat(patches), torch.cat(grids), places)

    def blank(self) -> Pixels:
        """An image that no token stands for. All ranks compute all layers, also those without images."""
        side = self.processor.merge_size
        width = self.processor.patch_size**2 * 3 * self.processor.temporal_patch_size
        return Pixels(
            torch.zeros(side * side, width), torch.tensor([[1, side, side]]), torch.zeros(0, dtype=torch.int64)
        )


def open_reader(config: ModelConfig, role: str, tokenizer: Tokenizer | None = None) -> QwenReader:
    """Open what a model says of images.

    Args:
        config: Settings of the model.
        role: Its role, for errors.
        tokenizer: Its tokenizer, where the marker is needed.

    Raises:
        RecipeError: It reads text alone, is not supported, or lacks the settings of its images.
    """
    key, unreachable = f"models.{role}", unreachable_hub(config.path)
    try:
        described = AutoConfig.from_pretrained(config.path, revision=config.revision)
        check_family(described, key)
        if not sees_images(described):
            raise RecipeError.at(
                key, f"models of type {described.model_type} read text alone: choose one that sees images, as qwen3_vl"
            )
        processor = AutoImageProcessor.from_pretrained(config.path, revision=config.revision, backend="pil")
    except RecipeError:
        raise
    except Exception as error:
        # `transformers` raises errors of every kind for damaged folders.
        raise RecipeError.at(
            key, f"the image processor of '{config.path}' cannot be loaded: {error}{unreachable}"
        ) from error
    if not isinstance(processor, Qwen2VLImageProcessorPil):
        raise RecipeError.at(key, f"'{config.path}' has a {type(processor).__name__}, which is not supported")
    reader = QwenReader(processor, described)
    return reader if tokenizer is None else reader.named(tokenizer)


class VisionLM(CausalLM):
    """A language model that sees images."""

    def __init__(self, model: PreTrainedModel, reader: QwenReader, *, freezes_vision: bool = False) -> None:
        super().__init__(model)
        self.reader, self._freezes_vision = reader, freezes_vision
        # Sampled or scored, such tokens are impossible: the next pass would take them for parts of images.
        offsets = torch.zeros(self.vocab_size)
        offsets[sorted(reader.reserved)] = IMPOSSIBLE
        self.register_buffer("_offsets", offsets, persistent=False)

    @property
    def text_model(self) -> nn.Module:
        """See `Decoder`."""
        return cast("nn.Module", self.model.base_model.language_model)

    @property
    def offsets(self) -> Tensor | None:
        """See `CausalLM`."""
        return cast("Tensor", self._offsets)

    def pixels(self, images: Sequence[PromptImage], tokens: Tensor) -> Pixels:
        """See `CausalLM`."""
        pixels = self.reader.pixels(images) if images else self.reader.blank()
        places = (tokens == self.reader.token).nonzero().squeeze(1)
        if not torch.equal(places, pixels.places):
            raise RuntimeError(
                f"a pass has {len(places)} tokens that stand for parts of images, but its {len(images)} images have "
                f"{len(pixels.places)}, or have them elsewhere"
            )
        return pixels

    @override
    def seen(self, images: Sequence[PromptImage], device: torch.device) -> Seen:
        return self.see(self.reader.pixels(images).to(device))

    def positions(self, positions: Tensor, families: Sequence[Family], images: Sequence[PromptImage]) -> Tensor:
        """See `CausalLM`."""
        return torch.stack([positions] * 3) if not images else grid_positions(positions, families, images)

    def see(self, pixels: Pixels) -> Seen:
        """Compute what stands in place of the tokens of images."""
        tower = self.model.base_model
        output = tower.get_image_features(pixels.patches, pixels.grids, return_dict=True)
        return Seen(
            pixels.places,
            torch.cat(output.pooler_output),
            [torch.cat(one) for one in getattr(output, "deepstack_features", None) or ()],
        )

    @override
    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor,
        images: Pixels | Seen | None = None,
    ) -> Tensor:
        check_window(self._sliding_window, attention)
        text = self.text_model
        embeddings = cast("nn.Module", text.embed_tokens)(tokens)
        seen = self.see(images) if isinstance(images, Pixels) else images
        options: dict[str, object] = {}
        if seen is not None and len(seen.places):
            embeddings = seen.embed(embeddings)
            if seen.added:
                is_seen = torch.zeros_like(tokens, dtype=torch.bool).index_fill_(0, seen.places, value=True)
                options = {"visual_pos_masks": is_seen.unsqueeze(0), "deepstack_visual_embeds": list(seen.added)}
        elif seen is not None:
            # What is not seen takes part without an effect, so that its weights have a gradient on every rank.
            embeddings = embeddings + 0.0 * sum(one.sum() for one in (seen.embeddings, *seen.added))
        if positions.ndim == 1:
            positions = torch.stack([positions] * 3)
        output = text(
            inputs_embeds=embeddings.unsqueeze(0),
            position_ids=positions.unsqueeze(1),
            use_cache=False,
            attention=attention,
            **options,
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0).index_select(0, select)
        return hidden

    @override
    def is_frozen(self, name: str) -> bool:
        return self._freezes_vision and name.startswith(TOWER)

    @override
    def write_description(self, folder: Path) -> None:
        super().write_description(folder)
        self.reader.processor.save_pretrained(folder)
