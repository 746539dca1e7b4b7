"""What a bare machine with a GPU needs before anything runs on it: packages from wheels, variables, compiled kernels.

Nothing here imports torch or a package that has to be installed: it has to work where they are missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from io import BytesIO
from pathlib import Path

from gpu_needs import GIB, Facts
from gpu_processes import Ended, Job, run_together

ROOT = Path(__file__).resolve().parents[1]
WORK = Path(tempfile.gettempdir()) / f"leaderless-gpu-{os.getuid()}"
KERNELS, PACKAGES, MODELS = WORK / "kernels", WORK / "packages", "GPU_BENCHMARK_MODELS"
"""Folders of compiled kernels, and of packages that the interpreter does not take; the variable with that of models."""
CACHE, IDENTITY = "gpu-cache.tgz", "machine.json"
"""The archive of kernels, and the file in it that says what they were compiled for."""
FILE_MIB = 16
"""Most MiB of a file that comes back from some machines."""
SHARED_MEMORY, MODEL_GIB = Path("/dev/shm"), 16


def out_folder() -> Path:
    """Folder of what a call leaves: `$OUT`, or one of the runs."""
    return Path(os.environ["OUT"]) if os.environ.get("OUT") else ROOT / "runs/gpu"


def brought(name: str) -> Path | None:
    """A file that an earlier call has left: in the root, with a dot before its name, or where that call has left it."""
    places = (ROOT / f".{name}", ROOT / "runs/gpu" / name)
    return next((place for place in places if place.exists()), None)


def fitting_wheels(folder: Path) -> tuple[list[Path], list[str]]:
    """Wheels of packages that are missing or older here, and a line for each one that is for another Python."""
    chosen, said = [], []
    own = {"py3", f"py{sys.version_info.major}{sys.version_info.minor}"}
    for wheel in sorted(folder.glob("*.whl")):
        name, number, *_, python, abi, _ = wheel.stem.split("-")
        tags = python.split(".")
        here = f"cp{sys.version_info.major}{sys.version_info.minor}"
        fits = own & {*tags} or here in tags or (abi == "abi3" and any(is_older(tag, here) for tag in tags))
        if is_newer(number, name) and fits:
            chosen.append(wheel)
        elif is_newer(number, name):
            remedy = f"make gpu-wheels PYTHON_VERSION={sys.version_info.major}.{sys.version_info.minor}"
            said.append(f"{wheel.name} is for another Python than {here} and left out: {remedy}")
    return chosen, said


def is_older(tag: str, here: str) -> bool:
    """Whether a tag such as cp39 is of an older Python than another one, which the stable interface allows."""
    return tag.startswith("cp3") and tag[3:].isdigit() and int(tag[3:]) <= int(here[3:])


def is_newer(number: str, name: str) -> bool:
    """Whether a version is newer than the installed one of a package."""
    try:
        installed = version(name)
    except PackageNotFoundError:
        return True
    return numbers_of(number) > numbers_of(installed)


def numbers_of(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def install(wheels: Sequence[Path], logs: Path) -> list[str]:
    """Install wheels into the interpreter or, if it has no place for them, into a folder that comes first in the path.

    Returns:
        Lines to say.
    """
    if not wheels:
        return []
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--no-cache-dir",
    ]
    first = run(Job("pip", [*pip, *map(str, wheels)], 60, ROOT), logs)
    if not first.code:
        return []
    target = ["--target", str(PACKAGES), "--upgrade"]
    second = run(Job("pip-folder", [*pip, *target, *map(str, wheels)], 60, ROOT), logs)
    if second.code:
        return [f"{len(wheels)} packages could not be installed ({last_line(second.output)}): see pip-folder.txt"]
    os.environ["PYTHONPATH"] = joined_path([PACKAGES], os.environ.get("PYTHONPATH"))
    return [f"{len(wheels)} packages are in {PACKAGES}, since the interpreter takes none: {last_line(first.output)}"]


def joined_path(folders: Iterable[Path], given: str | None) -> str:
    """A search path with folders before what was given."""
    return os.pathsep.join([*map(str, folders), *filter(None, [given])])


def last_line(output: str) -> str:
    return (output.strip().splitlines() or ["nothing said"])[-1][:200]


def run(job: Job, logs: Path) -> Ended:
    """A process alone."""
    found: list[Ended] = []
    run_together([job], logs, found.append)
    return found[0]


IMPORTER = """
import sys
from importlib import import_module
for name in sys.argv[1:]:
    try:
        import_module(name)
    except Exception as error:
        print(f"{name}: {type(error).__name__}: {error}".splitlines()[0])
