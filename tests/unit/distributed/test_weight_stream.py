"""Buckets of weights, their checksums, and the memory in which they are passed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Semaphore
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.distributed.remote.child_server import ChildServer
from leaderless.distributed.remote.messages import SharedMemory
from leaderless.distributed.remote.server_calls import EngineError
from leaderless.distributed.weights import buckets
from leaderless.distributed.weights.buckets import (
    HostStaging,
    LocalStaging,
    PackedWeight,
    checksum,
    checksums,
    make_buckets,
)
from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.external import vllm_engine

SHAPES = {"embedding": (50, 8), "bias": (3,), "scalar": (), "kernel": (7, 5)}


def weights(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_bytes", [64, 400, 1 << 20])
def test_every_weight_arrives_whole_whatever_the_size_of_buckets(dtype: torch.dtype, max_bytes: int) -> None:
    arrived: dict[str, Tensor] = {}
    sizes: list[int] = []
    for bucket in make_buckets(weights().items(), dtype, LocalStaging(torch.device("cpu")), max_bytes=max_bytes):
        sizes.append(len(bucket.data))
        assert len(bucket.weights) == 1 or len(bucket.data) <= max_bytes
        arrived |= {weight.name: weight.view(bucket.data).clone() for weight in bucket.weights}
    assert (len(sizes) == 1) == (max_bytes == 1 << 20)
    assert list(arrived) == list(SHAPES)
    for name, weight in weights().items():
        torch.testing.assert_close(arrived[name], weight.to(dtype), rtol=0, atol=0)


def test_what_a_model_has_besides_weights_comes_last_and_in_its_own_type() -> None:
    stream = WeightStream(iter(weights().items()), 3).followed_by({"choices": torch.tensor([1 / 3, 2.0])})
    staging = LocalStaging(torch.device("cpu"))
    arrived = {
        weight.name: weight.view(bucket.data).clone()
        for bucket in make_buckets(stream, torch.bfloat16, staging, max_bytes=64, exact=stream.exact)
        for weight in bucket.weights
    }
    assert [*arrived] == [*SHAPES, "choices"]
    assert arrived.pop("choices").tolist() == torch.tensor([1 / 3, 2.0]).tolist()
    assert {one.dtype for one in arrived.values()} == {torch.bfloat16}


def test_checksums_of_equal_weights_are_equal_whatever_was_in_the_memory_before() -> None:
    staging = LocalStaging(torch.device("cpu"))
    first = [checksum(bucket.data) for bucket in make_buckets(weights().items(), torch.float32, staging, max_bytes=400)]
    staging.room(400).fill_(255)
    assert [
        checksum(bucket.data) for bucket in make_buckets(weights().items(), torch.float32, staging, max_bytes=400)
    ] == first
    assert [
        checksum(bucket.data) for bucket in make_buckets(weights(1).items(), torch.float32, staging, max_bytes=400)
    ] != first


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
        monkeypatch.setattr(buckets, "CHECKSUM_WORDS", words)
        assert checksum(data) % 2**64 == expected


def test_memory_that_is_shared_is_found_by_its_place_and_leaves_nothing_behind() -> None:
    staging, memory = HostStaging(), SharedMemory()
    for seed, max_bytes in ((0, 400), (1, 4000)):
        for bucket in make_buckets(weights(seed).items(), torch.float32, staging, max_bytes=max_bytes):
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


def test_with_two_stagings_a_bucket_stays_until_the_next_one_is_there() -> None:
    stagings = [LocalStaging(torch.device("cpu")) for _ in range(2)]
    before, arrived, places = None, dict[str, Tensor](), set[int]()
    for bucket in make_buckets(weights().items(), torch.float32, *stagings, max_bytes=64):
        for one in (before, bucket):
            if one is not None:
                arrived |= {weight.name: weight.view(one.data).clone() for weight in one.weights}
        places.add(bucket.data.data_ptr())
        before = bucket
        for name, tensor in arrived.items():
            assert torch.equal(tensor, weights()[name]), name
    assert list(arrived) == list(SHAPES)
    assert len(places) >= 2


@dataclass
class StandIn:
    """A server that loads a bucket only when the next one, or the end of the stream, has been asked for."""

    asked: Semaphore
    fails_at: int = -1
    loaded: dict[str, Tensor] = field(default_factory=dict)
    sums: list[int] = field(default_factory=list)
    expected: list[int] | None = None
    places: list[object] = field(default_factory=list)
    num_loads: int = 0
    memory: SharedMemory = field(default_factory=SharedMemory)

    def call_numbered(self, path: str, body: dict[str, Any]) -> None:
        if path == "/finish_load":
            self.expected = body["expected"]
            return
        self.num_loads += 1
        assert self.asked.acquire(timeout=10), "nothing was packed meanwhile"
        if len(self.sums) == self.fails_at:
            raise EngineError("the server has failed")
        self.places.append(body["place"])
        data = self.memory.open(body["place"])[: body["bytes"]]
        self.sums.append(checksum(data))
        self.loaded |= {one["name"]: PackedWeight(**one).view(data).clone() for one in body["weights"]}


def load_into(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Load weights that each have a bucket to themselves."""
    monkeypatch.setattr(vllm_engine, "make_buckets", partial(make_buckets, max_bytes=8))

    def named() -> Iterator[tuple[str, Tensor]]:
        for place, one in enumerate(weights().items()):
            yield one
            if place:  # a bucket has been filled, and another weight is asked for
                server.asked.release()
        server.asked.release()

    settings = Mock(torch_dtype=torch.float32)
    one = vllm_engine.VllmServer("python", settings, torch.device("cpu"), cast("ChildServer", server))
    one.load(WeightStream(named(), 3))


def test_a_server_loads_a_bucket_while_the_next_one_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StandIn(Semaphore(0))
    load_into(server, monkeypatch)
    assert server.expected == server.sums
    assert len(server.sums) == len(SHAPES)
    assert server.places[0] != server.places[1], "they take turns"
    for name, tensor in weights().items():
        assert torch.equal(server.loaded[name], tensor)
    paths = {str(cast("Mapping[str, object]", place)["file"]) for place in server.places}
    assert not any(Path(path).exists() for path in paths)


@pytest.mark.parametrize("fails_at", range(4))
def test_a_bucket_that_a_server_does_not_load_ends_the_stream(fails_at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    server = StandIn(Semaphore(0), fails_at)
    with pytest.raises(EngineError, match="the server has failed"):
        load_into(server, monkeypatch)
    assert server.expected is None, "the weights are not used"
    assert server.num_loads == fails_at + 1, "each call to a server that hangs would wait as long as the first"


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
