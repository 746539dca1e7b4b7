"""How families of models read images: the tokens that they become in prompts, and the pixels that models compute with.

`transformers` does this with processors that need torchvision, which is done without here.
"""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoImageProcessor, PreTrainedConfig
from transformers.image_processing_backends import PilBackend
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)
from typing_extensions import override

from leaderless.base.image_files import decode_image
from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.prompts.encode import Tokenizer
from leaderless.data.prompts.images import ImageReader, PromptImage
from leaderless.data.sources.hub import explained, unreachable_hub
from leaderless.models.loading.support import check_family, image_tokens, sees_images
from leaderless.models.uploads import placed

ENDS = "cu_"
"""Beginning of the names of what the host reads: where the patches end that attend to one another."""
KEPT_BYTES = 256 << 20
"""Pixels that a model keeps of the images that it has read last: the images of a step are needed by several passes."""


def patches_of(tower: nn.Module, grids: Tensor) -> dict[str, Tensor]:
    """Arguments of one of Qwen's towers in place of what it would compute of [images, 3] grids, on the host.

    It would compute them on the device, and read them back to cut the attention of each layer, for which the host would
    wait.
    """
    merged = cast("int", tower.spatial_merge_size)
    found = {"position_ids": get_vision_position_ids(grids, merged), "cu_seqlens": get_vision_cu_seqlens(grids)}
    if hasattr(tower, "num_grid_per_side"):  # positions that are learned for a square
        found["interp_indices"], found["interp_weights"] = get_vision_interpolation_indices_and_weights(
            grids,
            num_grid_per_side=tower.num_grid_per_side,
            mode=tower.interpolation_mode,
            align_corners=tower.interpolation_align_corners,
            spatial_merge_size=merged,
        )
    if hasattr(tower, "window_size"):
        found["window_index"], found["cu_window_seqlens"] = get_vision_window_index(
            grids, merged, window_size=tower.window_size, patch_size=tower.patch_size
        )
    return found


