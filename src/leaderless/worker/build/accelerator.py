"""Obstacles that keep an accelerator from computing a run, before anything is loaded; its kernels of attention."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from leaderless.base.devices import (
    SHARED_MEMORY,
    SLOW_BFLOAT16,
    SMALL_SHARED_MEMORY,
    lacks_bfloat16,
    unused_accelerators,
)
from leaderless.config import Recipe, RecipeError
from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.flash import activate_flash_attention_3, restore_flash_attention
from leaderless.planner import Plan, format_bytes
from leaderless.planner.checks.engine_arguments import KEY
from leaderless.planner.plan_parts import answering
from leaderless.rollout.external.arguments import check_device
from leaderless.worker.rank_info import RankInfo

ARCHITECTURE = re.compile(r"(sm|compute)_(\d+)(\d)([af]?)")
"""Architecture that CUDA code is compiled for: a processor, or an intermediate language; its version; its features."""


def check_accelerator(
    recipe: Recipe, plan: Plan, place: RankInfo, device: torch.device, say: Callable[[str], None]
) -> None:
    """Refuse an accelerator that cannot compute a plan, and warn of what may fail, and of devices that are not used.

    Raises:
        RecipeError: A model of this rank is to compute in bfloat16, which the device does not know, or its engine in a
            format of low precision that is not for the device.
        RuntimeError: This build of torch has no kernels for the device.
    """
    _check_formats(recipe, plan, place, device)
    if device.type == "cpu":
        if place.local_rank == 0 and (reason := unused_accelerators()):
            say(f"the CPU computes this run: {reason}")
        if place.local_rank == 0:
            warn_of_bfloat16({i.role: model for i in plan.instances if (model := recipe.model_of(i.role))}, say)
        return
    if problem := lacking_kernels(device):
        raise RuntimeError(f"rank {place.rank}: {problem}")
    for instance in plan.instances:
        model = recipe.model_of(instance.role)
        is_here = place.rank in instance.layout or place.rank in instance.serving_layout
        if is_here and model and model.compute_dtype == "bfloat16" and not knows_bfloat16(device):
            raise RecipeError.at(
                f"models.{instance.role}.compute_dtype",
                f"bfloat16, but {name_of(device)} of rank {place.rank} cannot compute in it: set it to float32",
            )
    if place.local_rank:
        return  # what follows is the same for all ranks of a machine
    has_vllm = any(
        instance.engine == "vllm" and recipe.as_seen_by(instance.role).rollout.external.is_in_process
        for instance in plan.instances
    )
    packages = ["torch_npu"] if device.type == "npu" else ["torch", *["vllm"] * has_vllm]
    for problem in unfit_packages(packages):
        say(f"kernels may not work: {problem}")
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.exists() else SMALL_SHARED_MEMORY
    if place.local_world_size > 1 and size < SMALL_SHARED_MEMORY:
        say(
            f"ranks may not connect: {SHARED_MEMORY} of rank {place.rank}'s machine has "
            f"{format_bytes(size)}: start the container with --shm-size=16g, or in Kubernetes mount an emptyDir of "
            "medium Memory there"
        )


def _check_formats(recipe: Recipe, plan: Plan, place: RankInfo, device: torch.device) -> None:
    """Refuse formats of low precision in which this rank's engines cannot compute on its device."""
    for one in plan.instances:
        answers = one.has_engine or one == answering(plan.instances, recipe.evaluation.role)
        if answers and place.rank in one.layout and (model := recipe.model_of(one.role)):
            external, key = recipe.as_seen_by(one.role).rollout.external, recipe.key_of(KEY, one.role)
            if not external.addresses:  # whose devices are not known here
                check_device(one.engine, external, device, model.compute_dtype, one.role, key)


def warn_of_bfloat16(models: Mapping[str, ModelConfig], say: Callable[[str], None]) -> None:
    """Warn of models that compute in bfloat16 on a processor that is slow in it."""
    if lacks_bfloat16():
        for role, model in models.items():
            if model.compute_dtype == "bfloat16":
                say(f"models.{role}.compute_dtype is bfloat16, but {SLOW_BFLOAT16}: leave it out, or set it to float32")


def name_of(device: torch.device) -> str:
    """A device as errors name it."""
    return f"{device} ({torch.get_device_module(device).get_device_name(device)})"


def lacking_kernels(device: torch.device) -> str:
    """Why torch has no kernels for a device, and what to do; empty if it has some, or cannot tell."""
    if device.type != "cuda" or torch.version.cuda is None:
        return ""
    capability, compiled = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    if not compiled or any(_runs(one, capability) for one in compiled):
        return ""
    return (
        f"torch {torch.__version__} has no kernels for {name_of(device)} of compute capability "
        f"{capability[0]}.{capability[1]}, only {', '.join(compiled)}: install a build of torch that has them, or hide "
        "the device with CUDA_VISIBLE_DEVICES"
    )


def _runs(architecture: str, capability: tuple[int, int]) -> bool:
    """Whether a device runs code for an architecture.

    That of a processor runs on later ones with the same major number; drivers compile the intermediate language for any
    later one. Code with features of one architecture runs there alone.
    """
    found = ARCHITECTURE.fullmatch(architecture)
    if found is None:
        return True  # an unknown notation, of which nothing can be said
    wanted = int(found[2]), int(found[3])
    if found[4] == "a":
        return wanted == capability
    is_later = wanted <= capability
    return is_later if (found[1], found[4]) == ("compute", "") else is_later and wanted[0] == capability[0]


def knows_bfloat16(device: torch.device) -> bool:
    """Whether a device multiplies in bfloat16 itself."""
    if device.type == "cuda":
        return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)
    is_supported: Callable[[], bool] = getattr(torch.get_device_module(device), "is_bf16_supported", lambda: True)
    return is_supported()


def unfit_packages(packages: Sequence[str]) -> Iterator[str]:
    """Yield a line for each package that was built for another torch or triton than the installed one, and a remedy."""
    for package in packages:
        try:
            found, needed = version(package), [Requirement(line) for line in requires(package) or ()]
        except PackageNotFoundError:
            continue
        for one in needed:
            if one.name not in {"torch", "triton"} or (one.marker is not None and not one.marker.evaluate()):
                continue
            try:
                other = Version(version(one.name)).public  # builds of a version differ in what follows its number
            except PackageNotFoundError:
                continue
            if not one.specifier.contains(other, prereleases=True):
                yield (
                    f"{package} {found} was built for {one.name}{one.specifier}, and {other} is installed: install "
                    f"{one.name}{one.specifier}, or a {package} that was built for {other}"
                )


def choose_attention(plan: Plan, device: torch.device, world: ProcessGroup, say: Callable[[str], None]) -> None:
    """Use FlashAttention-3 if all ranks can; the first one says so. All of them call it together."""
    if device.type != "cuda":
        return
    sizes = [size for size in plan.sizes.values() if size is not None and not size.num_latents]  # of as wide values
    models = {(size.num_heads, size.num_kv_heads, size.head_dim) for size in sizes}
    reason = activate_flash_attention_3(device, sorted(models))
    if int(world.max(torch.tensor(int(reason is not None)), "whether ranks use FlashAttention-3")):
        if reason is None:
            restore_flash_attention()
        elif reason:
            say(f"attention: torch's own kernels, as FlashAttention-3 cannot be used: {reason}")
    elif world.rank == world.ranks[0]:
        say("attention: FlashAttention-3")
