"""Common part of pi0 and pi0.5: PaliGemma reads a prompt and sees images, all places attending to one another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache


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
