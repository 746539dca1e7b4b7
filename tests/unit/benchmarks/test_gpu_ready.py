"""A machine with a GPU before anything runs on it: what it lacks, wheels, compiled kernels, and sizes that fit."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import forking

sys.path.append(str(Path(__file__).resolve().parents[3] / "benchmarks"))  # as when they are run
import gpu_call
import gpu_needs
import gpu_probe
import gpu_ready
from gpu_call import Call
from gpu_machine import PRESETS, Machine
from gpu_plan import planned_memory
from leaderless.planner.memory.rank import CONTEXT_BYTES

GIB = 1 << 30
GOOD: dict[str, Any] = {
    "python": "3.12.3",
    "packages": {"torch": "2.11.0+cu130", "transformers": "5.17.0", "triton": "3.6.0", "numpy": "2.5.2"},
    "device_files": 1,
    "nvcc": "/usr/local/cuda/bin/nvcc",
    "ptxas": "/site-packages/triton/backends/nvidia/bin/ptxas",
    "compiler": "/usr/bin/cc",
    "device": "NVIDIA H200",
    "capability": "9.0",
    "architectures": ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"],
    "cuda": "13.0",
    "driver": "13.0",
    "memory_bytes": 140 * GIB,
    "free_bytes": 139 * GIB,
}
NO_DEVICE = {"device": None, "device_error": "RuntimeError: no", "capability": None}


@pytest.mark.parametrize(
    ("changes", "reason", "remedy"),
    [
        ({"packages": {**GOOD["packages"], "torch": None}}, "has no torch", "make gpu-smoke PYTHON="),
        ({"build_error": "OSError: libcudnn.so.9"}, "torch cannot be imported (OSError: libcudnn.so.9)", "install it"),
        ({**NO_DEVICE, "cuda": None}, "is built without CUDA", "install one for CUDA"),
        ({**NO_DEVICE, "driver": None, "device_files": 0}, "there is no GPU: no device in /dev", "--gpus all"),
        ({**NO_DEVICE, "driver": "12.4"}, "the driver is too old, it knows CUDA 12.4", "update the driver"),
        (NO_DEVICE, "torch finds no CUDA device (RuntimeError: no)", "CUDA_VISIBLE_DEVICES"),
        (
            {"capability": "7.0", "device": "Tesla V100"},
            "torch has no kernels for Tesla V100 (compute capability 7.0",
            "install another",
        ),
        ({"compiler": None}, "there is no C compiler", "apt-get install gcc"),
        ({"ptxas": None}, "there is no ptxas", "install nvcc"),
    ],
)
def test_a_machine_on_which_nothing_can_run_is_told_why_and_what_helps(
    changes: dict[str, object], reason: str, remedy: str
) -> None:
    (line,), said = gpu_needs.problems({**GOOD, **changes}, "cuda")
    assert reason in line
    assert remedy in line.partition(": ")[2]
    assert said == []


def test_what_only_costs_something_is_said() -> None:
    assert gpu_needs.problems(GOOD, "cuda") == ([], [])
    assert gpu_needs.problems({**GOOD, "capability": "8.9"}, "cuda") == ([], []), "kernels for 8.6 fit 8.9, too"
    assert gpu_needs.problems({**GOOD, "architectures": ["compute_80"]}, "cuda") == ([], [])
    fatal, (line,) = gpu_needs.problems({**GOOD, "nvcc": None}, "cuda")
    assert (fatal, line.split(":")[0]) == ([], "no nvcc")
    small = {**GOOD, "memory_bytes": 8 * GIB, "free_bytes": 7.7 * GIB}
    fatal, (line,) = gpu_needs.problems(small, "cuda")
    assert fatal == []
    assert line.startswith("7.7 GiB are free: the model has 0.1B parameters and a training pass 4,096 tokens; 1.5B")
    _, lines = gpu_needs.problems({**small, "free_bytes": 2 * GIB}, "cuda")
    assert lines[0].startswith("only 2.0 of 8.0 GiB are free: end what uses the device")
    assert lines[1].startswith("2.0 GiB are free, and the smallest model needs 5.0")
    _, (line,) = gpu_needs.problems({**GOOD, "memory_bytes": 79.2 * GIB, "free_bytes": 78.6 * GIB}, "cuda")
    assert "the model has 1.5B parameters and a training pass 12,288 tokens; 1.5B and 16,384 need 82 GiB" in line
    assert gpu_needs.problems({**GOOD, **NO_DEVICE}, "cpu") == ([], [])


def test_sizes_need_what_the_plan_says(tmp_path: Path) -> None:
    for name, tokens, gib in gpu_needs.SIZES:
        machine = Machine(torch.device("cuda", 0), replace(PRESETS[name], pass_tokens=tokens))
        machine.preset.config().save_pretrained(tmp_path / name)
        planned = planned_memory(machine, str(tmp_path / name)).allocated("policy trains")
        needed = (1.08 * planned + CONTEXT_BYTES) / GIB
        assert needed <= gib <= needed + 2, (name, tokens)
    assert gpu_needs.fitting_sizes(139 * GIB) == ("1.5B", 16384)
    assert gpu_needs.fitting_sizes(47 * GIB) == ("0.5B", 8192)
    assert gpu_needs.fitting_sizes(GIB) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_probe_finds_what_there_is_and_says_what_fails() -> None:
    found = gpu_probe.facts()
    assert found["packages"]["torch"] == torch.__version__  # type: ignore[index]
    assert found["device"] is None
    assert found["device_error"]
    assert str(found["varlen_attn"]).startswith("(query")
    bare = subprocess.run(
        [sys.executable, "-I", "-S", gpu_probe.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert "No module named 'torch'" in bare


def make_wheel(folder: Path, name: str, text: str = "", *, number: str = "1.0", tag: str = "py3-none-any") -> Path:
    """A wheel with one module."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-{number}-{tag}.whl", f"{name}-{number}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(f"{name}.py", text)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\nRequires-Dist: absent\n"
        )
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def test_wheels_of_what_is_missing_or_older_are_chosen_and_others_named(tmp_path: Path) -> None:
    here = f"cp{sys.version_info.major}{sys.version_info.minor}"
    good = [
        make_wheel(tmp_path, "absent_one"),
        make_wheel(tmp_path, "absent_three", tag=f"{here}-{here}-manylinux_2_28_x86_64"),
        make_wheel(tmp_path, "absent_two", tag="cp39-abi3-manylinux_2_28_x86_64"),
        make_wheel(tmp_path, "pytest", number="999.0"),
    ]
    make_wheel(tmp_path, "torch", number="1.0")
    other = make_wheel(tmp_path, "zabsent", tag="cp27-cp27mu-manylinux_2_28_x86_64")
    chosen, said = gpu_ready.fitting_wheels(tmp_path)
    assert chosen == sorted(good)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    remedy = f"make gpu-wheels PYTHON_VERSION={version}"
    assert said == [f"{other.name} is for another Python than {here} and left out: {remedy}"]
    assert gpu_ready.fitting_wheels(tmp_path / "nowhere") == ([], [])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without packages but the pip of these tests, if they have one: installing one takes much longer."""
    folder, pip = tmp_path_factory.mktemp("environment"), find_spec("pip")
    subprocess.run([sys.executable, "-m", "venv", *["--without-pip"] * bool(pip), str(folder)], check=True)
    if pip and pip.origin:
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "pip").symlink_to(Path(pip.origin).parent)
    return folder / "bin/python"


def test_wheels_are_installed_at_once_without_what_they_need(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_ready.sys, "executable", str(environment))
    wheels = [make_wheel(tmp_path / "wheels", name) for name in ("absent_one", "absent_two")]
    wheels.append(make_wheel(tmp_path / "wheels", "absent_three", "import not_carried"))
    assert gpu_ready.install(wheels, tmp_path) == []
    subprocess.run([str(environment), "-c", "import absent_one, absent_two"], check=True)
    (line,) = gpu_ready.failed_imports(wheels, tmp_path)
    assert line.startswith("absent_three: ModuleNotFoundError: No module named 'not_carried'; name what it needs in")


def test_wheels_go_into_a_folder_if_the_interpreter_takes_none(
    tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = tmp_path / "python"
    refuses = 'case "$*" in *--target*) ;; *" install "*) echo "error: Read-only file system"; exit 1;; esac'
    closed.write_text(f'#!/bin/sh\n{refuses}\nexec {environment} "$@"\n')
    closed.chmod(0o755)
    monkeypatch.setattr(gpu_ready.sys, "executable", str(closed))
    monkeypatch.setattr(gpu_ready, "PACKAGES", tmp_path / "packages")
    monkeypatch.setattr(gpu_ready, "KERNELS", tmp_path / "kernels")
    monkeypatch.setenv("PYTHONPATH", "/given/by/the/caller")
    (line,) = gpu_ready.install([make_wheel(tmp_path / "wheels", "absent_four")], tmp_path)
    assert "since the interpreter takes none: error: Read-only file system" in line
    root = gpu_ready.ROOT
    expected = [str(root / "src"), str(root), str(tmp_path / "packages"), "/given/by/the/caller"]
    assert gpu_ready.variables()["PYTHONPATH"].split(os.pathsep) == expected
    subprocess.run([str(environment), "-c", "import absent_four"], check=True)
    (line,) = gpu_ready.install([tmp_path / "no_such.whl"], tmp_path)
    assert line.startswith("1 packages could not be installed (")


def test_a_nursery_keeps_the_packages_of_the_caller(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "carried_package.py").write_text(
        "import os\nassert os.environ['JE_ARROW_MALLOC_CONF'] == 'background_thread:false'\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(forking.MODULES_VARIABLE, "carried_package")
    with forking._nursery.__wrapped__(7) as connection:
        monkeypatch.setattr(forking, "_nursery", lambda _: connection)
        with forking.Forked([sys.executable, "-m", "platform"], stdout=subprocess.PIPE) as born:
            assert b"Linux" in born.communicate()[0]
    assert forking._NURSERIES.pop(7).wait(30) == 0


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a compiled kernel."""
    folder = tmp_path / "kernels"
    (folder / "triton/abc").mkdir(parents=True)
    (folder / "triton/abc/kernel.cubin").write_bytes(b"\x7fELF")
    monkeypatch.setattr(gpu_ready, "KERNELS", folder)
    return folder


