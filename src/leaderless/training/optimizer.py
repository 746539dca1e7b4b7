"""AdamW and its learning rate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from functools import cache

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from leaderless.config.models import OptimizerConfig
from leaderless.distributed.transport import ProcessGroup


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, is_fused: bool = True
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with weight decay on matrices only, in one kernel or in many."""
    groups: dict[tuple[DeviceMesh | None, float], list[nn.Parameter]] = {}
    for one in parameters:
        if one.requires_grad:  # a fused step takes tensors of one mesh
            mesh, decay = getattr(one, "device_mesh", None), config.weight_decay if one.ndim >= 2 else 0.0
            groups.setdefault((mesh, decay), []).append(one)
    return torch.optim.AdamW(
        [{"params": params, "weight_decay": decay} for (_, decay), params in groups.items()],
        lr=config.peak,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=is_fused,
    )


def may_be_fused(device: torch.device, process_group: ProcessGroup) -> bool:
    """Whether the devices of all ranks compute AdamW in one kernel. All ranks call it together."""
    if device.type in {"cpu", "cuda"}:
        return True
    lacks = torch.tensor(not _can_be_fused(device))
    if not int(process_group.max(lacks.long(), "whether AdamW is one kernel")):
        return True
    if process_group.rank == process_group.ranks[0]:
        warnings.warn(f"AdamW starts many kernels, as a trial of the fused one fails on {device.type}", stacklevel=2)
    return False


@cache
def _can_be_fused(device: torch.device) -> bool:
    """Try a fused step on a device."""
    weight = nn.Parameter(torch.ones(4, device=device))
    weight.grad = torch.full_like(weight, 2.0)
    try:
        torch.optim.AdamW([weight], lr=0.25, fused=True).step()
    except (RuntimeError, TypeError):  # not there for this kind of device
        return False
    return True


def learning_rate_at(config: OptimizerConfig, update: int, num_updates: int) -> float:
    """The learning rate of an optimizer update, counted from 0; a schedule ends at the last of the run's updates."""
    if update < config.warmup_updates:
        return config.peak * (update + 1) / (config.warmup_updates + 1)
    if config.schedule == "constant":
        return config.peak
    last = max(num_updates - 1, config.warmup_updates + 1)
    progress = min(1.0, (update - config.warmup_updates) / (last - config.warmup_updates))
    share = 1 - progress if config.schedule == "linear" else (1 + math.cos(math.pi * progress)) / 2
    return config.peak * (config.final_fraction + (1 - config.final_fraction) * share)
