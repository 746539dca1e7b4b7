"""Inputs of layers come back as they were, from a file and through the streams of a device."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from leaderless.models.input_memory import InputMemory, InputsInFile, InputsOnHost


@pytest.fixture(params=["file", "host"])
def memory(request: pytest.FixtureRequest, tmp_path: Path) -> InputMemory:
    return InputsInFile(tmp_path) if request.param == "file" else InputsOnHost(torch.device("cpu"))


def test_inputs_come_back_in_any_order_and_more_than_once(memory: InputMemory) -> None:
    values = [torch.randn(3, 5 + number).to(dtype) for number, dtype in enumerate((torch.float32, torch.bfloat16) * 3)]
    copies = [value.clone() for value in values]
    kept = [memory.keep(value) for value in values]
    for value in values:
        value.zero_()
    for place in (5, 4, 3, 0, 1, 2, 2, 5):
        assert torch.equal(kept[place].fetch(), copies[place])


def test_a_file_begins_anew_when_nothing_of_it_is_kept(tmp_path: Path) -> None:
    memory = InputsInFile(tmp_path)
    for _ in range(3):
        kept = [memory.keep(torch.ones(1 << 10)) for _ in range(4)]
        assert memory._end == 4 * 4096
        assert all(one.fetch().all() for one in kept)
        del kept
        gc.collect()
        assert memory._end == 0
