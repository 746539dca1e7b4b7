"""Keys of the tokens of a pass, which do not depend on where in the pass the tokens are."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.models.lora.dropout import key_of, mixed
from leaderless.training.micro_batches import MicroBatch


def token_keys(micro_batch: MicroBatch, seed: int, update: int) -> Tensor:
    """A key for each token of a micro-batch, [T] int64, which depends on no other sample.

    The key of a token after the prompt follows from the id of its sample and from its position there. Siblings share
    the tokens of their prompt. A prompt's keys follow from all of its tokens and the position of each, so that they are
    the same in all passes over its siblings, if these do not fit into one.

    Args:
        micro_batch: The micro-batch.
        seed: Seed of the run.
        update: Number of optimizer steps so far; keys differ from step to step.
    """
    origins = micro_batch.origins
    if origins is None:
        return torch.zeros(len(micro_batch.tokens), dtype=torch.int64)
    siblings = origins.siblings
    # A prompt comes before its siblings, so the segments before it belong to all earlier prompts and samples.
    prompts = torch.arange(len(siblings)) + siblings.cumsum(0) - siblings
    is_prompt = torch.zeros(len(siblings) + len(origins.ids), dtype=torch.bool).index_fill_(0, prompts, value=True)
    lengths = torch.empty_like(is_prompt, dtype=torch.int64)
    lengths[is_prompt], lengths[~is_prompt] = origins.before, origins.after
    segment = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    contents = mixed(micro_batch.tokens ^ mixed(micro_batch.positions))
    owners = torch.zeros_like(lengths).index_add_(0, segment, contents)
    owners[~is_prompt] = origins.ids
    run = mixed(mixed(torch.tensor([seed])) ^ update)
    owners = mixed(mixed(owners) ^ mixed(run ^ torch.where(is_prompt, key_of("prompt"), key_of("sample"))))
    return mixed(owners[segment] ^ micro_batch.positions)
