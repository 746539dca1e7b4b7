"""The device of a rank, on machines with and without accelerators that torch can use."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
import torch

from leaderless.base import devices
from leaderless.base.devices import (
    can_pin,
    cores_left,
    find_accelerator,
    host_memory_trimmed,
    own_device_environment,
    setup_device,
    threads_of_workers,
)
from leaderless.config.models import ModelConfig
from leaderless.run import stage_profile

pytestmark = pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Restores the number of threads with which other tests compute."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def device_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of device files, on a machine with a build of torch for CUDA."""
    monkeypatch.setattr(devices, "DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(devices, "version", Mock(return_value="2.13.0"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for variable in devices.VISIBLE_DEVICES.values():
        monkeypatch.delenv(variable, raising=False)
    return tmp_path


@pytest.mark.parametrize(("num_cores", "num_ranks", "expected"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (2, 4, 1)])
def test_the_ranks_of_a_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_ranks: int, expected: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    torch.set_num_threads(3)
    assert setup_device(0, num_ranks).backend == "gloo"
    assert torch.get_num_threads() == expected


def test_the_number_of_threads_is_the_users_where_the_environment_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    torch.set_num_threads(3)  # as torch does when it is loaded
    setup_device(0, 1)
    assert torch.get_num_threads() == 3


def test_processes_next_to_a_rank_leave_it_fewer_threads_unless_they_are_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.delenv("LEADERLESS_SHARE", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    given = threads_of_workers(2)
    assert given["OMP_NUM_THREADS"] == "4"
    torch.set_num_threads(4)  # as torch does when it is loaded
    for variables, num_processes, expected in ((given, 1, 3), (given, 9, 1), ({}, 3, 1), ({}, 0, 4)):
        with monkeypatch.context() as inner:
            for name, value in variables.items():
                inner.setenv(name, value)
            with cores_left(num_processes):
                assert torch.get_num_threads() == expected
        assert torch.get_num_threads() == 4
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads_of_workers(2) == {}
    with cores_left(3):
        assert torch.get_num_threads() == 4


@pytest.mark.parametrize(("num_cores", "num_ranks", "expected"), [(128, 8, 16), (128, 1, 32), (2, 4, 1)])
def test_the_ranks_of_a_machine_share_its_cores_when_they_compile(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_ranks: int, expected: int
) -> None:
    from torch._inductor import config

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)))
    monkeypatch.setenv(devices.COMPILERS_VARIABLE, "5")
    with config.patch(compile_threads=7):
        setup_device(0, num_ranks)
        assert (os.environ[devices.COMPILERS_VARIABLE], config.compile_threads) == ("5", 7), "the user has set it"
        monkeypatch.delenv(devices.COMPILERS_VARIABLE)
        setup_device(0, num_ranks)
        assert config.compile_threads == config.decide_compile_threads() == expected


