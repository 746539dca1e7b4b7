"""Films of episodes, by what the first camera saw: strips for people, and embeddings by a frozen encoder."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from leaderless.base.values import Json
from leaderless.config import RecipeError
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

Encoder = Callable[[Tensor], Tensor]
"""Makes a vector, [size] float32, of a film, [frames, 3, height, width] float32 from 0 to 1."""
CELLS = 4
"""Number of cells along a side of a frame, of which the convolution keeps the means."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels, as V-JEPA 2 expects them."""


def film_strip(frames: NDArray[np.uint8], *, is_success: bool) -> str:
    """A data URL of frames, [t, height, width, 3] uint8, next to each other, with a line that says how they ended."""
    count = min(len(frames), MAX_FRAMES)
    chosen = frames[np.linspace(0, len(frames) - 1, count).round().astype(int)]
    if max(chosen.shape[1:3]) > MAX_SIDE:
        pictures = [Image.fromarray(frame) for frame in chosen]
        for picture in pictures:
            picture.thumbnail((MAX_SIDE, MAX_SIDE))
        chosen = np.stack([np.asarray(picture) for picture in pictures])
    gap = np.full((count, chosen.shape[1], 1, 3), 255, dtype=np.uint8)
    strip = np.concatenate([*np.concatenate([chosen, gap], axis=2)], axis=1)[:, :-1]
    line = np.broadcast_to(np.array(DONE if is_success else NOT_DONE, dtype=np.uint8), (1, strip.shape[1], 3))
    file = io.BytesIO()
    Image.fromarray(np.concatenate([strip, line])).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def describe_episode(episode: BodyEpisode, graded: Graded, spaces: Spaces) -> dict[str, Json]:
    """Form in which an episode that was just played is kept for people."""
    pixels = torch.from_numpy(np.stack(episode.frames)) if episode.frames else torch.zeros(0, 0, dtype=torch.uint8)
    said = f"after {len(episode.num_steps)} decisions, {sum(episode.num_steps)} steps"
    about = _described(
        episode.instruction, said, graded, pixels, spaces, episode.failure, is_success=episode.is_success
    )
    return about | {"is_truncated": not episode.is_terminated}


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
    turns, pixels = batch.jagged("turns").rows()[row], batch.jagged("frames").rows()[row]
    said = f"after {int(turns[-1]) + 1 if len(turns) else 0} decisions"
    failure = None if graded.is_valid else "failed"
    about = _described(instruction, said, graded, pixels, spaces, failure, is_success=is_success)
    return about | {"is_truncated": bool(batch.dense("truncated")[row])}


def _described(
    instruction: str,
    said: str,
    graded: Graded,
    pixels: Tensor,
    spaces: Spaces,
    failure: str | None,
    *,
    is_success: bool,
) -> dict[str, Json]:
    strips: list[Json] = []
    if spaces.images and len(pixels):
        frames = next(iter(images_of(pixels, spaces).values()))
        strips = [film_strip(frames.numpy(), is_success=is_success)]
    return {
        "prompt": instruction,
        "response": f"{'done' if is_success else 'not done'} {said}" if failure is None else f"failed: {failure}",
        "answer": None,
        "reward": graded.value,
        "is_valid": graded.is_valid,
        "details": dict(graded.details),
        "tokens": None,
        "images": strips,
    }


def embeddings(batch: Batch, context: StageContext) -> Batch:
    """Compute a vector for each episode, of frames of its first camera that are spread evenly."""
    config = context.recipe.body
    assert config is not None
    spaces = spaces_of(config)
    if not spaces.images:
        raise RecipeError.at("body.type", f"'{config.type}' has no camera, so there is nothing to embed")
    encode = encoder_of(config.encoder)
    films = [film_of(pixels, spaces, config.encoded_frames) for pixels in batch.jagged("frames").rows()]
    blank = torch.zeros(config.encoded_frames, 3, *next(iter(spaces.images.values())))
    found = [encode(blank if film is None else film) for film in films]
    size = len(found[0]) if found else len(encode(blank))
    return batch.with_columns(embeddings=torch.stack(found) if found else torch.zeros(0, size))


def film_of(pixels: Tensor, spaces: Spaces, num_frames: int) -> Tensor | None:
    """Frames of the first camera, [num_frames, 3, height, width] from 0 to 1; None for an episode without any.

    They are spread evenly over all pixels, [t, bytes] uint8; short episodes repeat some.
    """
    if not len(pixels):
        return None
    chosen = torch.linspace(0, len(pixels) - 1, num_frames).round().long()
    images = next(iter(images_of(pixels[chosen], spaces).values()))
    return images.movedim(-1, 1).float() / 255


@cache
def encoder_of(name: str) -> Encoder:
    """The encoder of a recipe's `body.encoder`."""
    return RandomConvolution() if name == "convolution" else Video(name)


class RandomConvolution(nn.Module):
    """Two layers of convolution with random weights that are always the same.

    Means over cells tell where things are, and frames follow one another: vectors are near where the same happens at
    the same share of the episode.
    """

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(
            [nn.Conv2d(3, channels, 5, 2, 2, bias=False), nn.Conv2d(channels, 2 * channels, 3, 2, 1, bias=False)]
        )
        for weight in self.parameters():
            weight.data.normal_(0, weight[0].numel() ** -0.5, generator=chance)
        self.requires_grad_(requires_grad=False)

    def forward(self, film: Tensor) -> Tensor:
        """Embed a film as means over cells of the last layer."""
        hidden = film
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return nn.functional.adaptive_avg_pool2d(hidden, CELLS).flatten()


class Video:
    """V-JEPA 2 of transformers: the mean of what it says of all patches.

    Source: Assran et al., arXiv 2506.09985; the mean as in SRPO, arXiv 2511.15605.
    """

    def __init__(self, path: str) -> None:
        from transformers import AutoModel, VJEPA2Model

        model = AutoModel.from_pretrained(path) if Path(path).is_dir() else None
        if not isinstance(model, VJEPA2Model):
            raise RecipeError.at(
                "body.encoder", f"'{path}' must be 'convolution', or a folder with a V-JEPA 2 of transformers"
            )
        self._model = model.eval()

    def __call__(self, film: Tensor) -> Tensor:
        """Embed a film as the mean over its patches."""
        size = (self._model.config.crop_size,) * 2
        frames = nn.functional.interpolate(film, size, mode="bilinear", antialias=True)
        normal = (frames - torch.tensor(MEAN)[:, None, None]) / torch.tensor(DEVIATION)[:, None, None]
        with torch.no_grad():
            patches: Tensor = self._model.get_vision_features(normal[None])
        return patches[0].mean(0)
