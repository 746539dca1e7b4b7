from __future__ import annotations

import torch.distributed as dist

SIZES: dict[str, int] = {}
PLACES: list[int] = []
"""The rank at each place in Megatron's order, for processes that have met in another one."""
_GROUPS: dict[str, object] = {}
_PEERS: dict[str, list[int]] = {}


def initialize(tp: int, pp: int, ep: int) -> None:
    """As `initialize_model_parallel`, with the default order `tp-cp-ep-dp-pp`, from the innermost."""
    world, rank = world_size(), dist.get_rank() if dist.is_initialized() else 0
    assert world % (tp * pp) == 0, "world size is not divisible by the model-parallel size"
    assert world % (ep * pp) == 0, "world size is not divisible by the expert-parallel size"
    SIZES.update(tp=tp, pp=pp, dp=world // (tp * pp), ep=ep)
    per_stage = world // pp
    along = {
        "tp": [list(range(first, first + tp)) for first in range(0, world, tp)],
        "pp": [list(range(first, world, per_stage)) for first in range(per_stage)],
    }
    for axis, groups in along.items():
        for places in groups:
            peers = [PLACES[place] for place in places] if PLACES else places
            group = dist.new_group(peers) if world > 1 else None
            if rank in peers:
                _GROUPS[axis], _PEERS[axis] = group, peers


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def get_tensor_model_parallel_group(check_initialized=True):
    return _GROUPS["tp"]


def get_tensor_model_parallel_rank():
    return _PEERS["tp"].index(dist.get_rank()) if world_size() > 1 else 0


def get_pipeline_model_parallel_group(check_initialized=True):
    return _GROUPS["pp"]


def get_pipeline_model_parallel_last_rank():
    return _PEERS["pp"][-1]


def is_pipeline_last_stage(ignore_virtual=True, vp_stage=None):
    return world_size() == 1 or dist.get_rank() == _PEERS["pp"][-1]
