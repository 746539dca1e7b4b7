"""AdamW and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from leaderless.config.models import OptimizerConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weight decay on matrices only.

    Args:
        parameters: Of one role.
        config: Its settings.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def learning_rate_at(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """The learning rate of one optimiser step.

    Args:
        config: Peak, warm-up and schedule.
        update: The step, from 0.
        num_updates: Of the whole run.
    """
    if update < config.warmup_steps:
        return config.learning_rate * (update + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (update - config.warmup_steps) / max(1, num_updates - config.warmup_steps))
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * share)
