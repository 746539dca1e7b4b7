"""A line that two cameras look at. Imports no torch, so that its processes start soon."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tests.small_worlds import Line

from leaderless.embodied.simulators.protocol import Continuous, Observations, Spaces

SIZE = 128
"""Pixels of a side of an image."""
CAMERAS = ("left", "right")
PIXELS = np.arange(SIZE * SIZE * 3, dtype=np.uint8).reshape(SIZE, SIZE, 3)


class Cameras(Line):
    """A line whose pixels follow from the camera, the place and the step."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.spaces = Spaces(dict.fromkeys(CAMERAS, (SIZE, SIZE)), 2, Continuous((-1.0,), (1.0,)), 6, True)

    def _seen(self, which: Sequence[int]) -> Observations:
        seen = super()._seen(which)
        shade = (100 * self.place[list(which)] + 10 * self.steps[list(which)]).astype(np.int64).astype(np.uint8)
        images = {name: PIXELS + (shade + np.uint8(k))[:, None, None, None] for k, name in enumerate(CAMERAS)}
        return Observations(images, seen.state, seen.instructions)
