"""Which kernels compute attention on the accelerators of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from leaderless.distributed.transport import ProcessGroup
from leaderless.models.attention.flash import activate_flash_attention_3, restore_flash_attention
from leaderless.planner import Plan


def choose_attention(plan: Plan, device: torch.device, world: ProcessGroup, say: Callable[[str], None]) -> None:
    """Use FlashAttention-3 if all ranks can; the first one says so. All of them call it together."""
    if device.type != "cuda":
        return
    models = {(size.num_heads, size.num_kv_heads, size.head_dim) for size in plan.sizes.values() if size is not None}
    reason = activate_flash_attention_3(device, sorted(models))
    if int(world.max(torch.tensor(int(reason is not None)), "whether ranks use FlashAttention-3")):
        if reason is None:
            restore_flash_attention()
        elif reason:
            say(f"attention: torch's own kernels, as FlashAttention-3 cannot be used: {reason}")
    elif world.rank == world.ranks[0]:
        say("attention: FlashAttention-3")
