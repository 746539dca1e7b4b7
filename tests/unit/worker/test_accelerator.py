"""What keeps an accelerator from computing a run is found before anything is loaded; the device is a stand-in."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.unit.recipes import make_recipe, plan_of, write_model

from leaderless.base import devices
from leaderless.config import RecipeError
from leaderless.worker.build import accelerator
from leaderless.worker.build.accelerator import check_accelerator, lacking_kernels, unfit_packages
from leaderless.worker.rank_info import RankInfo

Usage = namedtuple("Usage", "total used free")
Check = Callable[..., list[str]]
GPU = torch.device("cuda", 0)
VERSIONS = {"torch": "2.13.0+cu130", "triton": "3.7.0", "vllm": "0.33.0"}
NEEDED = {"torch": ['triton==3.7.0; sys_platform == "linux"', "numpy>=9"], "vllm": ["torch==2.13.0"]}


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """A function that checks rank 1 of two with a device, and returns warnings."""

    def use(
        capability: tuple[int, int] = (9, 0),
        *,
        compute_dtype: str = "bfloat16",
        local_rank: int = 0,
        shared: int = 16 << 30,
        sections: dict[str, object] | None = None,
        **versions: str,
    ) -> list[str]:
        module = SimpleNamespace(get_device_name=lambda _: "Fast 1")
        monkeypatch.setattr(torch, "get_device_module", lambda _: module)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "sm_100f", "compute_120"])
        monkeypatch.setattr(accelerator.shutil, "disk_usage", lambda _: Usage(shared, 0, shared))
        monkeypatch.setattr(accelerator, "version", lambda name: (VERSIONS | versions)[name])
        monkeypatch.setattr(accelerator, "requires", NEEDED.get)
        settings = {"models": {"policy": {"path": write_model(tmp_path), "compute_dtype": compute_dtype}}}
        settings |= sections or {}
        shown = list[str]()
        recipe, plan = make_recipe(**settings), plan_of("grpo", 2, **settings)
        check_accelerator(recipe, plan, RankInfo(1, 2, local_rank, 2), GPU, shown.append)
        return shown

    return use


def test_a_device_that_can_compute_is_accepted_without_a_word(check: Check) -> None:
    assert check() == []
    check_accelerator(make_recipe(), plan_of("grpo", 1), RankInfo.alone(), torch.device("cpu"), pytest.fail)


@pytest.mark.parametrize(
    ("features", "compute_dtype", "number"),
    [
        ("flags : avx2 fma", "bfloat16", 1),
        ("flags : avx2 fma", "float32", 0),
        ("flags : avx512f avx512_bf16", "bfloat16", 0),
        ("flags : amx_bf16 amx_tile", "bfloat16", 0),
        ("Features : asimd bf16", "bfloat16", 0),
    ],
)
def test_bfloat16_on_a_processor_without_units_for_it_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, features: str, compute_dtype: str, number: int
) -> None:
    monkeypatch.setattr(devices, "CPU_FEATURES", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(f"processor : 0\n{features}\n")
    settings = {"models": {"policy": {"path": write_model(tmp_path), "compute_dtype": compute_dtype}}}
    recipe, plan, shown = make_recipe(**settings), plan_of("grpo", 2, **settings), list[str]()
    for local_rank in (0, 1):
        place = RankInfo(local_rank, 2, local_rank, 2)
        check_accelerator(recipe, plan, place, torch.device("cpu"), shown.append)
    warning = (
        "models.policy.compute_dtype is bfloat16, but this CPU has no units for bfloat16, in which it takes 6 to 13 "
        "times as long as in float32: leave it out, or set it to float32"
    )
    assert shown == [warning] * number


def test_a_run_says_why_the_cpu_computes_it_although_there_are_devices(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(devices, "DEVICE_FOLDER", tmp_path)
    monkeypatch.setattr(devices, "CPU_FEATURES", tmp_path / "none")
    monkeypatch.setattr(devices, "version", lambda _: "2.13.0+cpu")
    for variable in devices.VISIBLE_DEVICES.values():
        monkeypatch.delenv(variable, raising=False)
    shown = list[str]()

    def check(local_rank: int = 0) -> list[str]:
        shown.clear()
        place = RankInfo(1, 2, local_rank, 2)
        check_accelerator(make_recipe(), plan_of("grpo", 2), place, torch.device("cpu"), shown.append)
        return shown

    assert check() == []
    for index in range(8):
        (tmp_path / f"nvidia{index}").touch()
    (warning,) = check()
    assert warning.startswith("the CPU computes this run: CUDA devices of this machine (8) are not used, since ")
    assert "is built for the CPU: install a build for CUDA" in warning
    assert check(local_rank=1) == [], "the first rank of the machine has said it"
    monkeypatch.setattr(devices, "version", lambda _: "2.13.0a0+git1")
    monkeypatch.setattr(torch.version, "cuda", None)
    assert check() == [warning], "a build from source"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert check() == []
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert check() == [], "the user wants it"
    (tmp_path / "davinci0").touch()
    (warning,) = check()
    assert (
        "NPUs of this machine (1) are not used, since torch_npu is not installed: install the one for torch " in warning
    )


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (9, 0), (10, 3), (12, 0), (12, 1)])
def test_kernels_run_on_later_processors_of_their_kind(check: Check, capability: tuple[int, int]) -> None:
    check(capability, compute_dtype="float32")
    assert lacking_kernels(GPU) == ""


@pytest.mark.parametrize("capability", [(6, 0), (7, 0), (11, 0)])
def test_a_device_that_torch_has_no_kernels_for_ends_the_run(check: Check, capability: tuple[int, int]) -> None:
    with pytest.raises(
        RuntimeError, match=r"^rank 1: torch .* no kernels for cuda:0 \(Fast 1\) .*sm_75.*: install a build"
    ):
        check(capability)


@pytest.mark.parametrize(
    ("architecture", "capability", "is_run"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (9, 1), False),
        ("compute_90a", (10, 0), False),
        ("compute_90", (10, 0), True),
        ("sm_90", (8, 9), False),
        ("sm_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("gfx942", (9, 4), True),
    ],
)
def test_code_with_features_of_one_processor_runs_there_alone(
    monkeypatch: pytest.MonkeyPatch, check: Check, architecture: str, capability: tuple[int, int], *, is_run: bool
) -> None:
    check()
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: [architecture])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert (lacking_kernels(GPU) == "") == is_run


def test_models_of_other_ranks_may_need_what_a_device_lacks(check: Check, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    models = {name: {"path": model, "compute_dtype": "float32"} for name in ("policy", "reference")}
    models["reference"]["compute_dtype"] = "bfloat16"
    sections = {"models": models, "algorithm": {"kl": {"coefficient": 0.1}}}
    assert check((7, 5), sections=sections | {"layout": {"reference": {"ranks": 0}}}) == []
    with pytest.raises(RecipeError, match=r"^models.reference.compute_dtype: bfloat16"):
        check((7, 5), sections=sections)


def test_a_device_without_bfloat16_is_refused_for_models_that_compute_in_it(check: Check) -> None:
    assert check((7, 5), compute_dtype="float32") == []
    with pytest.raises(
        RecipeError, match=r"^models.policy.compute_dtype: bfloat16, but cuda:0 \(Fast 1\) of rank 1 .*32"
    ):
        check((7, 5))


def test_little_shared_memory_is_named_once_on_each_machine(check: Check) -> None:
    (warning,) = check(shared=64 << 20)
    assert "has 64 MiB: start the container with --shm-size=16g" in warning
    assert check(shared=64 << 20, local_rank=1) == []


def test_packages_that_were_built_for_others_are_named(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    (warning,) = check(triton="3.8.0")
    assert warning.startswith(
        "kernels may not work: torch 2.13.0+cu130 was built for triton==3.7.0, and 3.8.0 is installed"
    )
    assert list(unfit_packages(["torch", "vllm"])) == [warning.removeprefix("kernels may not work: ")]
    assert check(triton="3.7.0+git1") == []
    assert check(torch="2.12.1+cu130") == [], "no vLLM is used"
    within = {"rollout": {"engine": "vllm"}}
    apart = {"roles": {"policy": {"rollout": {"external": {"python": "/opt/vllm/bin/python"}}}}}
    assert check(torch="2.12.1+cu130", sections=within | apart) == [], "it has packages of its own"
    (warning,) = check(torch="2.12.1+cu130", sections=within)
    (problem,) = unfit_packages(["vllm"])
    assert warning.endswith(problem)
    assert problem.endswith("2.12.1 is installed: install torch==2.13.0, or a vllm that was built for 2.12.1")

    def gone(_: str) -> str:
        raise PackageNotFoundError

    monkeypatch.setattr(accelerator, "version", gone)
    assert list(unfit_packages(["torch", "vllm"])) == []
