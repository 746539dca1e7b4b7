"""Places for what is offloaded, looked at before anything is loaded."""

from __future__ import annotations

from contextlib import suppress

import torch

from leaderless.base.scratch_files import check_folder, free_bytes, too_small
from leaderless.config import Recipe, RecipeError
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Plan
from leaderless.planner.memory.offload import where_frozen
from leaderless.training.optimizers.state_memory import HOST_ON_CPU
from leaderless.worker.rank_info import RankInfo


def check_offload(recipe: Recipe, plan: Plan, place: RankInfo, device: torch.device) -> None:
    """Refuse places that are none on this rank, or are too small for all ranks of this machine.

    Raises:
        RecipeError: The CPU computes, and something is to be in the memory of the host; or the folder of files cannot
            be written to, or has too little room.
    """
    for instance in plan.instances:
        seen = recipe.as_seen_by(instance.role)
        if device.type == "cpu" and instance.is_trained and seen.optimizer.offload == "host":
            raise RecipeError.at(recipe.key_of("optimizer.offload", instance.role), HOST_ON_CPU)
        if device.type == "cpu" and where_frozen(recipe, plan.instances, instance) == "host":
            raise RecipeError.at(recipe.key_of("training.offload_frozen", instance.role), HOST_ON_CPU)
    if not uses_files(recipe, plan, device):
        return
    folder = RunDirectory.offload_of(recipe)
    check_folder(folder)
    if plan.memory is None:
        return  # where files are made, they are given all of their room
    memory = plan.memory.cpu if device.type == "cpu" else plan.memory.accelerator
    needed = sum(memory.disk.values()) * place.local_world_size
    if needed > free_bytes(folder):
        raise too_small(folder, needed)


def uses_files(recipe: Recipe, plan: Plan, device: torch.device) -> bool:
    """Whether something is offloaded to files."""
    for instance in plan.instances:
        config = recipe.model_of(instance.role)
        moves_inputs = config is not None and config.offload_activations and device.type == "cpu"
        optimizer = recipe.as_seen_by(instance.role).optimizer
        if instance.is_trained and (optimizer.offload == "disk" or moves_inputs):
            return True
        if where_frozen(recipe, plan.instances, instance) == "disk":
            return True
    return False


def remove_folder(recipe: Recipe) -> None:
    """Remove the folder in that of the run, whose files have no names."""
    if recipe.run.offload_folder is None:
        with suppress(OSError):  # it is not there, or another rank has removed it
            RunDirectory.of(recipe).offload.rmdir()
