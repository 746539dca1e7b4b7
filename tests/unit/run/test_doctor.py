"""The doctor notices what it should, and says what to do."""

from __future__ import annotations

import errno
import json
import resource
import socket
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from leaderless.base import devices as device
from leaderless.base import versions
from leaderless.cli.main import app
from leaderless.run.doctor import devices, machine
from leaderless.run.doctor.collective_checks import NetworkLink, _judge
from leaderless.run.doctor.finding import DoctorFinding, differences, merged, run_checks
from leaderless.run.doctor.machine import folder_check
from leaderless.worker.build import accelerator

Usage = namedtuple("Usage", "total used free")


def only(checks: list[Callable[..., None]], name: str) -> DoctorFinding:
    (found,) = [finding for finding in run_checks("here", checks) if finding.name == name]
    return found


def test_a_machine_that_runs_the_tests_has_no_errors() -> None:
    found = run_checks("here", machine.CHECKS)
    assert not [finding for finding in found if finding.level == "error"]
    assert {"interpreter", "packages", "torch build", "gloo", "open files", "shared memory"} <= {
        one.name for one in found
    }
    assert all(finding.remedy for finding in found if finding.level != "ok")


def test_packages_that_are_missing_or_old_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = ["numpy>=999", "no-such-package>=1", "torch>=1", 'pytest>=999; extra == "test"']
    monkeypatch.setattr(versions, "requires", lambda _: needed)
    found = only([machine.check_python], "packages")
    assert found.level == "error"
    assert "numpy is " in found.value
    assert "must be >=999; no-such-package is missing" in found.value
    assert "torch" not in found.value
    assert "pytest" not in found.value


@pytest.mark.parametrize(("files", "level"), [(100, "error"), (1024, "warning"), (65536, "ok"), (-1, "ok")])
def test_few_open_files_are_noticed(monkeypatch: pytest.MonkeyPatch, files: int, level: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
    found = only([machine.check_limits], "open files")
    assert found.level == level
    assert ("ulimit -n" in found.remedy) == (level != "ok")


def test_locked_memory_matters_with_fast_networks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "INFINIBAND", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    assert only([machine.check_limits], "locked memory").level == "warning"


@pytest.mark.parametrize(("size", "level"), [(64 << 20, "warning"), (16 << 30, "ok")])
def test_a_small_shared_memory_is_noticed(monkeypatch: pytest.MonkeyPatch, size: int, level: str) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(size, 0, size))
    assert only([machine.check_shared_memory], "shared memory").level == level


def test_a_quota_below_the_cores_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "CGROUP", tmp_path)
    assert only([machine.check_cores], "cores").level == "ok"
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    found = only([machine.check_cores], "cores")
    assert (found.level, "a control group allows 0.5" in found.value) == ("warning", True)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert only([machine.check_cores], "cores").level == "ok"


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """Two stand-ins for GPUs that can do everything, on a machine with a build of torch for CUDA."""
    for index in range(2):
        (tmp_path / f"nvidia{index}").touch()
    for module in (device, devices):
        monkeypatch.setattr(module, "DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(device, "version", lambda _: "2.13.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv(devices.NO_PEERS, raising=False)
    ones = torch.ones
    fakes = SimpleNamespace(
        is_available=lambda: True,
        device_count=lambda: 2,
        set_device=lambda _: None,
        get_device_name=lambda _: "Fast 1",
        capabilities=[(9, 0), (9, 0)],
        free=[79 << 30, 79 << 30],
        wrong=[],
        apart=[],
    )
    fakes.mem_get_info = lambda one: (fakes.free[one.index], 80 << 30)
    monkeypatch.setattr(torch, "get_device_module", lambda _: fakes)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda one: fakes.capabilities[one.index])
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90"])
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda *pair: pair not in fakes.apart)
    monkeypatch.setattr(torch, "ones", lambda *size, device: ones(*size) * (1 + (device.index in fakes.wrong)))
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda _: True)
    monkeypatch.setattr(accelerator, "requires", lambda _: [])
    return fakes


def bad_findings() -> dict[str, DoctorFinding]:
    """What is wrong with the devices of this machine, by name."""
    found = [one for one in merged(run_checks("here", [machine.check_devices])) if one.level != "ok"]
    assert len({one.name for one in found}) == len(found)
    assert all(one.remedy for one in found)
    return {one.name: one for one in found}


def test_devices_that_can_compute_have_one_line_for_each_check(gpus: SimpleNamespace) -> None:
    assert bad_findings() == {}
    found = {one.name: one.value for one in merged(run_checks("here", [machine.check_devices]))}
    assert found["devices"] == "2 cuda: Fast 1"
    assert {"numbers", "device memory", "product of matrices", "backend", "device to device", "gloo"} <= found.keys()
    gpus.device_count = lambda: 1
    assert "device to device" not in {one.name for one in run_checks("here", [machine.check_devices])}