def test_kernels_are_taken_back_for_the_same_device_and_versions_only(tmp_path: Path, kernels: Path) -> None:
    identity = gpu_ready.identity_of(GOOD)
    assert gpu_ready.keep_kernels(tmp_path, identity) == ""
    kernel = kernels / "triton/abc/kernel.cubin"
    kernel.unlink()
    archive = tmp_path / gpu_ready.CACHE
    for changes, reason in (
        ({"device": "NVIDIA H100 80GB HBM3"}, "device NVIDIA H200, not for device NVIDIA H100 80GB HBM3"),
        ({"packages": {**GOOD["packages"], "triton": "3.7.0"}}, "triton 3.6.0, not for triton 3.7.0"),
        ({"python": "3.13.1"}, "python 3.12, not for python 3.13"),
    ):
        line = gpu_ready.take_kernels(archive, gpu_ready.identity_of({**GOOD, **changes}))
        assert line == f"gpu-cache.tgz is left out: its kernels are for {reason}; they are compiled again"
        assert not kernel.exists()
    assert gpu_ready.take_kernels(archive, identity) == "kernels from gpu-cache.tgz"
    assert kernel.read_bytes() == b"\x7fELF"
    assert not (kernels / gpu_ready.IDENTITY).exists() or gpu_ready.keep_kernels(tmp_path, identity) == ""
    for content in (archive.read_bytes()[:100], b"no archive", b""):
        archive.write_bytes(content)
        assert "is left out, since it cannot be read" in gpu_ready.take_kernels(archive, identity)
    with tarfile.open(archive, "w:gz") as other:
        other.add(__file__, "test.py")
    assert "is left out, since it cannot be read" in gpu_ready.take_kernels(archive, identity)
    assert gpu_ready.take_kernels(None, identity) == "no gpu-cache.tgz was brought: kernels are compiled"


