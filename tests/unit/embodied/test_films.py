"""Strips of episodes: sizes, frames, and the color that says how they ended."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from leaderless.embodied.stages.films import DONE, MAX_FRAMES, MAX_SIDE, NOT_DONE, film_strip


@pytest.mark.parametrize("side", [28, 224])
@pytest.mark.parametrize("is_success", [True, False])
def test_a_strip_shows_frames_from_first_to_last_no_larger_than_needed(side: int, is_success: bool) -> None:
    shades = np.linspace(0, 250, 50).astype(np.uint8)
    frames = np.broadcast_to(shades[:, None, None, None], (50, side, side, 3)).copy()
    url = film_strip(frames, is_success=is_success)
    image = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))
    shown = min(side, MAX_SIDE)
    assert image.shape == (shown + 1, MAX_FRAMES * (shown + 1) - 1, 3)
    assert (image[0, 0] == 0).all()
    assert (image[0, -1] == 250).all()
    assert tuple(image[-1, 0]) == (DONE if is_success else NOT_DONE)
