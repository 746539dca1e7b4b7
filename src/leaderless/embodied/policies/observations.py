"""Observations of bodies, between the columns of a batch and the form that policies take."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless.embodied.simulators.protocol import Spaces

TYPICAL_INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"
"""Instruction by which sizes are measured: one of LIBERO's longer ones."""


def frame_bytes(spaces: Spaces) -> int:
    """Bytes of the pixels of all cameras."""
    return sum(height * width * 3 for height, width in spaces.images.values())


def images_of(pixels: Tensor, spaces: Spaces) -> dict[str, Tensor]:
    """The images of each camera, [n, height, width, 3] uint8, from all pixels, [n, bytes] uint8."""
    sizes = [height * width * 3 for height, width in spaces.images.values()]
    parts = torch.split(pixels, sizes, dim=1) if sizes else ()
    return {
        camera: part.reshape(len(pixels), height, width, 3)
        for (camera, (height, width)), part in zip(spaces.images.items(), parts, strict=True)
    }


def padded(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Instructions as ids [n, longest] int64, padded with 0, and their lengths [n] int64."""
    lengths = torch.tensor([len(row) for row in ids], dtype=torch.int64)
    table = torch.zeros(len(ids), max([1, *map(len, ids)]), dtype=torch.int64)
    if values := [value for row in ids for value in row]:  # at once: a tensor for each row takes longer than a network
        table[torch.arange(table.shape[1]) < lengths[:, None]] = torch.tensor(values, dtype=torch.int64)
    return table.to(device), lengths.to(device)


def chosen_cameras(spaces: Spaces, cameras: list[str] | None) -> list[str]:
    """The cameras that a model sees by; all by default.

    Raises:
        ValueError: There are none, or the environment lacks one.
    """
    chosen = list(spaces.images) if cameras is None else cameras
    if not chosen or any(camera not in spaces.images for camera in chosen):
        known = ", ".join(spaces.images) or "none"
        raise ValueError(f"cameras={chosen}: it sees by cameras of the environment, which has {known}")
    return chosen
