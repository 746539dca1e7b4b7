"""Names of prompts and samples that never depend on where they are processed."""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.config.batch import MAX_RESPONSES

SIBLING_BITS = (MAX_RESPONSES - 1).bit_length()
"""Room for 65,536 responses to a prompt, and for 2^47 prompts in a run."""


def make_sample_ids(group_ids: Tensor, siblings: Tensor) -> Tensor:
    """Globally unique ids of samples; ascending ids follow the order of the data.

    A group id is the place of a prompt in the run's stream of prompts: epoch and row follow from it, and a prompt that
    is asked again, in a later epoch or after a failure, has another one.

    Args:
        group_ids: [n] int64.
        siblings: [n] int64, which of the responses to its prompt a sample is, from 0.

    Returns:
        [n] int64.
    """
    if siblings.numel() and int(siblings.max()) >= 1 << SIBLING_BITS:
        raise ValueError(f"{int(siblings.max()) + 1} responses to one prompt: at most {1 << SIBLING_BITS} are possible")
    return torch.bitwise_left_shift(group_ids, SIBLING_BITS) + siblings
