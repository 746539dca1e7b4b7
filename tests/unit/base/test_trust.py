"""Recipes, models, datasets and peers run no code and write only to the run's folder."""

from __future__ import annotations

import ast
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.tiny import tiny_model, write_recipe
from tests.unit.recipes import plan_of

from leaderless.config import RecipeError, load_recipe
from leaderless.config.models import ModelConfig
from leaderless.data.sources.disk_cache import DataCache
from leaderless.models.loading.tokenizer import load_tokenizer
from leaderless.observability.hidden_values import without_secrets
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.workflow import Workflow, read_workflow, resolve_workflow
from leaderless.rewards.protocol import describe
from leaderless.worker.supervision.failure import WorkerFailure

SOURCE = Path(__file__).parents[3] / "src/leaderless"
MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "jsonpickle"}
MODULES |= {"multiprocessing", "runpy", "code"}
NAMES = {"eval", "exec", "compile", "__import__"}
ATTRIBUTES = {"yaml.load", "yaml.full_load", "yaml.unsafe_load", "torch.load", "torch.save", "os.system", "os.popen"}
COLLECTIVES = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list"),
}
ALLOWED = {
    # Programs of the policy and the tests of datasets: what the sandbox is for.
    ("rewards/sandbox/confined.py", "exec"),
    ("rewards/sandbox/confined.py", "compile"),
    ("rewards/sandbox/remote.py", "exec"),
    ("rewards/sandbox/remote.py", "compile"),
    ("rewards/sandbox/confined.py", "exec"),
    ("rewards/sandbox/confined.py", "eval"),
    ("rewards/sandbox/confined.py", "compile"),
    # The tests of datasets import modules of the standard library by name, inside the sandbox.
    ("rewards/sandbox/remote.py", "__import__"),
    # A worker sends pickled rows to its own reward processes on a private pipe: children of one user, running the same
    # code. What a policy wrote reaches them as text, and their outcomes come back as JSON.
    ("rewards/dispatcher.py", "multiprocessing"),
    ("rewards/reward_process.py", "multiprocessing"),
    # An episode's process is forked, and exchanges JSON with its worker on a private pipe.
    ("environments/remote.py", "multiprocessing"),
    # Environments in a process exchange JSON and numbers with their rank; see there.
    ("embodied/simulators/env_processes.py", "multiprocessing"),
    # LIBERO publishes start states as files of torch. Of what is in one, only arrays of numbers may be made.
    ("embodied/simulators/libero_tasks.py", "pickle"),
    ("embodied/simulators/libero_tasks.py", "torch.load"),
    # `kind` is the safe reader of YAML, in Python or in C; only its events are looked at there.
    ("config/source.py", "Loader=kind"),
    # SGLang's interface takes weights pickled. A rank writes them for its own server, and reads nothing of the kind.
    ("rollout/external/sglang_engine.py", "pickle"),
    ("rollout/external/sglang_engine.py", "multiprocessing"),
}
"""Places where something dangerous is used nevertheless."""


def dangers(source: str) -> Iterator[str]:
    """Functions in a module that could run code from data."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            full = {f"{module}.{alias.name}" for alias in node.names}
            yield from {module.split(".")[0]} & MODULES
            yield from full & ATTRIBUTES
            yield from {alias.name for alias in node.names} & COLLECTIVES
        elif isinstance(node, ast.Attribute) and (node.attr in COLLECTIVES or ast.unparse(node) in ATTRIBUTES):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call):
            is_import = ast.unparse(node.func) == "__import__" and isinstance(node.args[0], ast.Constant)
            if isinstance(node.func, ast.Name) and node.func.id in NAMES and not is_import:
                yield node.func.id
            for keyword in node.keywords:
                value = ast.unparse(keyword.value)
                if (keyword.arg in {"allow_pickle", "shell"} and value != "False") or (
                    keyword.arg == "weights_only" and value != "True"
                ):
                    yield f"{keyword.arg}={value}"
                if keyword.arg == "Loader" and value != "yaml.SafeLoader":
                    yield f"Loader={value}"


def test_nothing_runs_code_out_of_data() -> None:
    found = {
        (path.relative_to(SOURCE).as_posix(), danger)
        for path in SOURCE.rglob("*.py")
        for danger in dangers(path.read_text(encoding="utf-8"))
    }
    assert found == ALLOWED


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import multiprocessing.pool",
        "def f():\n    import dill as d",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "load = torch.save",
        "dist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "load(path, weights_only=False)",
        "yaml.load(text)",
        "yaml.compose(text, Loader=yaml.Loader)",
        "eval('1')",
        "subprocess.run(x, shell=True)",
    ],
)
def test_what_is_dangerous_is_found(source: str) -> None:
    assert list(dangers(source))


class Trap:
    """Data that runs code when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.marker),)


