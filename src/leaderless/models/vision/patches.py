"""Facts about the patches of images for a vision tower, computed on the host.

The towers of `transformers` compute it from the sizes of images on the device, and read it back to cut the attention of
each layer, for which the host would wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn
from transformers.vision_utils import (
    get_vision_cu_seqlens,
    get_vision_interpolation_indices_and_weights,
    get_vision_position_ids,
    get_vision_window_index,
)

from leaderless.models.uploads import placed

ENDS = "cu_"
"""Beginning of the names of what the host reads: where the patches end that attend to one another."""


def patches_of(tower: nn.Module, grids: Tensor) -> dict[str, Tensor]:
    """Arguments of one of Qwen's towers in place of what it would compute of [images, 3] grids, on the host."""
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