def test_files_that_do_not_come_back_are_named(tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kernels / "large").write_bytes(os.urandom(3 << 20))
    monkeypatch.setattr(gpu_ready, "FILE_MIB", 2)
    line = gpu_ready.keep_kernels(tmp_path, gpu_ready.identity_of(GOOD))
    assert line == "gpu-cache.tgz has 3 MiB, and some machines return 2: the next call compiles again"


def test_a_machine_is_made_ready_and_what_it_lacks_is_said_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_ready, "WORK", tmp_path / "work")
    monkeypatch.setattr(gpu_ready, "KERNELS", tmp_path / "work/kernels")
    monkeypatch.setattr(gpu_ready, "SHARED_MEMORY", tmp_path / "nowhere")
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    monkeypatch.setattr(gpu_call, "answer", lambda _: dict(GOOD, nvcc=None, free_bytes=78.6 * GIB))
    for name in ("PYTHONPATH", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TRITON_CACHE_DIR", gpu_ready.MODELS):
        monkeypatch.setenv(name, "")  # to be as it was after the test
    for name in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    made = Call("smoke", "cuda", tmp_path / "gpu.json", is_tiny=False, slowness=4.0)
    assert made.get_ready(tmp_path / "no wheels")
    assert made.sizes == ("1.5B", 12288)
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "work/kernels/triton")
    models = Path(os.environ[gpu_ready.MODELS])
    assert models.is_dir()
    made.finish()
    assert not models.exists()
    first = [line[8:] for line in capsys.readouterr().out.splitlines()[:3]]
    assert first[0].startswith("NVIDIA H200; Python 3.12.3, torch 2.11.0+cu130")
    assert first[1].startswith("no nvcc: ")
    assert "only 78.6 of 140.0 GiB are free" in first[2]
    monkeypatch.setattr(gpu_ready, "run", lambda *_: None)  # the probe, whose answer is given
    monkeypatch.setattr(gpu_call, "answer", lambda _: {**GOOD, **NO_DEVICE, "driver": "12.4"})
    assert not Call("smoke", "cuda", tmp_path / "gpu.json", is_tiny=False, slowness=4.0).get_ready(tmp_path)
    assert "nothing was run: the driver is too old, it knows CUDA 12.4" in capsys.readouterr().out