def test_a_driver_that_is_too_old_is_an_error_with_a_remedy(
    gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nhelp")

    gpus.is_available, gpus.init = lambda: False, fail
    (found,) = bad_findings().values()
    assert (found.name, found.level) == ("devices", "error")
    assert found.value.endswith(
        "(CUDA 13.0) cannot use: The NVIDIA driver on your system is too old (found version 12040)."
    )
    assert found.remedy.startswith("install a build of torch for this driver, or set CUDA_VISIBLE_DEVICES to nothing")
    assert "gloo" in {one.name for one in run_checks("here", [machine.check_devices])}


def test_each_device_is_checked(gpus: SimpleNamespace) -> None:
    gpus.capabilities[1] = (7, 5)
    found = bad_findings()["numbers"]
    assert (found.level, found.value) == ("warning", "no bfloat16 on cuda:1 (Fast 1)")
    assert "compute_dtype: float32" in found.remedy
    gpus.capabilities[1] = (7, 0)
    found = bad_findings()["kernels"]
    assert found.level == "error"
    assert "no kernels for cuda:1 (Fast 1) of compute capability 7.0, only sm_75, sm_80, sm_90" in found.value
    assert found.remedy.startswith("install a build of torch that has them")
    gpus.capabilities[1] = (9, 0)
    gpus.wrong.append(1)
    found = bad_findings()["product of matrices"]
    assert (found.level, found.value) == ("error", "2048 instead of 512 on cuda:1")


def test_memory_of_a_device_that_something_else_uses_is_noticed(gpus: SimpleNamespace) -> None:
    gpus.free[1] = 12 << 30
    found = bad_findings()["device memory"]
    assert (found.level, found.value) == ("warning", "12.0 of 80.0 GiB are free on cuda:1")
    assert "nvidia-smi" in found.remedy


def test_the_doctor_says_that_a_processor_has_no_units_for_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (device, devices):
        monkeypatch.setattr(module, "DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(device, "CPU_FEATURES", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text("flags : avx2")
    found = only([machine.check_devices], "numbers")
    assert found.value.startswith("float32; this CPU has no units for bfloat16")
    (tmp_path / "cpuinfo").write_text("flags : avx512_bf16")
    assert "numbers" not in {one.name for one in run_checks("here", [machine.check_devices])}


def test_devices_that_do_not_reach_each_other_are_noticed(
    gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.apart = [(0, 1), (1, 0)]
    found = bad_findings()["device to device"]
    assert (found.level, found.value) == ("warning", "2 pairs cannot reach each other, such as cuda:0 and cuda:1")
    gpus.apart = []
    monkeypatch.setenv(devices.NO_PEERS, "0")
    assert bad_findings() == {}
    monkeypatch.setenv(devices.NO_PEERS, "1")
    found = bad_findings()["device to device"]
    assert found.value == "NCCL_P2P_DISABLE=1"
    assert "unset NCCL_P2P_DISABLE" in found.remedy


def test_a_kernel_package_for_another_torch_is_noticed(gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "triton": "3.8.0"}
    monkeypatch.setattr(accelerator, "requires", {"torch": ["triton==3.7.0"]}.get)
    monkeypatch.setattr(accelerator, "version", versions.__getitem__)
    monkeypatch.setitem(versions, "vllm", "0.33.0")
    found = bad_findings()["kernels"]
    assert (found.level, found.value) == (
        "warning",
        "torch 2.13.0 was built for triton==3.7.0, and 3.8.0 is installed",
    )
    assert found.remedy.startswith("install triton==3.7.0")


def test_accelerators_that_are_not_used_are_noticed(gpus: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus.is_available = lambda: False
    monkeypatch.setattr(device, "version", lambda _: "2.13.0+cpu")
    (found,) = bad_findings().values()
    assert found.value.startswith("the CPU; CUDA devices of this machine (2) are not used, since torch ")
    assert found.remedy.startswith("install a build for CUDA")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (found,) = bad_findings().values()
    assert (found.level, found.value) == ("warning", "the CPU; 2 accelerators are hidden")
    assert found.remedy.startswith("unset CUDA_VISIBLE_DEVICES")


@pytest.mark.parametrize(
    ("addresses", "level"),
    [(["127.0.1.1"], "warning"), (["10.0.0.3"], "ok"), (["127.0.0.1", "10.0.0.3"], "ok"), ([], "warning")],
)
def test_a_host_name_that_others_cannot_use_is_noticed(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], level: str
) -> None:
    def look_up(*_: object) -> list[Any]:
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    found = only([machine.check_host_name], "host name")
    assert found.level == level
    assert ("GLOO_SOCKET_IFNAME" in found.remedy) == (level != "ok")


def test_a_port_in_use_is_an_error() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        found = only([machine.port_check(port)], "port")
    assert (found.level, found.value.partition(" (")[0]) == ("error", f"{port} cannot be used")
    assert "another port" in found.remedy


def test_a_folder_is_tried_and_left_as_it_was(tmp_path: Path) -> None:
    found = run_checks("here", [folder_check(tmp_path / "runs", is_shared=False)])
    assert [finding.name for finding in found] == [
        "folder",
        "disk",
        "renaming",
        "small writes",
        "large writes",
        "clock of files",
    ]
    assert not [finding for finding in found if finding.level == "error"]
    assert not list(tmp_path.iterdir())


def test_problems_of_a_folder_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = [folder_check(tmp_path, is_shared=True)]
    monkeypatch.setattr(machine, "_file_system", lambda _: "ext4")
    assert "other machines do not see it" in only(checks, "folder").remedy
    monkeypatch.setattr(machine, "_file_system", lambda _: "nfs4")
    assert only(checks, "folder").level == "ok"
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: Usage(1, 1, 1 << 30))
    assert only(checks, "disk").level == "warning"
    monkeypatch.setattr(machine, "SLOW_S", 0.0)
    assert only(checks, "small writes").level == "warning"
    monkeypatch.setattr(machine, "SLOW_MIB_PER_S", float("inf"))
    assert only(checks, "large writes").level == "warning"
    real = machine.time.time
    monkeypatch.setattr(machine.time, "time", lambda: real() - 60)
    assert "differs from this machine's by +60" in only(checks, "clock of files").value
    monkeypatch.setattr(Path, "replace", lambda path, target: target.write_bytes(path.read_bytes()))
    assert only(checks, "renaming").level == "error"
    monkeypatch.setattr(machine.os, "access", lambda *_: False)
    assert only(checks, "writing").level == "error"


def test_a_check_that_fails_is_an_error_itself() -> None:
    def check_nothing(findings: object) -> None:
        raise OSError(errno.EIO, "broken")

    (found,) = run_checks("here", [check_nothing])
    assert (found.name, found.level, "broken" in found.value) == ("nothing", "error", True)


def test_the_same_finding_of_several_places_is_one() -> None:
    found = merged(
        [
            DoctorFinding("a", "1", places=("x",)),
            DoctorFinding("b", "2", "error", "r", ("x",)),
            DoctorFinding("a", "1", places=("y",)),
        ]
    )
    assert found == [DoctorFinding("b", "2", "error", "r", ("x",)), DoctorFinding("a", "1", places=("x", "y"))]
    assert DoctorFinding.from_json(json.loads(json.dumps(found[0].to_json()))) == found[0]


def test_machines_that_differ_are_named_the_few_first() -> None:
    found = list(differences("torch", {"a": "2.12", "b": "2.13", "c": "2.12"}, "install the same"))
    assert [(one.value, one.level, one.places) for one in found] == [
        ("2.13", "error", ("b",)),
        ("2.12", "error", ("a", "c")),
    ]
    assert [one.level for one in differences("torch", {"a": "1", "b": "1"}, "")] == ["ok"]


@pytest.mark.parametrize(
    ("link", "bad"),
    [
        (NetworkLink(1e-4, 5000, 0.01), set()),
        (NetworkLink(0.02, 5000, 0), {"latency"}),
        (NetworkLink(1e-4, 12, 0), {"bandwidth"}),
        (NetworkLink(1e-4, 5000, -40), {"clocks"}),
    ],
)
def test_a_slow_network_and_wrong_clocks_are_noticed(link: NetworkLink, bad: set[str]) -> None:
    found = _judge("a-b", link)
    assert {one.name for one in found if one.level == "warning"} == bad
    assert all(bool(one.remedy) == (one.name in bad) for one in found)


def test_the_command_prints_a_table_or_json_and_fails_on_errors(tmp_path: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["doctor", str(tmp_path), "--json"])
    found = json.loads(result.output)
    assert {finding["level"] for finding in found} <= {"ok", "warning", "error"}
    has_errors = any(finding["level"] == "error" for finding in found)
    assert result.exit_code == int(has_errors)
    with socket.create_server(("", 0)) as server:
        result = runner.invoke(app, ["doctor", str(tmp_path), "--rendezvous", f"here:{server.getsockname()[1]}"])
    assert result.exit_code == 1
    assert "cannot be used" in " ".join(result.output.split())
    assert "1 errors" in result.output
    assert runner.invoke(app, ["doctor", "--nodes", "2:1", "--rendezvous", "a:1"]).exit_code == 2
