"""Language models and value models that see images.

A prompt has one token for each part of an image; the part of the model that sees computes what stands in place of its
embedding. In Qwen's families, the position of such a token has three numbers, time, row and column, and text counts on
behind an image by the longer one of its sides; see `grid_positions`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from typing_extensions import override

from leaderless.data.prompts.images import PromptImage
from leaderless.models.attention.blocks import Repeats
from leaderless.models.attention.packed import Attention
from leaderless.models.attention.shared_prompts import Family
from leaderless.models.causal_lm import CausalLM
from leaderless.models.decoder import Decoder
from leaderless.models.loading.support import reads_both_ways
from leaderless.models.uploads import one_copy
from leaderless.models.value_model import ValueModel
from leaderless.models.vision.image_readers import FamilyImageReader, Pixels, patches_of
from leaderless.models.vision.mrope import ImagePositions, grid_positions
from leaderless.planner.memory.layers import TOWERS

ADDING = "_deepstack_process"
"""Method of text models to which more is seen than what they embed; it adds that behind layers."""
IMPOSSIBLE = -1e9
"""Logit of a token that is never drawn: its probability is 0, and no number becomes infinite."""


class VisionDecoder(Decoder):
    """A decoder that sees images, with any head."""

    def __init__(self, model: PreTrainedModel, reader: FamilyImageReader, *, freezes_vision: bool = False) -> None:
        super().__init__(model)
        self.reader, self._freezes_vision = reader, freezes_vision
        if hasattr(self.text_model, ADDING):
            setattr(self.text_model, ADDING, partial(_add_seen, getattr(self.text_model, ADDING)))

    @property
    @override
    def has_grid(self) -> bool:
        return self.reader.has_grid

    @property
    @override
    def reads_both_ways(self) -> bool:
        return reads_both_ways(self.model.config)

    @property
    @override
    def text_model(self) -> nn.Module:
        return cast("nn.Module", self.model.base_model.language_model)

    @override
    def pixels(
        self,
        images: Sequence[PromptImage],
        tokens: Tensor,
        origin_of: Callable[[int], tuple[str, range]] | None = None,
    ) -> Pixels:
        pixels = self._read(images)
        places = (tokens == self.reader.token).nonzero().squeeze(1)
        if not torch.equal(places, pixels.places):
            wrong = min({*places.tolist()} ^ {*pixels.places.tolist()}, default=0)
            name, own = ("a pass", range(len(tokens))) if origin_of is None else origin_of(wrong)
            found, seen = (sum(place in own for place in one.tolist()) for one in (places, pixels.places))
            num_images = sum(image.place in own for image in images)
            raise RuntimeError(
                f"{name} has {found} tokens that stand for parts of images, but its {num_images} images have {seen}, "
                "or have them elsewhere"
            )
        return pixels

    def _read(self, images: Sequence[PromptImage]) -> Pixels:
        """The pixels of images, with what the tower has to know of them."""
        pixels = self.reader.pixels(images) if images else self.reader.blank()
        if not self.has_grid:
            return pixels
        return replace(pixels, patches=patches_of(self.model.base_model.visual, pixels.grids))

    @override
    def positions(self, positions: Tensor, families: Sequence[Family], images: Sequence[PromptImage]) -> Tensor:
        return grid_positions(positions, families, images) if images and self.has_grid else positions

    def see(self, pixels: Pixels) -> ImagePositions:
        """Compute what stands in place of the tokens of images."""
        tower = self.model.base_model
        grids = (pixels.grids,) if self.has_grid else ()
        output = tower.get_image_features(pixels.values, *grids, **pixels.patches, return_dict=True)
        embeddings, *added = (
            torch.cat(list(one)) for one in (output.pooler_output, *(getattr(output, "deepstack_features", None) or ()))
        )
        if pixels.read is not None:  # other ranks have the other tokens
            embeddings, *added = (one.index_select(0, pixels.read) for one in (embeddings, *added))
        return ImagePositions(pixels.places, embeddings, added)

    @override
    def hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor | Repeats,
        images: Pixels | ImagePositions | None = None,
    ) -> Tensor:
        # A later stage of a pipeline takes hidden states, to which what is seen has been added.
        is_later = tokens.is_floating_point()
        assert not (is_later and images is not None)
        embeddings = tokens if is_later else cast("nn.Module", self.text_model.embed_tokens)(tokens)
        seen = self.see(images) if isinstance(images, Pixels) else images
        inputs: dict[str, object] = {}
        if seen is not None and len(seen.places):
            embeddings = seen.embed(embeddings)
            if seen.added:
                inputs = {"visual_pos_masks": seen.places, "deepstack_visual_embeds": list(seen.added)}
        elif seen is not None:
            # What is not seen takes part without an effect, so that its weights have a gradient on every rank.
            embeddings = embeddings + 0.0 * sum(one.sum() for one in (seen.embeddings, *seen.added))
        if positions.ndim == 1 and self.has_grid:
            positions = torch.stack([positions] * 3)
        inputs["inputs_embeds"] = embeddings.unsqueeze(0)
        return self.pass_layers(inputs, positions, attention, select)

    @override
    def is_frozen(self, name: str) -> bool:
        return (self._freezes_vision and name.startswith(TOWERS)) or super().is_frozen(name)

    @override
    def write_description(self, folder: Path) -> None:
        super().write_description(folder)
        self.reader.processor.save_pretrained(folder)


def _add_seen(by_mask: Callable[..., Tensor], hidden: Tensor, where: Tensor, added: Tensor) -> Tensor:
    """Add what is seen to [1, T, hidden_size] behind a layer, at [n] places; at the places of a mask as the model does.

    To find the places of a mask, the host would wait for the device.
    """
    if where.dtype == torch.bool:
        return by_mask(hidden, where, added)
    return hidden.index_add(1, where, added.to(hidden.dtype).unsqueeze(0))


class VisionLM(VisionDecoder, CausalLM):
    """A language model that sees images."""

    def __init__(self, model: PreTrainedModel, reader: FamilyImageReader, *, freezes_vision: bool = False) -> None:
        super().__init__(model, reader, freezes_vision=freezes_vision)
        # Sampled or scored, such tokens are impossible: the next pass would take them for parts of images.
        offsets = torch.zeros(self.vocab_size)
        offsets[sorted(reader.reserved)] = IMPOSSIBLE
        self.register_buffer("_offsets", offsets, persistent=False)

    @property
    @override
    def offsets(self) -> Tensor | None:
        return cast("Tensor", self._offsets)

    @override
    def check_images(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> None:
        own = [place for image in images for place in range(image.place, image.place + image.num_tokens)]
        found = [place for place, token in enumerate(tokens) if token == self.reader.token]
        if found != own:
            raise ValueError(
                f"a prompt has {len(found)} tokens that stand for parts of images, but its {len(images)} images have "
                f"{len(own)}, or have them elsewhere: leave such marks out of texts, or name the column of the images "
                "in data.train.images"
            )

    @override
    def seen(self, images: Sequence[PromptImage], device: torch.device) -> ImagePositions:
        with one_copy(device):
            pixels = self._read(images).to(device)
        return self.see(pixels)


class VisionValueModel(VisionDecoder, ValueModel):
    """A value model that sees images."""
