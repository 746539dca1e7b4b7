"""Memory of the host that devices read: few blocks for many tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from leaderless.distributed.weights import copies
from leaderless.distributed.weights.blocks import HeldWeights, LocalWeight
from leaderless.distributed.weights.copies import begin_copy, collected
from leaderless.worker.checkpoint.shards import Shard, copy_to_host

HIDDEN, INNER, LAYERS = 1536, 8960, 28
LAYER = [(HIDDEN, HIDDEN), (HIDDEN,), (256, HIDDEN), (256,), (256, HIDDEN), (256,), (HIDDEN, HIDDEN)]
SHAPES = [(151_936, HIDDEN), *(LAYER + [(INNER, HIDDEN)] * 2 + [(HIDDEN, INNER), (HIDDEN,), (HIDDEN,)]) * LAYERS]
"""Weights of Qwen2.5 at 1.5B, whose head is the embedding."""
GIB = 1 << 30


class Pinned:
    """Counts memory that is pinned, in blocks of powers of two, as torch allocates it; there is none of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Take the place of `torch.empty`."""
        self.blocks: list[int] = []
        empty = torch.empty

        def allocate(*size: int, pin_memory: bool = False, **options: object) -> Tensor:
            if not pin_memory:
                return empty(*size, **options)
            found = empty(*size, **{**options, "device": "meta"})
            self.blocks.append(1 << (found.nbytes - 1).bit_length())
            return found

        monkeypatch.setattr(torch, "empty", allocate)
        monkeypatch.setattr(copies, "can_pin", lambda kind: kind != "cpu")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> Pinned:
    return Pinned(monkeypatch)


def on_meta(dtype: torch.dtype) -> dict[str, Tensor]:
    return {str(place): torch.zeros(shape, dtype=dtype, device="meta") for place, shape in enumerate(SHAPES)}


def test_a_checkpoint_pins_little_more_than_it_holds(pinned: Pinned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    parts = ("weights", "exp_avg", "exp_avg_sq")
    shards = {f"{part}.{name}": Shard(one, ()) for part in parts for name, one in on_meta(torch.float32).items()}
    held, buffers = sum(shard.local.nbytes for shard in shards.values()), dict[str, Tensor]()
    copied = copy_to_host(shards, buffers)
    alone = sum(1 << (shard.local.nbytes - 1).bit_length() for shard in shards.values())
    assert held <= sum(pinned.blocks) < held + 2 * GIB < alone
    assert len(pinned.blocks) < 25
    assert {name: one.local.shape for name, one in copied.items()} == {n: s.local.shape for n, s in shards.items()}
    count = len(pinned.blocks)
    copy_to_host(shards, buffers)
    assert len(pinned.blocks) == count, "the next checkpoint has the same memory"


@pytest.mark.parametrize("way", ["sent", "collected"])
def test_weights_that_move_pin_little_more_than_they_are(
    pinned: Pinned, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "mark", lambda _: None)
    weights, held = on_meta(torch.bfloat16), 2 * sum(torch.Size(shape).numel() for shape in SHAPES)
    if way == "sent":
        begin_copy(HeldWeights.of([LocalWeight.of(name, one) for name, one in weights.items()], 0), torch.bfloat16)
    else:
        sizes = [one.nbytes for one in weights.values()]
        assert len([*collected(weights.items(), sizes, torch.device("meta"))]) == len(SHAPES)
    assert pinned.blocks == [GIB, GIB, GIB]
    assert held < 3 * GIB


def test_copies_on_the_host_hold_what_they_are_copies_of() -> None:
    shards = {str(n): Shard(torch.randn(n, 3).to(d), (0, 0)) for n, d in enumerate((torch.float32, torch.bfloat16) * 3)}
    found = copy_to_host(shards, {})
    assert all(torch.equal(found[name].local, shard.local) for name, shard in shards.items())
    starts = [one.local.data_ptr() for one in found.values() if one.local.numel()]
    assert len({*starts}) == len(starts)