"""


def failed_imports(wheels: Iterable[Path], logs: Path) -> list[str]:
    """A line for each module of installed wheels that cannot be imported."""
    modules = sorted({module for wheel in wheels for module in modules_of(wheel)})
    if not modules:
        return []
    ended = run(Job("imports", [sys.executable, "-c", IMPORTER, *modules], 60, ROOT), logs)
    lines = [line for line in ended.output.splitlines() if line.split(":")[0] in modules]
    return [f"{line}; name what it needs in benchmarks/gpu_wheels.txt" for line in lines] + [
        f"imports: {ended.problem}"
    ] * bool(ended.problem)


def modules_of(wheel: Path) -> set[str]:
    """The modules at the top of a wheel that are not private."""
    with zipfile.ZipFile(wheel) as content:
        names = content.namelist()
    tops = {name.split("/")[0] for name in names if re.fullmatch(r"\w+/__init__\.py|\w+\.py", name)}
    return {top.removesuffix(".py") for top in tops if not top.startswith("_")}


def variables() -> dict[str, str]:
    """Environment variables of all that runs: where modules and kernels are, and no look-up of a host's name."""
    KERNELS.mkdir(parents=True, exist_ok=True)
    shared = SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).free >= MODEL_GIB * GIB
    return {
        "PYTHONPATH": joined_path([ROOT / "src", ROOT], os.environ.get("PYTHONPATH")),
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_CACHE_DIR": str(KERNELS / "inductor"),
        "TRITON_CACHE_DIR": str(KERNELS / "triton"),
        **({"TMPDIR": str(SHARED_MEMORY)} if shared else {}),
    }


def identity_of(facts: Facts) -> dict[str, str]:
    """What compiled kernels depend on."""
    packages = facts["packages"]
    python = ".".join(facts["python"].split(".")[:2])
    device = str(facts["device"] or "CPU")
    return {"device": device, "python": python, "torch": str(packages["torch"]), "triton": str(packages["triton"])}


def take_kernels(archive: Path | None, identity: Mapping[str, str]) -> str:
    """Unpack compiled kernels if they fit.

    Args:
        archive: File that `keep_kernels` has made, if there is one.
        identity: Device and versions that kernels here depend on.

    Returns:
        Line to say.
    """
    if archive is None:
        return f"no {CACHE} was brought: kernels are compiled"
    try:
        with tarfile.open(archive) as content:
            stored = content.extractfile(IDENTITY)
            made_for = json.loads(stored.read()) if stored else {}
            if made_for != identity:
                differing = [name for name in identity if made_for.get(name) != identity[name]]
                found, here = (
                    ", ".join(f"{name} {kind.get(name)}" for name in differing) for kind in (made_for, identity)
                )
                return (
                    f"{archive.name} is left out: its kernels are for {found}, not for {here}; they are compiled again"
                )
            content.extractall(KERNELS, filter="data")
    except (OSError, KeyError, tarfile.TarError, ValueError, EOFError) as error:
        return f"{archive.name} is left out, since it cannot be read ({error}): delete it; kernels are compiled again"
    return f"kernels from {archive.name}"


def keep_kernels(out: Path, identity: Mapping[str, str]) -> str:
    """Pack compiled kernels for the next call; a line to say if there is something to say."""
    if not any(KERNELS.rglob("*")):
        return ""
    with tarfile.open(out / CACHE, "w:gz", compresslevel=6) as content:
        text = json.dumps(dict(identity)).encode()
        member = tarfile.TarInfo(IDENTITY)
        member.size = len(text)
        content.addfile(member, BytesIO(text))
        for one in sorted(KERNELS.iterdir()):
            if one.name != IDENTITY:
                content.add(one, one.name)
    return too_large(out / CACHE, "the next call compiles again")


def keep_logs(out: Path, logs: Path) -> str:
    with tarfile.open(out / "logs.tgz", "w:gz") as content:
        content.add(logs, "logs")
    return too_large(out / "logs.tgz", "read what is printed")


def too_large(file: Path, consequence: str) -> str:
    """A line if a file is larger than what comes back from some machines."""
    size = file.stat().st_size / 2**20
    return (
        f"{file.name} has {size:.0f} MiB, and some machines return {FILE_MIB}: {consequence}" if size > FILE_MIB else ""
    )