def placed_patches(patches: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The same on a device, but for what the host reads; see `placed`."""
    return {name: one if name.startswith(ENDS) else placed(one, device) for name, one in patches.items()}


@dataclass(frozen=True)
class Pixels:
    """Images of a pass, as the part of a model that sees takes them.

    Attributes:
        values: [p, values of a patch] float32, image by image; or [images, 3, height, width].
        grids: [images, 3] int64: frames, rows and columns of patches; [0] where all images have the same.
        places: [n] int64, tokens of the pass, or of a rank's part of it, that stand for parts of the images.
        read: [n] int64, the numbers of these parts among the parts of all images; None if they are all, in their order.
        patches: Numbers that the tower needs of the grids; see `patches_of`.
    """

    values: Tensor
    grids: Tensor
    places: Tensor
    read: Tensor | None = None
    patches: Mapping[str, Tensor] = field(default_factory=dict)

    def to(self, device: torch.device) -> Pixels:
        """The same on a device, but for the grids, which the host reads; see `placed`."""
        values, places = placed(self.values, device), placed(self.places, device)
        read = None if self.read is None else placed(self.read, device)
        return Pixels(values, self.grids, places, read, placed_patches(self.patches, device))


class FamilyImageReader(ImageReader):
    """How a model reads images; see `ImageReader`. Ranks without its weights need it, too.

    Attributes:
        has_grid: Whether the positions of an image's tokens have a row and a column.
    """

    has_grid: bool

    def __init__(self, processor: PilBackend, described: PreTrainedConfig) -> None:
        self.processor = processor
        self.token: int = described.image_token_id
        self.reserved = image_tokens(described)
        ends = (getattr(described, f"vision_{end}_token_id", None) for end in ("start", "end"))
        start, end = ([] if one is None else [one] for one in ends)
        self._marks = [*start, self.token, *end]
        self.fingerprint = hashlib.sha256(f"{self.token} {processor.to_json_string()}".encode()).hexdigest()
        self._kept: OrderedDict[bytes, tuple[Tensor, Tensor]] = OrderedDict()
        self._num_kept_bytes = 0

    def named(self, tokenizer: Tokenizer) -> FamilyImageReader:
        """The same with the marker as the tokenizer writes it."""
        self.marker = tokenizer.decode(self._marks)
        return self

    def _read(self, data: bytes) -> tuple[Tensor, Tensor]:
        """Pixels and grid of an image."""
        read = self.processor(images=[decode_image(data)], return_tensors="pt")
        return read["pixel_values"], read.get("image_grid_thw", torch.zeros(0, dtype=torch.int64))

    def _known(self, data: bytes) -> tuple[Tensor, Tensor]:
        """The same, kept for the next passes; what has not been needed for longest is forgotten."""
        if data in self._kept:
            self._kept.move_to_end(data)
            return self._kept[data]
        found = self._kept[data] = self._read(data)
        self._num_kept_bytes += found[0].nbytes
        while self._num_kept_bytes > KEPT_BYTES:
            _, (values, _) = self._kept.popitem(last=False)
            self._num_kept_bytes -= values.nbytes
        return found

    @abstractmethod
    def _num_tokens(self, values: Tensor, grid: Tensor) -> int:
        """Number of tokens that the model gives to an image."""

    def pixels(self, images: Sequence[PromptImage]) -> Pixels:
        """The images of a pass.

        Raises:
            RuntimeError: An image has another number of tokens than in its prompt.
        """
        values, grids = zip(*(self._known(image.data) for image in images), strict=True)
        for image, *read in zip(images, values, grids, strict=True):
            if (found := self._num_tokens(*read)) != image.num_tokens:
                raise RuntimeError(f"an image has {image.num_tokens} tokens in its prompt, but the model gives {found}")
        places = torch.cat([torch.arange(image.place, image.place + image.num_tokens) for image in images])
        return Pixels(torch.cat(values), torch.cat(grids), places)

    @override
    def arranged(self, tokens: list[int]) -> list[int]:
        """The prompt as it is; most families take images anywhere."""
        return tokens

    @abstractmethod
    def blank(self) -> Pixels:
        """An image that no token stands for. All ranks compute all layers, also those without images."""


class QwenReader(FamilyImageReader):
    """Images of any size, in patches of which four or so make a token (arXiv 2409.12191)."""

    processor: Qwen2VLImageProcessorPil
    has_grid = True

    @override
    def grid(self, height: int, width: int) -> tuple[int, int]:
        size, factor = self.processor.size, self.processor.patch_size * self.processor.merge_size
        limits = {"min_pixels": size["shortest_edge"], "max_pixels": size["longest_edge"]}
        try:
            high, wide = smart_resize(height, width, factor, **limits)
        except ValueError as error:
            raise ValueError(f"an image of {width} x {height} pixels does not suit the model: {error}") from error
        return high // factor, wide // factor

    @override
    def _num_tokens(self, values: Tensor, grid: Tensor) -> int:
        merged: int = self.processor.merge_size
        return int(grid.prod()) // merged**2

    @override
    def blank(self) -> Pixels:
        side = self.processor.merge_size
        width = self.processor.patch_size**2 * 3 * self.processor.temporal_patch_size
        grid = torch.tensor([[1, side, side]])
        return Pixels(torch.zeros(side * side, width), grid, torch.zeros(0, dtype=torch.int64))


class SquareReader(FamilyImageReader):
    """Images that are all brought to one size, with the same number of tokens each, as in LLaVA (arXiv 2304.08485)."""

    has_grid = False

    def __init__(self, processor: PilBackend, described: PreTrainedConfig) -> None:
        super().__init__(processor, described)
        vision = described.vision_config
        self._side: int = vision.image_size
        has_class = vision.model_type == "clip_vision_model"
        # It leaves out what comes first: the class or, in a tower without one, a patch.
        leaves_first = getattr(described, "vision_feature_select_strategy", None) == "default"
        self._count = (self._side // vision.patch_size) ** 2 + has_class - leaves_first

    @override
    def grid(self, height: int, width: int) -> tuple[int, int]:
        return 1, self._count

    @override
    def _num_tokens(self, values: Tensor, grid: Tensor) -> int:
        return self._count if values.shape[-2:] == (self._side, self._side) else 0

    @override
    def blank(self) -> Pixels:
        none = torch.zeros(0, dtype=torch.int64)
        return Pixels(torch.zeros(1, 3, self._side, self._side), none, none)


class PaliGemmaReader(SquareReader):
    """Images ahead of all text, then the token that begins a text, the text, and a line break (arXiv 2407.07726)."""

    _first: int | None = None
    _line_break: Sequence[int] = ()

    @override
    def named(self, tokenizer: Tokenizer) -> FamilyImageReader:
        self._first, self._line_break = tokenizer.bos_token_id, tokenizer.encode("\n", add_special_tokens=False)
        return super().named(tokenizer)

    @override
    def arranged(self, tokens: list[int]) -> list[int]:
        text = [token for token in tokens if token != self.token]
        num_images = len(tokens) - len(text)
        begin = int(tokens[:1] == [self._first] and self._first is not None)
        if any(token != self.token for token in tokens[begin : begin + num_images]):
            raise ValueError("an image stands behind text: models of type paligemma have images first, then text")
        if self._first is not None and text[:1] != [self._first]:
            text = [self._first, *text]
        end = list(self._line_break)
        return [self.token] * num_images + text + (end if text[len(text) - len(end) :] != end else [])


def open_reader(config: ModelConfig, role: str, tokenizer: Tokenizer | None = None) -> FamilyImageReader:
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
        problem = f"the image processor of '{config.path}' cannot be loaded: {explained(error, unreachable)}"
        raise RecipeError.at(key, problem) from error
    kind = {"llava": SquareReader, "paligemma": PaliGemmaReader}.get(described.model_type, QwenReader)
    if not isinstance(processor, Qwen2VLImageProcessorPil if kind is QwenReader else PilBackend):
        raise RecipeError.at(key, f"'{config.path}' has a {type(processor).__name__}, which is not supported")
    reader = kind(processor, described)
    return reader if tokenizer is None else reader.named(tokenizer)