def test_models_compute_in_bfloat16_where_there_is_an_accelerator(
    device_files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_accelerator() is None
    assert ModelConfig(path="m").compute_dtype == "float32"
    (device_files / "nvidia0").touch()
    assert find_accelerator() == "cuda"
    assert ModelConfig(path="m").compute_dtype == "bfloat16"
    assert ModelConfig(path="m", compute_dtype="float32").compute_dtype == "float32"
    monkeypatch.setattr(devices, "version", Mock(return_value="2.13.0+cpu"))
    assert ModelConfig(path="m").compute_dtype == "float32", "a build of torch for the CPU"


@pytest.fixture
def rocm(device_files: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of device files, on a machine with a build of torch for ROCm whose number does not say so."""
    package = device_files / "torch"
    package.mkdir()
    (package / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '7.0.2'\n")
    monkeypatch.setattr(devices, "version", Mock(return_value="2.13.0+git684f6f2"))
    monkeypatch.setattr(devices, "find_spec", lambda _: SimpleNamespace(origin=str(package / "__init__.py")))
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.version, "hip", "7.0.2")
    monkeypatch.delenv("HIP_VISIBLE_DEVICES", raising=False)
    return device_files


def test_an_amd_gpu_is_an_accelerator_for_a_build_for_rocm(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (rocm / "nvidia0").touch()
    assert find_accelerator() is None, "this torch cannot use it"
    (rocm / "kfd").touch()
    assert find_accelerator() == "cuda"
    assert ModelConfig(path="m").compute_dtype == "bfloat16"
    with pytest.raises(RuntimeError, match=r"an AMD GPU that torch .*\(ROCm 7.0.2\) cannot use: .*; add this user"):
        setup_device(0, 1)
    rank_device: torch.device = SimpleNamespace(type="cuda", index=1)  # type: ignore[assignment]
    assert own_device_environment(rank_device) == {"CUDA_VISIBLE_DEVICES": "1"}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "4,6")
    assert own_device_environment(rank_device) == {"HIP_VISIBLE_DEVICES": "6"}, "the other one would have no effect"
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert setup_device(0, 1).device.type == "cpu", "the user wants it"


def test_an_amd_gpu_is_none_for_a_build_for_cuda(device_files: Path) -> None:
    (device_files / "kfd").touch()
    assert find_accelerator() is None
    assert setup_device(0, 1).device.type == "cpu"


@pytest.mark.parametrize(("started", "number", "kind"), [(0, 2, "cuda"), (0, 0, None), (9, 2, None)])
def test_a_gpu_in_the_subsystem_of_windows_is_found_by_its_driver(
    device_files: Path, monkeypatch: pytest.MonkeyPatch, started: int, number: int, kind: str | None
) -> None:
    """The only device file there is that of all GPUs, of whichever maker."""

    def count(place: Any) -> int:
        place._obj.value = number
        return 0

    asked = list[str]()
    driver = SimpleNamespace(nvmlInit_v2=lambda: started, nvmlDeviceGetCount_v2=count)
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: (asked.append(name), driver)[1])
    monkeypatch.setattr(stage_profile, "DEVICE_FOLDER", device_files)
    assert find_accelerator() is None
    assert asked == []
    assert not stage_profile.has_accelerator()
    (device_files / "dxg").touch()
    assert stage_profile.has_accelerator()
    assert find_accelerator() == kind
    assert asked == ["libnvidia-ml.so.1"]
    assert ModelConfig(path="m").compute_dtype == ("float32" if kind is None else "bfloat16")
    monkeypatch.setattr(devices.ctypes, "CDLL", Mock(side_effect=OSError("no such library")))
    assert find_accelerator() is None


def test_a_cuda_device_that_torch_cannot_use_ends_the_run(device_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert setup_device(0, 1).device.type == "cpu"
    (device_files / "nvidia0").touch()
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError("the driver is too old (found 12040)\nhelp")))
    with pytest.raises(RuntimeError, match=r"CUDA 13.0\) cannot use: the driver is too old \(found 12040\); install"):
        setup_device(0, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert setup_device(0, 1).device.type == "cpu", "the user wants it"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert setup_device(0, 1).device.type == "cpu", "this torch is built without CUDA"


@pytest.mark.parametrize(
    ("num_devices", "visible", "local_rank", "index"),
    [(8, None, 5, 5), (1, "3", 5, 0), (1, None, 0, None), (2, "0,1", 5, None)],
)
def test_each_rank_gets_a_device(
    monkeypatch: pytest.MonkeyPatch, num_devices: int, visible: str | None, local_rank: int, index: int | None
) -> None:
    chosen = Mock()
    module = SimpleNamespace(is_available=lambda: True, device_count=lambda: num_devices, set_device=chosen)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if index is None:
        with pytest.raises(RuntimeError, match=rf"8 workers on a machine with {num_devices} cuda devices"):
            setup_device(local_rank, 8)
    else:
        assert setup_device(local_rank, 8).device == torch.device("cuda", index)
        chosen.assert_called_once_with(index)


@pytest.mark.parametrize(("kind", "variable"), [("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")])
def test_an_engine_sees_the_device_of_its_rank_alone(monkeypatch: pytest.MonkeyPatch, kind: str, variable: str) -> None:
    rank_device: torch.device = SimpleNamespace(type=kind, index=1)  # type: ignore[assignment]
    monkeypatch.delenv(variable, raising=False)
    assert own_device_environment(rank_device) == {variable: "1"}
    monkeypatch.setenv(variable, "4,6")
    assert own_device_environment(rank_device) == {variable: "6"}
    assert own_device_environment(torch.device("cpu")) == {}


def test_an_npu_that_torch_cannot_use_ends_the_run(device_files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (device_files / "davinci0").touch()
    assert setup_device(0, 1).device.type == "cpu", "no torch_npu is installed"
    monkeypatch.setattr(devices, "find_spec", lambda name: name == "torch_npu")
    with pytest.raises(RuntimeError, match=r"an NPU that torch .* cannot use: No module named 'torch_npu'; run "):
        setup_device(0, 1)
    module, load = SimpleNamespace(is_available=lambda: False, init=Mock(side_effect=OSError("no driver\n"))), Mock()
    monkeypatch.setattr(devices, "import_module", load)
    whole = torch.get_device_module
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module if kind == "npu" else whole(kind))
    with pytest.raises(RuntimeError, match=r"cannot use: no driver; run CANN's set_env.sh"):
        setup_device(0, 1)
    load.assert_called_with("torch_npu")
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "")
    assert setup_device(0, 1).device.type == "cpu", "the user wants it"


def test_a_profile_describes_the_accelerator_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of another kind than CUDA, and the host where devices are hidden, or torch is built for the CPU."""
    monkeypatch.setattr(stage_profile, "has_accelerator", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", Mock(side_effect=AssertionError("not built with CUDA")))
    assert stage_profile.this_machine(1).accelerator is None
    properties = SimpleNamespace(name="Ascend 910B", total_memory=64 << 30)
    module = SimpleNamespace(is_available=lambda: True, get_device_properties=lambda _: properties)
    whole = torch.get_device_module
    monkeypatch.setattr(devices, "import_module", Mock())
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module if kind == "npu" else whole(kind))
    found = stage_profile.this_machine(8)
    assert (found.accelerator, found.memory_gib) == ("Ascend 910B", 64)


def test_no_memory_is_pinned_for_a_cpu_or_for_what_torch_has_no_module_of() -> None:
    assert not can_pin("cpu")
    assert not can_pin("meta")


def make_gaps() -> list[torch.Tensor]:
    """Tensors of 100 MiB that are freed, but for a few that lie between them."""
    tensors = [torch.zeros(25_000) for _ in range(1000)]
    return tensors[::50]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have other heaps")
def test_gaps_in_the_heap_are_returned_while_the_cpu_computes() -> None:
    for kind, is_returned in (("meta", False), ("cpu", True)):
        with host_memory_trimmed(torch.device(kind)):
            kept, process = make_gaps(), psutil.Process()
            before, until_s = process.memory_info().rss, time.monotonic() + (20 if is_returned else 1)
            while process.memory_info().rss > before - (60 << 20) and time.monotonic() < until_s:
                time.sleep(0.05)
            assert (process.memory_info().rss <= before - (60 << 20)) == is_returned, len(kept)