def test_a_cache_of_data_that_holds_pickles_is_not_read(tmp_path: Path) -> None:
    cache, marker, copy = DataCache(folder=tmp_path), tmp_path / "marker", tmp_path / "copy.npz"
    file = cache.path("rows", 1, ".npz")
    assert file is not None
    for path in (file, copy):
        np.savez(path, rows=np.array([Trap(marker)], dtype=object), allow_pickle=True)
    found = {"rows": np.arange(2)}
    assert cache.kept("rows", 1, lambda: found) is found
    assert not marker.exists()
    with np.load(copy, allow_pickle=True) as content:
        assert content["rows"] is not None
    assert marker.exists(), "the trap is real"


def test_code_of_a_model_runs_only_where_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(tiny_model(), folder)
    (folder / "own.py").write_text(
        f"from pathlib import Path\nPath({str(marker)!r}).touch()\nraise ImportError('own')\n"
    )
    settings = folder / "tokenizer_config.json"
    content = json.loads(settings.read_text()) | {"tokenizer_class": "OwnTokenizer"}
    settings.write_text(json.dumps(content | {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}}))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    assert ModelConfig(path=str(folder)).trust_remote_code is False
    assert len(load_tokenizer(ModelConfig(path=str(folder)), "policy")) > 0, "transformers has a class of its own"
    assert not marker.exists()
    with pytest.raises(RecipeError, match="own"):
        load_tokenizer(ModelConfig(path=str(folder), trust_remote_code=True), "policy")
    assert marker.exists(), "the code is found where it may run"


YAML = [
    "name: !!python/object/apply:os.mkdir [marker]",
    "name: !!python/object/new:os.mkdir [marker]",
    "name: !!python/name:os.mkdir",
    "name: !!python/module:os",
    "? !!python/object/apply:os.mkdir [marker]\n: 1",
    "name: !ENV ${HOME}",
]


@pytest.mark.parametrize("text", YAML)
def test_yaml_runs_nothing(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "given.yaml"
    file.write_text(text)
    for read in (load_recipe, read_workflow):
        with pytest.raises(RecipeError, match="not valid YAML"):
            read(file)
    with pytest.raises(RecipeError, match="name"):
        load_recipe(write_recipe(tmp_path, "model"), [f"name={text.removeprefix('name: ')}"])
    assert not (tmp_path / "marker").exists()


def test_the_environment_is_not_read_into_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_what_nobody_may_read")
    recipe = load_recipe(write_recipe(tmp_path, "$HF_TOKEN/${HF_TOKEN}/~"), ["run.directory=$HF_TOKEN"]).recipe
    assert recipe.models["policy"].path == "$HF_TOKEN/${HF_TOKEN}/~"
    assert recipe.run.directory == "$HF_TOKEN"


def test_a_reward_is_not_imported_by_reading_or_planning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "touching.py").write_text("from pathlib import Path\nPath('marker').touch()\ndef f(sample): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    plan_of("grpo", reward={"touching:f": 1.0})
    assert not (tmp_path / "marker").exists()
    with pytest.raises(RecipeError):
        resolve_workflow("touching:f")
    assert (tmp_path / "marker").exists(), "a workflow has to be imported, to be planned"


@pytest.mark.parametrize(
    "name", ["..", "../a", "a/../../b", "/tmp/a", "a/b", "a\\b", "a\0", "a\n", ".a", "~", "", "é", " a"]
)
def test_a_run_cannot_be_named_out_of_its_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="name"):
        load_recipe(write_recipe(tmp_path, "model", {"name": name}))


def test_a_run_does_not_follow_a_link_that_came_with_its_recipe(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, "model")).recipe
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/tiny").symlink_to(elsewhere)
    with pytest.raises(RecipeError, match=r"runs/tiny is a link to .*elsewhere: remove it"):
        RunDirectory.of(recipe)
    (tmp_path / "runs/tiny").unlink()
    assert RunDirectory.of(recipe).path == tmp_path / "runs/tiny"


@pytest.mark.parametrize("name", ["..", "../../a", "/tmp/a", "a/b", "a\0", "a.b", "a\n"])
def test_neither_nodes_nor_roles_are_named_out_of_a_checkpoint(name: str) -> None:
    for workflow in (
        Workflow("w").node("rollout", run="rollout", role=name),
        Workflow("w").node(name, run="rollout", role="policy"),
    ):
        with pytest.raises(RecipeError, match="must be a plain word"):
            workflow.order()


def test_errors_do_not_quote_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "GOOGLE_CREDENTIALS", "KEY"]
    for name in names:
        monkeypatch.setenv(name, f"value-of-{name}")
    monkeypatch.setenv("LONGER_TOKEN", "value-of-HF_TOKEN-and-more")
    monkeypatch.setenv("MY_KEY", "short")
    monkeypatch.setenv("MONKEYS", "value-of-monkeys")
    for name in names:
        error = RuntimeError(f"401 for https://user:value-of-{name}@host")
        assert describe(error) == f"RuntimeError: 401 for https://user:<{name}>@host"
        failure = WorkerFailure.of(error, rank=0)
        assert f"value-of-{name}" not in failure.message + failure.trace
        assert f"<{name}>" in failure.message
    assert without_secrets("value-of-HF_TOKEN-and-more") == "<LONGER_TOKEN>"
    assert without_secrets("short value-of-monkeys") == "short value-of-monkeys"
