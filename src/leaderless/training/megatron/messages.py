"""Messages between a rank and its Megatron process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

KINDS = ("weights", "exp_avg", "exp_avg_sq")
"""Tensors that a model keeps for each weight: itself in float32, and Adam's moments, which a frozen model lacks."""


@dataclass(frozen=True)
class MegatronSettings:
    """Settings of a Megatron process.

    Attributes:
        model: Folder or hub name of the model.
        revision: Branch, tag or commit on the hub.
        trust_remote_code: Whether code that comes with the model may run.
        dtype: Type in which the model computes.
        recompute: Whether activations are recomputed in the backward pass.
        vocab_size: Number of tokens with an embedding, without those that only make it divisible.
        rank: Place of this process among those that have the model.
        world_size: Number of these processes.
        meeting: Place where they find each other, as torch's `init_method`.
        timeout_s: Longest wait for one another.
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        ep: Expert-parallel size.
        optimizer: Settings of Adam by their names in Megatron's `OptimizerConfig`; None for a model that is only
            scored.
    """

    model: str
    revision: str | None
    trust_remote_code: bool
    dtype: str
    recompute: bool
    vocab_size: int
    rank: int
    world_size: int
    meeting: str
    timeout_s: float
    tp: int
    pp: int
    ep: int
    optimizer: dict[str, float] | None


@dataclass(frozen=True)
class MegatronPass:
    """Texts of one pass, and the tokens that are scored in them.

    Attributes:
        texts: Tokens of each text.
        text: Text of each scored token, [R].
        place: Place in it of the token before each scored one, [R].
        targets: The scored tokens, [R].
        temperature: Temperature of all of them, or of each.
        entropy: Whether entropies are computed.
    """

    texts: Sequence[Sequence[int]]
    text: Sequence[int]
    place: Sequence[int]
    targets: Sequence[int]
    temperature: float | Sequence[float]
    entropy: bool


@dataclass(frozen=True)
class Slope:
    """Derivatives of a loss by the log-probability of each scored token of a pass, [R], and its entropy, [R] or [0]."""

    log_probs: Sequence[float]
    entropies: Sequence[float]
