"""Common part of models that begin with a checkpoint, and of those that read and see by PaliGemma."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import AutoTokenizer, DynamicCache

from leaderless.embodied.policies.loading import BASE, MODEL_TYPE
from leaderless.embodied.policies.protocol import BodyModel
from leaderless.embodied.simulators.protocol import Spaces

_CACHE = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


class Pretrained(BodyModel):
    """A model that is read from a folder, and sees by some of the environment's cameras."""

    def open(self, spaces: Spaces, path: str, cameras: list[str] | None) -> Path:
        """Take a folder, and the cameras that it sees by; all by default.

        Raises:
            ValueError: There are no cameras, or the environment lacks one.
        """
        self._cameras = list(spaces.images) if cameras is None else cameras
        if not self._cameras or any(camera not in spaces.images for camera in self._cameras):
            known = ", ".join(spaces.images) or "none"
            raise ValueError(f"cameras={self._cameras}: it sees by cameras of the environment, which has {known}")
        self._folder = self.checkpoint = Path(path)
        return self._folder

    @cached_property
    def _tokenizer(self) -> AutoTokenizer:
        return AutoTokenizer.from_pretrained(self._folder, trust_remote_code=False)

    def numbers_of_robot(
        self, file: str, about: Mapping[str, Iterable[float]], names: tuple[str, str], size: int, most: int
    ) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Two rows of `size` numbers that a file of the folder has about the robot's state or actions.

        Raises:
            ValueError: There are none, or they belong to another robot.
        """
        if any(about.get(name) is None for name in names):  # a file may have null
            raise ValueError(
                f"path='{self._folder}': {file} has no {' and '.join(names)}: add those of the dataset of this robot"
            )
        first, second = (tuple(map(float, about[name])) for name in names)
        if not len(first) == len(second) == size or size > most:
            raise ValueError(
                f"path='{self._folder}': the statistics are those of another robot: {names[0]} has {len(first)} "
                f"numbers, the environment {size}; the model takes at most {most}"
            )
        return first, second


def needs_weights(checkpoint: Path) -> bool:
    """Whether a model reads the weights of a checkpoint.

    It does not where only sizes are wanted, on the device `meta`, and where the folder is what a saved model has kept
    of a checkpoint, whose weights are then those of this model.
    """
    if torch.get_default_device().type == "meta":
        return False
    if checkpoint.name != BASE:
        return True
    try:
        about = json.loads((checkpoint.parent / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return not isinstance(about, dict) or about.get("model_type") != MODEL_TYPE


def with_cache(cache: object) -> dict[str, object]:
    """The argument for keys and values of earlier tokens, under the name that this version of `transformers` has."""
    return {_CACHE: cache}


@dataclass(frozen=True)
class PaliGemmaPrefix:
    """Prefix that n observations have become.

    Attributes:
        layers: Keys and values, [n, heads, length, head_dim] each, of each layer.
        is_real: [n, length] bool, which places are not padding.
        state: [n, max_state_dim] float32, the state, as in training.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    is_real: Tensor
    state: Tensor

    def select(self, rows: Tensor) -> PaliGemmaPrefix:
        """Those of some observations, [m] int64."""
        layers = tuple((keys[rows], values[rows]) for keys, values in self.layers)
        return PaliGemmaPrefix(layers, self.is_real[rows], self.state[rows])


def embedded(vlm: nn.Module, images: Sequence[Tensor], ids: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Embeddings [n, length, hidden_size] of images and then words, and whether each is real.

    Args:
        vlm: `PaliGemmaModel` of transformers.
        images: [n, 3, size, size] float32 of each camera, from -1 to 1.
        ids: [n, longest] int64, the prompt.
        lengths: [n] int64, its length.
    """
    found = vlm.get_image_features(torch.cat(list(images))).pooler_output.chunk(len(images))  # type: ignore[operator]
    words = vlm.get_input_embeddings()(ids)  # type: ignore[operator]
    is_word = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
    seen = torch.cat(found, dim=1).to(words.dtype)
    is_real = torch.cat([torch.ones(seen.shape[:2], dtype=torch.bool, device=ids.device), is_word], dim=1)
    return torch.cat([seen, words], dim=1), is_real


def _run(vlm: nn.Module, embeddings: Tensor, is_real: Tensor, *, use_cache: bool) -> object:
    return vlm(
        inputs_embeds=embeddings,
        attention_mask=is_real.long(),
        position_ids=(is_real.long().cumsum(1) - 1).clamp(min=0),
        token_type_ids=torch.zeros_like(is_real, dtype=torch.int64),
        use_cache=use_cache,
    )


def read_prefix(vlm: nn.Module, embeddings: Tensor, is_real: Tensor, state: Tensor) -> PaliGemmaPrefix:
    """Compute what the steps of a flow attend to."""
    found = _run(vlm, embeddings, is_real, use_cache=True)
    cache: DynamicCache = found.past_key_values  # type: ignore[attr-defined]
    layers = [(layer.keys, layer.values) for layer in cache.layers]
    # Ranks that divide weights gather a layer's when the gradient of its output comes. Of the last layer only
    # keys and values are used, so its output is made a part of these.
    unused = 0.0 * found.last_hidden_state.sum((1, 2))[:, None, None, None]  # type: ignore[attr-defined]
    layers[-1] = layers[-1][0] + unused, layers[-1][1]
    return PaliGemmaPrefix(tuple(layers), is_real, state)


def mean_features(vlm: nn.Module, embeddings: Tensor, is_real: Tensor) -> Tensor:
    """[n, hidden_size]: mean of what the last layer says at real places, for critics."""
    hidden: Tensor = _run(vlm, embeddings, is_real, use_cache=False).last_hidden_state  # type: ignore[attr-defined]
    weights = is_real[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)
