"""The image for GPUs and the project's own CI fit the package; `make lint` checks their syntax."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = [found[1] for kind in PROJECT["classifiers"] if (found := re.fullmatch(r".*Python :: (3\.\d+)", kind))]


def instructions(name: str) -> list[str]:
    """Arguments of all instructions of the Dockerfile with a name, each as one line."""
    text = re.sub(r"(?m)^#.*\n", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    return [line.partition(" ")[2] for line in lines if line.startswith(f"{name} ")]


def test_the_image_has_a_supported_python_and_leaves_torch_to_the_package() -> None:
    (base,) = instructions("FROM")
    python = re.match(r"python:(3\.\d+)-slim", base)
    assert python is not None
    assert python[1] in PYTHONS
    assert not any("torch=" in line or "torch>" in line for line in instructions("RUN")), "pyproject.toml says it"


def test_the_image_has_the_vllm_of_the_guide_where_the_recipe_looks_for_it() -> None:
    (requirement,) = (shlex.split(line)[0] for line in instructions("ARG") if line.startswith("VLLM="))
    assert f"'{requirement.removeprefix('VLLM=')}'" in (ROOT / "docs/guides/eight-gpus.md").read_text(encoding="utf-8")
    recipe = yaml.safe_load((ROOT / "recipes/gsm8k/eight_gpus_vllm.yaml").read_text(encoding="utf-8"))
    python = recipe["rollout"]["external"]["python"]
    assert f"python -m venv {Path(python).parents[1]} " in " ".join(instructions("RUN"))


def test_the_image_has_all_that_the_package_is_built_of_and_its_builder_gets_it() -> None:
    copied = {source for line in instructions("COPY") for source in line.split()[:-1]}
    needed = {"src", "recipes", "pyproject.toml", PROJECT["readme"], *PROJECT["license-files"]}
    assert copied == needed
    assert all((ROOT / source).exists() for source in copied)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == copied


def test_the_image_installs_extras_that_exist_and_does_not_run_as_root() -> None:
    (extras,) = (line.removeprefix("EXTRAS=") for line in instructions("ARG") if line.startswith("EXTRAS="))
    assert {*extras.split(",")} <= PROJECT["optional-dependencies"].keys()
    assert int(instructions("USER")[-1]) > 0


def test_ci_runs_the_checks_on_the_oldest_and_the_newest_python() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text(encoding="utf-8"))
    (job,) = workflow["jobs"].values()
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    assert job["strategy"]["matrix"]["python"] == [PYTHONS[0], PYTHONS[-1]]
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert job["timeout-minutes"] <= 30
    assert workflow["concurrency"]["cancel-in-progress"]
    assert workflow["permissions"] == {"contents": "read"}
