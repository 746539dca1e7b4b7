"""Each rank reads its own part of a model from the files, and has then what it would have of the whole."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from unittest.mock import patch

import torch
from tests.distributed.ranks import RankPool
from tests.distributed.test_experts import experts_model
from tests.distributed.test_mesh import setup_of
from tests.pictures import vision_model
from tests.tiny import tiny_model, untied_model
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.config.models import ModelConfig
from leaderless.distributed.transport import Transport
from leaderless.models.causal_lm import load_causal_lm
from leaderless.models.loading.sharded_loading import ShardedModelFiles, open_model
from leaderless.models.value_model import load_value_model
from leaderless.planner import Layout
from leaderless.training import fsdp

Changes = dict[str, object]
Case = tuple[str, dict[str, int], Changes, bool]
"""Folder of a model, sizes of a layout, settings of the model, and whether it is a value model."""
DENSE = (
    {"dp": 1},
    {"dp": 2},
    {"dp": 3},  # rows that cannot be divided evenly
    {"dp": 1, "cp": 2},
    {"dp": 1, "tp": 2},
    {"dp": 2, "tp": 2},
    {"dp": 1, "cp": 2, "tp": 2},
    {"dp": 1, "pp": 2},
    {"dp": 2, "pp": 2},
    {"dp": 1, "tp": 2, "pp": 2},
)


def opened_whole(config: ModelConfig, role: str, *, is_critic: bool = False, num_ranks: int = 1) -> ShardedModelFiles:
    """Open a model with all of its weights on every rank."""
    decoder = (load_value_model if is_critic else load_causal_lm)(config, role)
    return ShardedModelFiles(decoder, decoder.model, None)


def values_of(engine: object) -> dict[str, Tensor]:
    """Parameters and buffers as a rank has them."""
    assert isinstance(engine, fsdp.FsdpEngine | fsdp.FsdpValueEngine)
    named = [*engine.model.named_parameters(), *engine.model.named_buffers()]
    values = {name: one.detach().to_local() if isinstance(one, DTensor) else one.detach() for name, one in named}
    needed = {f"{name} is trained": torch.tensor(one.requires_grad) for name, one in engine.model.named_parameters()}
    return values | needed | {f"sent {one.name}": one.local for one in engine.local_weights()}


def compare(cases: list[Case]) -> list[tuple[int, int]]:
    """Make engines in both ways; bytes that this rank has of the weights, and bytes that it has read, of each case."""
    transport, found = Transport(torch.device("cpu"), timeout_s=60), list[tuple[int, int]]()
    for path, sizes, changes, is_critic in cases:
        num_ranks = prod(count for axis, count in sizes.items() if axis != "ep")
        layout, opened = Layout(tuple(range(num_ranks)), **sizes), list[ShardedModelFiles]()
        setup = setup_of(transport, layout, path) if transport.rank in layout else add_only(transport, layout)
        if setup is None:
            continue
        settings = ModelConfig(path=path, **changes)  # type: ignore[arg-type]
        setup = replace(setup, model=settings, is_critic=is_critic)

        def kept(*args: object, opened: list[ShardedModelFiles] = opened, **options: object) -> ShardedModelFiles:
            opened.append(open_model(*args, **options))  # type: ignore[arg-type]
            return opened[-1]

        with patch.object(fsdp, "open_model", kept):
            own = values_of(fsdp.make_engine(setup))
        with patch.object(fsdp, "open_model", opened_whole):
            expected = values_of(fsdp.make_engine(setup))
        assert own.keys() == expected.keys(), (path, sizes, changes)
        for name, value in expected.items():
            assert value.dtype == own[name].dtype, (path, sizes, name)
            assert torch.equal(value, own[name]), (path, sizes, changes, name)
        assert opened[0].files is not None, "it was read whole"
        held = sum(one.nbytes for name, one in own.items() if " " not in name and "lora" not in name)
        found.append((held, opened[0].files.num_bytes))
    return found


def add_only(transport: Transport, layout: Layout) -> None:
    """Make the groups of a layout of other ranks."""
    transport.add_axes([layout])
    transport.add_process_group(layout.ranks)


def test_ranks_that_read_their_parts_have_those_of_the_whole_model(ranks: RankPool, tmp_path: Path) -> None:
    text = untied_model(tiny_model("qwen3"))
    experts, mixtral = (experts_model(tmp_path, family) for family in ("qwen3_moe", "mixtral"))
    cases: list[Case] = [(text, sizes, {}, False) for sizes in DENSE]
    cases += [(text, sizes, {}, True) for sizes in (DENSE[1], DENSE[5], DENSE[7])]
    cases += [(tiny_model(), sizes, {"lora": {"rank": 4}}, False) for sizes in (DENSE[0], DENSE[2], DENSE[5])]
    cases += [(tiny_model(), sizes, {"compute_dtype": "bfloat16"}, False) for sizes in (DENSE[0], DENSE[2], DENSE[5])]
    cases += [(experts, sizes, {}, False) for sizes in ({"dp": 2, "ep": 2}, {"dp": 1, "cp": 2, "ep": 2}, DENSE[2])]
    cases += [(mixtral, sizes, {}, False) for sizes in ({"dp": 4, "ep": 4}, DENSE[8])]
    cases += [(vision_model(), sizes, {}, False) for sizes in (DENSE[0], DENSE[2])]
    cases += [(vision_model(), {"dp": 2}, {"freeze_vision": True}, False)]
    results = ranks.run(4, compare, cases, timeout_s=120)
    held, read = (sum(one[place] for one in results[0]) for place in (0, 1))
    # Files are in float32, like the weights; words that are tied, frequencies of positions and rows of less than a page
    # make the rest.
    assert held * 0.8 < read < held * 1.3
