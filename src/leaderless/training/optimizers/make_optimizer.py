"""The optimizer that settings name."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from leaderless.config.models import OptimizerConfig
from leaderless.training.optimizers.adamw import make_adamw
from leaderless.training.optimizers.adamw_8bit import QuantizedAdamW
from leaderless.training.optimizers.muon import Muon
from leaderless.training.optimizers.optimizer import Optimizer, TrainedWeight
from leaderless.training.optimizers.sgd import Sgd
from leaderless.training.optimizers.state_memory import memory_for
from leaderless.training.optimizers.whole_matrices import WholeMatrices


def make_optimizer(
    weights: Iterable[TrainedWeight],
    config: OptimizerConfig,
    *,
    is_fused: bool = True,
    matrices: WholeMatrices | None = None,
    dtype: torch.dtype = torch.float32,
    folder: Path | None = None,
) -> Optimizer:
    """Make the optimizer of a model. All ranks of the model call it together.

    Args:
        weights: Weights on this rank; frozen ones are left out.
        config: Settings.
        is_fused: Whether AdamW is to be one kernel.
        matrices: Way of matrices to ranks that own them, for `muon`; None if this rank has all of each weight.
        dtype: Type in which the model computes, and `muon` makes matrices orthogonal.
        folder: Folder of files for what is offloaded to the disk; by default that of the system's temporary files.

    Raises:
        RecipeError: A package is missing, or what is kept cannot be offloaded as the settings say.
    """
    weights = [*weights]
    device = next((one.local.device for one in weights), torch.device("cpu"))
    memory = memory_for(config, device, folder or Path(tempfile.gettempdir()))
    if config.type == "muon":
        return Muon(weights, config, is_fused=is_fused, matrices=matrices, dtype=dtype, memory=memory)
    if config.type == "adamw_8bit":
        return QuantizedAdamW(weights, config, is_fused=is_fused, memory=memory)
    if config.type == "sgd":
        return Sgd(weights, config, memory)
    return make_adamw(weights, config, is_fused=is_fused, memory=memory)
