"""Frames of demonstrations in videos, found by their times. Needs the package `av`; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from leaderless.config.packaged_files import how_to_install

if TYPE_CHECKING:
    import av

TOLERANCE_S = 1e-4
"""Seconds by which the time of a frame may differ from its step's, as in LeRobot."""


def check_decoder() -> None:
    """Make sure that videos can be decoded.

    Raises:
        ValueError: The package is missing; the error says how to install it.
    """
    try:
        import av  # noqa: F401
    except ModuleNotFoundError as error:
        text = f"there is no package '{error.name}', which decodes videos: {how_to_install('lerobot')}"
        raise ValueError(text) from error


def read_frames(file: Path, times: Sequence[float], size: tuple[int, int]) -> NDArray[np.uint8]:
    """The frames at some times of a video, which may hold other episodes before and after.

    Frames are decoded from the key frame before the first time to the last time, each of them once.

    Args:
        file: Video.
        times: T times in seconds from the beginning of the video, in ascending order.
        size: Height and width that the frames must have.

    Returns:
        [T, height, width, 3] uint8: red, green and blue.

    Raises:
        ValueError: The video is missing or damaged, its frames have another size, or none of them is at one of the
            times.
    """
    import av

    if not file.is_file():
        raise ValueError(f"{file} is missing: copy the folder with its videos")
    frames, count, near = np.empty((len(times), *size, 3), np.uint8), 0, "it has no frames"
    try:
        for time, frame in _decoded(file, times[0]):
            while count < len(times) and abs(time - times[count]) <= TOLERANCE_S:
                frames[count] = _pixels(frame, size, file)
                count += 1
            if count == len(times):
                return frames
            near = f"one is at {time:.4f} s"
            if time > times[count]:
                break
    except av.FFmpegError as error:
        raise ValueError(f"{file} cannot be decoded: {error}; copy it again, or record it again") from error
    raise ValueError(
        f"{file} has no frame at {times[count]:.4f} s, the time of step {count}: {near}, and {TOLERANCE_S:g} s of "
        "difference are allowed; convert the folder again, so that times and videos agree"
    )


def _decoded(file: Path, begin: float) -> Iterator[tuple[float, av.VideoFrame]]:
    """Frames of a video with their times in seconds, in order, from a key frame before a time."""
    import av

    with av.open(file) as container:
        if not container.streams.video:
            raise ValueError(f"{file} holds no video: copy it again, or record it again")
        stream = container.streams.video[0]
        for place in _places(begin):
            container.seek(int(place / (stream.time_base or 1)), stream=stream)
            frames = ((frame.time, frame) for frame in container.decode(stream) if frame.time is not None)
            first = next(frames, None)
            # Where frames are stored in another order than they are shown, it may have been a later key frame.
            if first is not None and (place == 0 or first[0] <= begin + TOLERANCE_S):
                yield first
                yield from frames
                return


def _places(begin: float) -> Iterator[float]:
    """Times at which to look for a key frame: a time, then 1, 2, 4 and so on seconds before it, and the beginning."""
    back = 0.0
    while begin + TOLERANCE_S > back:
        yield begin + TOLERANCE_S - back
        back = max(1.0, 2 * back)
    yield 0.0


def _pixels(frame: av.VideoFrame, size: tuple[int, int], file: Path) -> NDArray[np.uint8]:
    if (frame.height, frame.width) != size:
        raise ValueError(
            f"{file} has frames of {frame.height} x {frame.width} pixels (height x width), but meta/info.json says "
            f"{size[0]} x {size[1]}: correct the shape there, or convert the folder again"
        )
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    return pixels
