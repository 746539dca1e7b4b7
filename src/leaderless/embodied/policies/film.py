"""A small policy that sees and reads: convolutions whose features the instruction scales (FiLM), and where they are.

Feature-wise linear modulation follows Perez et al., arXiv 1709.07871; the expected place of each feature (spatial
soft-argmax) follows Levine et al., arXiv 1504.00702.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from leaderless.embodied.policies.actions import BinPolicy, Bins
from leaderless.embodied.policies.observations import StateNormalizer
from leaderless.embodied.policies.protocol import BodyValue, Observed
from leaderless.embodied.simulators.protocol import Spaces

NUM_BYTES = 256
WORD_SIZE = 32
NUM_MAPS = 16
"""Features whose places are found in each image."""
SHARPNESS = 4.0
"""Factor of features before the softmax: without it, their first places are the middle of the image."""


class Seer(nn.Module):
    """Features of what is seen, [n, size]: of each camera where its features are, and the state."""

    def __init__(self, spaces: Spaces, channels: int, hidden_size: int, *, normalize: bool = False) -> None:
        """Make the layers.

        Raises:
            ValueError: The environment shows no images.
        """
        super().__init__()
        if not spaces.images:
            raise ValueError("it needs images, but the environment shows none: use mlp")
        self.normalizer = StateNormalizer(spaces.state_size) if normalize else nn.Identity()
        self.words = nn.Embedding(NUM_BYTES, WORD_SIZE)
        self.read = nn.Conv1d(WORD_SIZE, 2 * WORD_SIZE, 5, padding=2)
        self.cameras = nn.ModuleDict({camera: _Camera(channels) for camera in spaces.images})
        size = 2 * NUM_MAPS * len(spaces.images) + spaces.state_size
        self.mix = nn.Linear(size, hidden_size)

    def forward(self, observed: Observed) -> Tensor:
        """See the class."""
        ids, lengths = observed.instructions
        is_text = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        words = self.words(ids.clamp(max=NUM_BYTES - 1)) * is_text[..., None]
        read = self.read(words.transpose(1, 2)).relu() * is_text[:, None]
        said = read.amax(2)
        found = [camera(observed.images[name], said) for name, camera in self.cameras.items()]
        seen = torch.cat([*found, self.normalizer(observed.state)], dim=1)
        features: Tensor = self.mix(seen.to(self.mix.weight.dtype)).relu()
        return features


class _Camera(nn.Module):
    """Expected places [n, 2 * NUM_MAPS] of features of images [n, height, width, 3], from -1 to 1."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.look = nn.Conv2d(3, channels, 3, stride=2, padding=1)
        self.film = nn.Linear(2 * WORD_SIZE, 2 * channels)
        self.maps = nn.Conv2d(channels, NUM_MAPS, 1)

    def forward(self, images: Tensor, said: Tensor) -> Tensor:
        """See the class."""
        pixels = images.permute(0, 3, 1, 2).to(self.look.weight.dtype) / 127.5 - 1
        scale, shift = self.film(said)[..., None, None].chunk(2, dim=1)
        maps = self.maps(self.look(pixels).relu() * (1 + scale) + shift) * SHARPNESS
        height, width = maps.shape[2:]
        weights = maps.flatten(2).softmax(2).view_as(maps)
        across = torch.linspace(-1, 1, width, device=maps.device)
        down = torch.linspace(-1, 1, height, device=maps.device)
        return torch.cat([(weights.sum(2) * across).sum(2), (weights.sum(3) * down).sum(2)], dim=1)


class Film(BinPolicy):
    """Actions in bins from images, state and instruction."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 4,
        num_bins: int = 9,
        channels: int = 32,
        hidden_size: int = 128,
        normalize: bool = False,
    ) -> None:
        """Make a policy with random weights.

        Args:
            spaces: Observations and actions of the environment.
            chunk: Steps of a decision.
            num_bins: Values that a number of an action can have.
            channels: Features of the convolutions.
            hidden_size: Width of the last hidden layer.
            normalize: Whether it sees the state with mean 0 and deviation 1; see `StateNormalizer`.
        """
        super().__init__()
        self.begin(spaces, chunk, Bins(spaces, num_bins))
        self.seer = Seer(spaces, channels, hidden_size, normalize=normalize)
        self.head = nn.Linear(hidden_size, chunk * self.bins.dim * self.bins.num)
        nn.init.zeros_(self.head.bias)
        with torch.no_grad():
            self.head.weight.mul_(0.1)

    @override
    def logits(self, observed: Observed) -> Tensor:
        logits: Tensor = self.head(self.seer(observed)).float()
        return logits.view(len(observed), self.chunk, self.bins.dim, self.bins.num)


class FilmValue(BodyValue):
    """A critic that sees and reads in the same way; its first values are 0."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        chunk: int = 4,
        channels: int = 32,
        hidden_size: int = 128,
        normalize: bool = False,
        per_step: bool = False,
    ) -> None:
        """Make a critic; see `Film` and `BodyValue`."""
        super().__init__()
        self.spaces, self.chunk, self.per_step = spaces, chunk, per_step
        self.seer = Seer(spaces, channels, hidden_size, normalize=normalize)
        self.head = self.new_head(hidden_size)

    @override
    def values(self, observed: Observed) -> Tensor:
        return self.shaped(self.head(self.seer(observed)))
