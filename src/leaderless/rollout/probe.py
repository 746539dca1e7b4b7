"""A short text whose log-probabilities show that an engine generates with the trainer's weights."""

from __future__ import annotations

import hashlib
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.distributed.weights.stream import Probe
from leaderless.training.engine import TrainEngine

PROBE_TOKENS = 32
"""Length of the text."""
PROBE_TOLERANCE = {"float32": 5e-4, "bfloat16": 0.5}
"""Largest mean difference of log-probabilities that rounding explains, by the type in which the engine computes. The
text is unlikely, so its log-probabilities are large and a single one may differ by more. Without the right weights,
differences are far larger."""


def make_probe(num_tokens: int, max_tokens: int, reserved: Container[int] = ()) -> list[int]:
    """Make a text of at least two tokens, the same on every rank, that leaves one token of the context free.

    Args:
        num_tokens: Number of tokens that there are.
        max_tokens: Length of the context.
        reserved: Tokens that no text has.
    """
    length = max(2, min(PROBE_TOKENS, max_tokens - 1))
    digests = (hashlib.blake2b(f"0/0/{place}".encode(), digest_size=4).digest() for place in range(length))
    drawn = [(int.from_bytes(digest, "big") >> 1) % num_tokens for digest in digests]
    return [next(one for one in (*range(token, num_tokens), *range(token)) if one not in reserved) for token in drawn]


def probe_of(trainer: TrainEngine, tokens: Sequence[int]) -> Probe:
    """The probe with a trainer's log-probabilities. All ranks of the trainer call it together."""
    prompt, scored = (
        Jagged.from_lists([list(part)], torch.int64, axis)
        for part, axis in ((tokens[:1], "prompt_tokens"), (tokens[1:], "tokens"))
    )
    mask = Jagged(torch.ones(len(tokens) - 1, dtype=torch.bool), scored.lengths, "tokens")
    columns = {"prompt_tokens": prompt, "tokens": scored, "response_mask": mask}
    return Probe(tokens, trainer.log_probs(Batch(torch.zeros(1, dtype=torch.int64), columns)).values)


def check_probe(name: str, found: Tensor, probe: Probe, policy_version: int, tolerance: float, remedy: str) -> None:
    """Compare an engine's log-probabilities of a probe with the trainer's.

    Args:
        name: Name of the engine, for the error.
        found: [tokens - 1] log-probabilities of the engine.
        probe: Text with the trainer's log-probabilities.
        policy_version: Version of the weights that the engine was given.
        tolerance: Largest mean difference that rounding explains.
        remedy: Advice to the user, for the error.

    Raises:
        RuntimeError: The difference is larger, or no number.
    """
    difference = float((found.cpu() - probe.log_probs.cpu()).abs().nan_to_num(nan=torch.inf).mean())
    if difference > tolerance:
        raise RuntimeError(
            f"{name} does not use the weights of policy version {policy_version} that were loaded: its "
            f"log-probabilities of {len(found)} tokens differ from the trainer's by {difference:.3g} on average, "
            f"and rounding explains {tolerance:g}; {remedy}"
        )
