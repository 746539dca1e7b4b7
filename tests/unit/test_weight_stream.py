"""Buckets of weights, their checksums, and the memory in which they are passed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.rollout.apart import messages
from leaderless.rollout.apart.http import SharedMemory
from leaderless.rollout.apart.messages import checksum, checksums
from leaderless.rollout.weights import HostStaging, LocalStaging, make_buckets

SHAPES = {"embedding": (50, 8), "bias": (3,), "scalar": (), "kernel": (7, 5)}


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_bytes", [64, 400, 1 << 20])
def test_every_weight_arrives_whole_whatever_the_size_of_buckets(dtype: torch.dtype, max_bytes: int) -> None:
    arrived: dict[str, Tensor] = {}
    sizes: list[int] = []
    for bucket in make_buckets(weights().items(), dtype, LocalStaging(torch.device("cpu")), max_bytes):
        sizes.append(len(bucket.data))
        assert len(bucket.weights) == 1 or len(bucket.data) <= max_bytes
        arrived |= {weight.name: weight.view(bucket.data).clone() for weight in bucket.weights}
    assert (len(sizes) == 1) == (max_bytes == 1 << 20)
    assert list(arrived) == list(SHAPES)
    for name, weight in weights().items():
        torch.testing.assert_close(arrived[name], weight.to(dtype), rtol=0, atol=0)


def test_checksums_of_equal_weights_are_equal_whatever_was_in_the_memory_before() -> None:
    staging = LocalStaging(torch.device("cpu"))
    first = [checksum(bucket.data) for bucket in make_buckets(weights().items(), torch.float32, staging, 400)]
    staging.room(400).fill_(255)
    assert [checksum(bucket.data) for bucket in make_buckets(weights().items(), torch.float32, staging, 400)] == first
    assert [checksum(bucket.data) for bucket in make_buckets(weights(1).items(), torch.float32, staging, 400)] != first


@given(st.lists(st.integers(0, 255), min_size=8, max_size=64), st.data())
def test_a_checksum_sees_any_byte_that_changes(content: list[int], data: st.DataObject) -> None:
    whole = torch.tensor(content[: len(content) // 8 * 8], dtype=torch.uint8)
    place = data.draw(st.integers(0, len(whole) - 1))
    other = whole.clone()
    other[place] = data.draw(st.integers(0, 255).filter(lambda value: value != int(whole[place])))
    assert checksum(whole) != checksum(other)


def test_a_checksum_does_not_depend_on_how_much_is_added_up_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.arange(8 * 100, dtype=torch.int64).to(torch.uint8)
    expected = sum(word * (2 * i + 1) for i, word in enumerate(data.view(torch.int64).tolist())) % 2**64
    for words in (7, 100, 1 << 22):
        monkeypatch.setattr(messages, "CHECKSUM_WORDS", words)
        assert checksum(data) % 2**64 == expected


def test_memory_that_is_shared_is_found_by_its_place_and_leaves_nothing_behind() -> None:
    staging, memory = HostStaging(), SharedMemory()
    for seed, max_bytes in ((0, 400), (1, 4000)):
        for bucket in make_buckets(weights(seed).items(), torch.float32, staging, max_bytes):
            place = staging.place()
            assert isinstance(place, Mapping)
            data = memory.open(place)[: len(bucket.data)]
            assert torch.equal(data, bucket.data)
    memory.close()
    assert Path(str(place["file"])).exists()
    staging.close()
    assert not Path(str(place["file"])).exists()
    assert len(staging.room(8)) == 8
    staging.close()


def test_memory_of_the_same_path_is_not_taken_for_what_it_was_before() -> None:
    memory, seen, paths = SharedMemory(), list[int](), set[str]()
    for value in (1, 2):
        staging = HostStaging()
        staging.room(8).fill_(value)
        place = staging.place()
        assert isinstance(place, Mapping)
        paths.add(str(place["file"]))
        seen.append(int(memory.open(place)[0]))
        staging.close()
    assert (seen, len(paths)) == ([1, 2], 1)


class Launches(TorchDispatchMode):
    """Counts operations that start a kernel."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += not func.is_view and func is not torch.ops.aten.empty.memory_format
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("mebibytes", "most"), [(32, 8), (256, 50)])
def test_a_checksum_on_a_device_starts_few_kernels(mebibytes: int, most: int) -> None:
    """With parts as small as on a CPU, there were 383 and 3,071; 7B has 453 buckets of 32 MiB."""
    with Launches() as launches:
        checksums(torch.empty(1, mebibytes << 20, dtype=torch.uint8, device="meta"))
    assert 0 < launches.count <= most
