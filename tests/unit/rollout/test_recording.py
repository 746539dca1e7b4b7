"""Passes are recorded as CUDA graphs where they can be, and nothing is left behind where they cannot."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
from tests.fake_cuda import FakeCuda
from tests.unit.rollout.test_native_engine import assert_same, sample, tiny_engine
from tests.unit.rollout.test_paged_engine import paged_engine, tiny_lm
from torch import Tensor

from leaderless.distributed.weights.stream import WeightStream
from leaderless.rollout.native.cuda_graph import BucketGraphs, record


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.mark.parametrize("is_collecting", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_a_recording_leaves_stream_and_collection_as_they_were(
    cuda: FakeCuda, fails: bool, is_collecting: bool
) -> None:
    cuda.fails = fails
    before = gc.isenabled()
    try:
        (gc.enable if is_collecting else gc.disable)()
        if fails:
            with pytest.raises(RuntimeError, match="previous error"):
                record(lambda: None, [])
        else:
            first = record(lambda: None, [])
            record(lambda: None, [first])
        assert gc.isenabled() == is_collecting
    finally:
        (gc.enable if before else gc.disable)()
    assert cuda.stream == "default"
    assert not cuda.is_collecting
    assert {*cuda.modes} == {"thread_local"}
    assert cuda.num_released == 0, "pinned memory and what torch holds stay where they are"


def test_memory_that_torch_does_not_use_is_released_only_for_a_recording_without_enough(cuda: FakeCuda) -> None:
    cuda.fails, cuda.reason = True, torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        record(lambda: None, [])
    assert (len(cuda.modes), cuda.num_released) == (2, 1)
    cuda.has_enough = True
    done = list[int]()
    record(lambda: done.append(1), [])
    assert (len(cuda.modes), cuda.num_released, done) == (4, 2, [1])


def test_memory_that_torch_does_not_use_is_released_before_a_recording_where_little_is_free(cuda: FakeCuda) -> None:
    cuda.fails, cuda.has_enough, cuda.free_bytes = True, True, 1 << 29
    record(lambda: None, [])
    assert (len(cuda.modes), cuda.num_released) == (1, 1), "it did not fail first"


def test_a_recording_whose_work_fails_is_ended_with_the_error_of_the_work(cuda: FakeCuda) -> None:
    def work() -> None:
        assert cuda.num_open == 1
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        record(work, [])
    assert (cuda.num_open, cuda.stream, len(cuda.modes)) == (0, "default", 1)


def test_a_pass_in_which_the_host_waits_is_not_recorded(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, engine = sample(tiny_engine(), 12), paged_engine()
    forward, modes = engine._pass, list[str]()

    def waits(*args: object, **options: object) -> Tensor:
        modes.append(cuda.sync_mode)
        result = forward(*args, **options)  # type: ignore[arg-type]
        cuda.wait()
        return result

    monkeypatch.setattr(engine, "_pass", waits)
    engine._passes = BucketGraphs(is_enabled=True)
    with pytest.warns(
        UserWarning, match="no CUDA graph can be recorded: called a synchronizing CUDA operation"
    ) as said:
        assert_same(sample(engine, 12), expected)
    assert len(said) == 1
    assert modes.count("error") == 1
    assert cuda.sync_mode == "default"
    assert cuda.modes == [], "nothing was recorded"


def test_passes_that_memory_is_too_small_to_record_are_given_up(cuda: FakeCuda) -> None:
    """They are not tried again with new weights."""
    cuda.fails, cuda.reason = True, torch.OutOfMemoryError("CUDA out of memory")
    expected, engine = sample(tiny_engine(), 12), paged_engine()
    engine._passes = BucketGraphs(is_enabled=True)
    weights = {name: weight.detach().clone() for name, weight in tiny_lm().model.named_parameters()}
    numbers = list[int]()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for version in range(1, 13):
            engine.load_weights(WeightStream(iter(weights.items()), version))
            assert_same(sample(engine, 12), expected)
            numbers.append(len(cuda.modes))
    (warning,) = said
    assert "too little memory to record passes of some sizes: CUDA out of memory; lower " in str(warning.message)
    assert numbers[-1] == numbers[-4] <= 2 * 3 * 4, "three for each number of rows, tried twice each"
    assert not engine._passes._failures.is_final(999)


def test_memory_that_runs_out_before_a_recording_is_no_reason_to_record_nothing(cuda: FakeCuda) -> None:
    graphs = BucketGraphs(is_enabled=True)

    def compute() -> None:
        if cuda.sync_mode == "error":
            raise torch.OutOfMemoryError("CUDA out of memory")

    graphs.run(1, compute)
    with pytest.raises(torch.OutOfMemoryError):
        graphs.run(1, compute)
    assert graphs.is_enabled
    assert cuda.sync_mode == "default"
