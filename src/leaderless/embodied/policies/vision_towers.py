"""Vision towers of OpenVLA: DINOv2 and SigLIP, whose features of patches lie next to each other.

Weights have the names that published checkpoints have, as in `timm`, so that nothing has to be converted.
Features are those before the last block, so the last block, the norm after it and SigLIP's pooling do not exist here.
Source: Prismatic VLMs, arXiv 2402.07865.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn import functional

from leaderless.models.uploads import constants


@dataclass(frozen=True)
class TowerShape:
    """Sizes of a tower.

    Attributes:
        width: Features of a patch.
        depth: Blocks that the published tower has.
        num_heads: Heads of its attention.
        mlp_size: Width within its blocks.
        num_extra: Tokens ahead of the patches: one for the class and some registers, or none.
        has_scales: Whether blocks scale what they add.
        means: Average colors for which it was trained.
        deviations: Standard deviations of these colors.
        patch: Pixels of a side of a patch.
    """

    width: int
    depth: int
    num_heads: int
    mlp_size: int
    num_extra: int
    has_scales: bool
    means: tuple[float, float, float]
    deviations: tuple[float, float, float]
    patch: int = 14


_IMAGENET = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_HALF = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
TOWERS: Mapping[str, TowerShape] = MappingProxyType(
    {
        "vit_large_patch14_reg4_dinov2.lvd142m": TowerShape(1024, 24, 16, 4096, 5, True, *_IMAGENET),
        "vit_so400m_patch14_siglip_224": TowerShape(1152, 27, 16, 4304, 0, False, *_HALF),
        # Small ones of the same kinds, for tests and examples.
        "tiny_dinov2": TowerShape(16, 3, 2, 32, 5, True, *_IMAGENET),
        "tiny_siglip": TowerShape(24, 2, 2, 40, 0, False, *_HALF),
    }
)
"""Towers by the names that configurations give them."""


class _Attention(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self._num_heads = shape.num_heads
        self.qkv, self.proj = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        parts = self.qkv(x).view(n, length, 3, self._num_heads, width // self._num_heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2])
        found: Tensor = self.proj(mixed.transpose(1, 2).reshape(n, length, width))
        return found


class _Mlp(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(shape.width, shape.mlp_size), nn.Linear(shape.mlp_size, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.fc2(functional.gelu(self.fc1(x)))
        return found


class _Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.full((width,), 1e-5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Block(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(shape.width, eps=1e-6), _Attention(shape)
        self.norm2, self.mlp = nn.LayerNorm(shape.width, eps=1e-6), _Mlp(shape)
        self.ls1 = _Scale(shape.width) if shape.has_scales else nn.Identity()
        self.ls2 = _Scale(shape.width) if shape.has_scales else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        found: Tensor = x + self.ls2(self.mlp(self.norm2(x)))
        return found


class _Patches(nn.Module):
    def __init__(self, shape: TowerShape) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, shape.width, shape.patch, stride=shape.patch)

    def forward(self, pixels: Tensor) -> Tensor:
        found: Tensor = self.proj(pixels).flatten(2).transpose(1, 2)
        return found


class Tower(nn.Module):
    """Features [n, patches, width] of images [n, 3, size, size] with colors from 0 to 1."""

    def __init__(self, shape: TowerShape, image_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.patch_embed = _Patches(shape)
        self.pos_embed = nn.Parameter(torch.randn(1, (image_size // shape.patch) ** 2, shape.width) * 0.02)
        if shape.num_extra:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, shape.width))
            self.reg_token = nn.Parameter(torch.zeros(1, shape.num_extra - 1, shape.width))
        self.blocks = nn.ModuleList(_Block(shape) for _ in range(shape.depth - 1))

    def forward(self, images: Tensor) -> Tensor:
        """See the class."""
        means, deviations = (
            one.to(images.dtype)[:, None, None] for one in constants(images, self.shape.means, self.shape.deviations)
        )
        x: Tensor = self.patch_embed((images - means) / deviations) + self.pos_embed
        if self.shape.num_extra:
            extra = torch.cat([self.cls_token, self.reg_token], dim=1)
            x = torch.cat([extra.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            x = block(x)
        return x[:, self.shape.num_extra :]


def sized(images: Tensor, image_size: int, *, crop_share: float = 1.0) -> Tensor:
    """Images [n, height, width, 3] uint8 as [n, 3, size, size] float32 from 0 to 1.

    Only a share of the area, in the middle, is kept. Deviation from the published preprocessing: bicubic filters
    throughout, and no compression as JPEG in between.
    """
    pixels = images.permute(0, 3, 1, 2).float() / 255
    pixels = _resized(pixels, image_size)
    if crop_share < 1.0:
        side = max(1, round(image_size * crop_share**0.5))
        first = (image_size - side) // 2
        pixels = _resized(pixels[:, :, first : first + side, first : first + side], image_size)
    return pixels


def _resized(pixels: Tensor, image_size: int) -> Tensor:
    if pixels.shape[2:] == (image_size, image_size):
        return pixels
    size = (image_size, image_size)
    return functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False).clamp(0, 1)


def fitted(images: Tensor, image_size: int, mode: str = "bicubic") -> Tensor:
    """Images [n, height, width, 3] uint8 as [n, 3, size, size] float32 from 0 to 1: whole, with black borders."""
    pixels = images.permute(0, 3, 1, 2).float() / 255
    height, width = pixels.shape[2:]
    scale = image_size / max(height, width)
    size = max(1, round(height * scale)), max(1, round(width * scale))
    if size != (height, width):
        pixels = functional.interpolate(pixels, size, mode=mode, antialias=True, align_corners=False).clamp(0, 1)
    above, left = (image_size - size[0]) // 2, (image_size - size[1]) // 2
    return functional.pad(pixels, (left, image_size - size[1] - left, above, image_size - size[0] - above))
