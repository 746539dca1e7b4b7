"""Embeddings of films of episodes, by a frozen encoder."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from leaderless.config import RecipeError
from leaderless.data.batch import Batch
from leaderless.embodied.policies.observations import images_of
from leaderless.embodied.rollout.vector_envs import spaces_of
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.stages.context import StageContext

Encoder = Callable[[Tensor], Tensor]
"""Makes a vector, [size] float32, of a film, [frames, 3, height, width] float32 from 0 to 1."""
CELLS = 4
"""Number of cells along a side of a frame, of which the convolution keeps the means."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the channels, as V-JEPA 2 expects them."""


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

    Args:
        pixels: [t, bytes] uint8, of all cameras.
        spaces: Observations and actions of the environment.
        num_frames: Number of frames, spread evenly; short episodes repeat some.
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
