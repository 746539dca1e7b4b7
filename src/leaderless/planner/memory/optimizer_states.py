"""Bytes that optimizers keep of weights between updates. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple

from leaderless.config.models import OptimizerConfig
from leaderless.planner.memory.decoder_size import ModelSize

BLOCK = 256
"""Numbers of a row that `adamw_8bit` quantizes together."""
SCALE_BYTES = 4
LEAST_IN_BLOCKS = 4096
"""Numbers of a weight from which on its moments are quantized, as in torchao."""


def is_in_blocks(shape: Sequence[int], part: Sequence[int]) -> bool:
    """Whether `adamw_8bit` quantizes the moments of a weight of which a rank has some part."""
    return len(shape) > 1 and prod(shape) >= LEAST_IN_BLOCKS and shape[-1] % BLOCK == part[-1] % BLOCK == 0


class Kept(NamedTuple):
    """What is kept of some weights.

    Attributes:
        weights: Number of weights on the ranks of a part.
        numbers: Numbers that are kept of each.
        bits: Bits of each of these, with their share of a scale.
    """

    weights: int
    numbers: int
    bits: float

    def bytes_on(self, shards: int) -> int:
        """Bytes on one of the ranks that divide the part."""
        return self.numbers * -(-int(self.weights * self.bits) // (8 * shards))


def kept_by(config: OptimizerConfig, size: ModelSize, part: ModelSize) -> Sequence[Kept]:
    """What an optimizer keeps of the weights of a part of a language model that are trained.

    Adapters are counted as if none had rows of whole blocks, and so are weights that see.
    """
    hidden = _hidden(size, part) if config.type == "muon" else 0
    in_blocks = _in_blocks(size, part) if config.type == "adamw_8bit" else 0
    return kept_of(config, part.num_trained, hidden=hidden, in_blocks=in_blocks)


def kept_of(config: OptimizerConfig, trained: int, *, in_blocks: int, hidden: int = 0) -> Sequence[Kept]:
    """What an optimizer keeps of trained weights, some of them in rows of whole blocks or in hidden matrices."""
    bits = 16 if config.state_dtype == "bfloat16" else 32
    if config.type == "sgd":
        return [Kept(trained, 1 if config.momentum_decay else 0, bits)]
    if config.type == "muon":
        return [Kept(hidden, 1, bits), Kept(trained - hidden, 2, bits)]
    if config.type == "adamw_8bit":
        return [Kept(in_blocks, 2, 8 + 8 * SCALE_BYTES / BLOCK), Kept(trained - in_blocks, 2, bits)]
    return [Kept(trained, 2, bits)]


def _hidden(size: ModelSize, part: ModelSize) -> int:
    """Weights in matrices of layers that read text."""
    if size.num_adapter_parameters:
        return part.num_adapter_parameters
    return _share(sum(size.rows.values()), size, part)


def _in_blocks(size: ModelSize, part: ModelSize) -> int:
    """Weights in matrices with rows of whole blocks."""
    if size.num_adapter_parameters:
        return 0
    words = part.num_root_parameters // size.hidden_size * size.hidden_size if size.hidden_size % BLOCK == 0 else 0
    whole = sum(weights for row, weights in size.rows.items() if row % BLOCK == 0)
    return _share(whole, size, part) + words


def _share(weights: int, size: ModelSize, part: ModelSize) -> int:
    """The part of some weights in layers, if they are divided as all of these are."""
    seeing = size.vision.num_parameters if size.vision else 0
    in_part = part.num_layer_parameters - (part.vision.num_parameters if part.vision else 0)
    return weights * in_part // (size.num_layer_parameters - seeing)
