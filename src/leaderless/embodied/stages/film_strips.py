"""Episodes of bodies for people to look at: strips of what the first camera saw."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from leaderless.base.values import Json
from leaderless.data.batch import Batch
from leaderless.embodied.policies.observations import images_of
from leaderless.embodied.rollout.policy_rollout import BodyEpisode
from leaderless.embodied.rollout.vector_envs import spaces_of
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.rewards.pool import Graded
from leaderless.stages.context import StageContext
from leaderless.stages.recorded_samples import graded_in, record_as

MAX_FRAMES = 12
"""Frames of a strip; of longer episodes they are spread evenly."""
MAX_SIDE = 64
"""Pixels of a side of a frame of a strip; larger ones are made smaller."""
DONE, NOT_DONE = (46, 160, 67), (207, 34, 46)
"""Colors of the line below a strip."""


def film_strip(frames: NDArray[np.uint8], *, is_success: bool) -> str:
    """A data URL of frames, [t, height, width, 3] uint8, next to each other, with a line that says how they ended."""
    count = min(len(frames), MAX_FRAMES)
    chosen = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    if max(chosen.shape[1:3]) > MAX_SIDE:
        chosen = np.stack([_small(frame) for frame in chosen])
    gap = np.full((count, chosen.shape[1], 1, 3), 255, dtype=np.uint8)
    strip = np.concatenate([*np.concatenate([chosen, gap], axis=2)], axis=1)[:, :-1]
    line = np.broadcast_to(np.array(DONE if is_success else NOT_DONE, dtype=np.uint8), (1, strip.shape[1], 3))
    file = io.BytesIO()
    Image.fromarray(np.concatenate([strip, line])).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def _small(frame: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A frame [height, width, 3] with sides of at most `MAX_SIDE`."""
    image = Image.fromarray(frame)
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    return np.asarray(image)


def describe_episode(episode: BodyEpisode, graded: Graded, spaces: Spaces) -> dict[str, Json]:
    """Frames that are kept of an episode."""
    pixels = torch.from_numpy(np.stack(episode.frames)) if episode.frames else torch.zeros(0, 0, dtype=torch.uint8)
    said = _told(episode.is_success, len(episode.num_steps), sum(episode.num_steps), episode.failure)
    return _described(episode.instruction, said, graded, _strip(pixels, spaces, is_success=episode.is_success)) | {
        "is_truncated": not episode.is_terminated
    }


def record(batch: Batch, context: StageContext) -> Batch:
    """Write some episodes into the folder of the run; see `leaderless.stages.recorded_samples.record`."""
    return record_as(batch, context, _describe)


def _describe(batch: Batch, context: StageContext) -> list[dict[str, Json]]:
    assert context.recipe.body is not None
    spaces = spaces_of(context.recipe.body)
    return [_describe_row(batch, row, graded, spaces) for row, graded in enumerate(graded_in(batch))]


def _describe_row(batch: Batch, row: int, graded: Graded, spaces: Spaces) -> dict[str, Json]:
    """Form in which an episode is kept in a batch."""
    prompts, index, is_success = batch.prompts, batch.prompt_index, bool(batch.dense("success")[row])
    assert prompts is not None
    assert index is not None
    ids = prompts.jagged("prompt_tokens").rows()[int(index[row])]
    instruction = bytes(int(token) for token in ids if 0 < token < 256).decode(errors="replace")
    turns = batch.jagged("turns").rows()[row]
    num_decisions = int(turns[-1]) + 1 if len(turns) else 0
    said = _told(is_success, num_decisions, None, None if graded.is_valid else "failed")
    strip = _strip(batch.jagged("frames").rows()[row], spaces, is_success=is_success)
    return _described(instruction, said, graded, strip) | {"is_truncated": bool(batch.dense("truncated")[row])}


def _strip(pixels: torch.Tensor, spaces: Spaces, *, is_success: bool) -> list[str]:
    """The strip of the first camera; none without cameras or frames."""
    if not spaces.images or not len(pixels):
        return []
    frames = next(iter(images_of(pixels, spaces).values()))
    return [film_strip(frames.numpy(), is_success=is_success)]


def _told(is_success: bool, num_decisions: int, num_steps: int | None, failure: str | None) -> str:
    if failure is not None:
        return f"failed: {failure}"
    steps = "" if num_steps is None else f", {num_steps} steps"
    return f"{'done' if is_success else 'not done'} after {num_decisions} decisions{steps}"


def _described(instruction: str, said: str, graded: Graded, strip: list[str]) -> dict[str, Json]:
    return {
        "prompt": instruction,
        "response": said,
        "answer": None,
        "reward": graded.value,
        "is_valid": graded.is_valid,
        "details": dict(graded.details),
        "tokens": None,
        "images": list(strip),
    }
