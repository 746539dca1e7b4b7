"""How ranks divide weights, and what torch keeps of the passes through units that it gathers."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from leaderless.config.models import Offload, Whole


class WeightSharding(NamedTuple):
    """How ranks divide weights, and where these are.

    Attributes:
        mesh: Ranks; by default all of the process group, along `dp`. Weights are divided along the axis `dp` and are
            the same along others, except that weights of a divided model have parts along `tp`, and divided experts a
            mesh of their own.
        keeps: Parts that each rank keeps whole; see `TrainingConfig.keep_whole`.
        offload_folder: Folder of files for what is offloaded to the disk; by default that of the system's temporary
            files.
        offload_frozen: Place of weights without an optimizer while they are not used.
    """

    mesh: DeviceMesh | None = None
    keeps: Whole = "nothing"
    offload_folder: Path = Path(tempfile.gettempdir())
    offload_frozen: Offload = "none"


def forget_order(units: Iterable[FSDPModule]) -> None:
    """Forget the order in which passes without a gradient went through units.

    Torch appends each unit of each pass to lists, and clears them in a backward pass, which a frozen model has none of.
    Their names are not public: where they are others, they are left alone.
    """
    for unit in units:
        state = getattr(unit, "_get_fsdp_state", lambda: None)()
        for group in getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]:
            order = getattr(getattr(group, "comm_ctx", None), "post_forward_order", None)
            indices = getattr(group, "_post_forward_indices", None)
            if isinstance(order, list) and isinstance(indices, list):
                order.clear()
                indices.clear()
