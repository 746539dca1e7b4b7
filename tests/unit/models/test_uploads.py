"""Tensors that go to an accelerator in one copy arrive as they were; the host's memory stands in for the device's."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from torch import Tensor

from leaderless.base.devices import indexed
from leaderless.models import uploads
from leaderless.models.uploads import (
    ALIGNMENT_BYTES,
    PAGE_BYTES,
    _read_together,
    _Upload,
    one_copy,
    placed,
    read_back,
)

CPU = torch.device("cpu")
TENSORS = [
    torch.arange(7),
    torch.tensor([[True, False], [False, True], [True, True]]),
    torch.tensor(2.5),
    torch.empty(0, dtype=torch.int32),
    torch.arange(12.0).view(3, 4).t(),
    torch.arange(5, dtype=torch.int32),
    torch.randn(3, dtype=torch.float64),
    torch.ones(9, dtype=torch.bfloat16),
]


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without memory that devices read."""
    monkeypatch.setattr(uploads, "can_pin", lambda _: False)


@pytest.mark.parametrize("page_bytes", [0, 2 * ALIGNMENT_BYTES, PAGE_BYTES])
def test_tensors_arrive_as_they_were(monkeypatch: pytest.MonkeyPatch, page_bytes: int) -> None:
    monkeypatch.setattr(uploads, "PAGE_BYTES", page_bytes)
    upload = _Upload(CPU)
    arrived = [upload.place(tensor) for tensor in TENSORS[:4]]
    upload.send()
    arrived += [upload.place(tensor) for tensor in TENSORS[4:]]
    upload.send()
    upload.send()  # nothing new
    for tensor, expected in zip(arrived, TENSORS, strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert torch.equal(tensor, expected)
    assert (len(upload._pages) == 1) == (page_bytes == PAGE_BYTES)


def test_tensors_come_back_as_they_were() -> None:
    for back, expected in zip(_read_together(TENSORS), TENSORS, strict=True):
        assert (back.dtype, back.shape) == (expected.dtype, expected.shape)
        assert torch.equal(back, expected)
    assert all(back is one for back, one in zip(read_back(*TENSORS), TENSORS, strict=True)), "they are on the host"


def test_a_tensor_may_be_changed_in_place_without_the_others() -> None:
    upload, weight = _Upload(CPU), torch.ones(2, requires_grad=True)
    first, second = upload.place(torch.ones(2)), upload.place(torch.ones(2))
    upload.send()
    product = (weight * first).sum()
    second.add_(1)
    product.backward()  # would raise if autograd saw a change of what it kept
    assert weight.grad is not None
    assert weight.grad.tolist() == [1, 1]


def test_blocks_within_a_block_send_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the outer one has collected, since a pass may begin there."""
    device, sent = torch.device("meta"), list[int]()

    class Recorded(_Upload):
        def place(self, tensor: Tensor) -> Tensor:
            self.waiting = getattr(self, "waiting", 0) + 1
            return tensor

        def send(self) -> None:
            sent.append(getattr(self, "waiting", 0))
            self.waiting = 0

    monkeypatch.setattr(uploads, "_Upload", Recorded)
    tensor = torch.ones(2)
    with one_copy(device):
        placed(tensor, device)
        with one_copy(device):
            placed(tensor, device)
        placed(tensor, device)
    assert sent == [2, 1]
    with pytest.raises(ValueError, match="bad"), one_copy(device):
        raise ValueError("bad")
    assert sent == [2, 1], "nothing is sent after an error"
    assert uploads._UNDER_WAY.get() is None
    with one_copy(CPU):
        assert placed(tensor, CPU) is tensor
    assert sent == [2, 1]
    assert placed(tensor, device).is_meta, "at once without a block"


def test_memory_that_the_device_reads_is_used_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = list[object]()
    empty = torch.empty

    def recorded(size: int, **options: object) -> Tensor:
        kinds.append(options.pop("pin_memory", None))
        return empty(size, **options)  # type: ignore[call-overload,no-any-return]

    monkeypatch.setattr(uploads, "can_pin", lambda kind: kind == "cpu")
    monkeypatch.setattr(cast("object", uploads.torch), "empty", recorded)
    _Upload(CPU).place(torch.ones(2))
    assert kinds == [None, True]


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is placed in a block within would be copied at once, and the host would wait."""
    sent, placed_there = list[torch.device](), list[Tensor]()

    class Recorded(_Upload):
        def place(self, tensor: Tensor) -> Tensor:
            placed_there.append(tensor)
            return tensor

        def send(self) -> None:
            sent.append(self.device)

    monkeypatch.setattr(uploads, "_Upload", Recorded)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    tensor, plain, first = torch.ones(2), torch.device("cuda"), torch.device("cuda", 1)
    with one_copy(plain):
        placed(tensor, first)
        with one_copy(first):
            placed(tensor, plain)
    assert len(placed_there) == 2
    assert sent == [first, first]
    assert [indexed(one) for one in (plain, first, CPU, torch.device("meta"))] == [
        first,
        first,
        CPU,
        torch.device("meta"),
    ]
