"""Written jobs: valid for their schedulers, with every option in its place."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, cast

import pytest
import yaml
from jsonschema import Draft202012Validator
from tests.unit.recipes import write_recipe
from typer.testing import CliRunner

from leaderless.cli.main import app
from leaderless.config import RecipeError
from leaderless.run.clusters.job import CLIENTS, ClusterJob, check_client
from leaderless.run.clusters.options import (
    OPTIONS,
    KubernetesOptions,
    RayOptions,
    SkypilotOptions,
    SlurmOptions,
    TargetOptions,
)
from leaderless.run.clusters.ray_cluster import POLL_S, MachineRequest, Machines, _run_once, parse, run_machines

FULL: Mapping[type[TargetOptions], Mapping[str, object]] = {
    SlurmOptions: {
        "time": "1-00:00:00",
        "partition": "gpu",
        "account": "lab",
        "qos": "high",
        "constraint": "h100",
        "gpus_per_node": 4,
        "cpus_per_task": 64,
        "memory": "200G",
        "warn_s": 300,
        "output": "log-%j",
        "directives": ["--reservation=x"],
        "setup": ["module load cuda"],
        "port": 3000,
        "max_restarts": 7,
    },
    KubernetesOptions: {
        "image": "registry.example/leaderless:1",
        "kind": "pytorchjob",
        "namespace": "research",
        "queue": "team",
        "gpu_resource": "huawei.com/Ascend910",
        "gpus_per_node": 4,
        "cpu": "64",
        "memory": "512Gi",
        "shared_memory": "8Gi",
        "volumes": {"runs": "/runs"},
        "working_directory": "/work",
        "environment": {"HF_HOME": "/runs/hub"},
        "secrets": ["hub"],
        "node_selector": {"gpu": "h100"},
        "priority_class": "low",
        "service_account": "trainer",
        "setup": ["nvidia-smi"],
        "port": 3000,
        "max_restarts": 7,
    },
    RayOptions: {
        "address": "http://head:8265",
        "gpus_per_worker": 0.5,
        "cpus_per_worker": 2.0,
        "strategy": "PACK",
        "placement_timeout_s": 30.0,
        "working_directory": "folder",
        "setup": ["module load cuda", "echo 'two words'"],
        "port": 3000,
        "max_restarts": 7,
    },
    SkypilotOptions: {
        "accelerators": "H100:8",
        "infra": "aws/us-east-1",
        "use_spot": False,
        "image": "docker:image",
        "disk_size_gb": 512,
        "bucket": "s3://bucket",
        "install": ["pip install leaderless==0.1"],
        "working_directory": "folder",
        "setup": ["nvidia-smi"],
        "port": 3000,
        "max_restarts": 7,
    },
}
"""A value for every option, different from its default."""
NEEDED: Mapping[type[TargetOptions], Mapping[str, object]] = {KubernetesOptions: {"image": "x"}}


def job(
    options: TargetOptions, nodes: tuple[int, int] = (1, 4), workers: int = 8, recipe: str = "r.yaml"
) -> ClusterJob:
    overrides = ("batch.prompts_per_step=64", "rollout.stop=['a b']")
    return ClusterJob(recipe, overrides, "My.Run", nodes, workers, 60.0, options)


def made(kind: type[TargetOptions], /, **given: object) -> TargetOptions:
    return kind.model_validate({**NEEDED.get(kind, {}), **given})


def is_shell(text: str) -> bool:
    return subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.__name__)
def test_every_option_changes_the_file(kind: type[TargetOptions]) -> None:
    assert FULL[kind].keys() == kind.model_fields.keys()
    plain = job(made(kind)).text()
    for name, value in FULL[kind].items():
        assert value != kind.model_fields[name].default, name
        changed = job(made(kind, **{name: value})).text()
        assert changed != plain, name


@pytest.mark.parametrize("kind", FULL, ids=lambda kind: kind.__name__)
def test_machines_and_workers_change_the_file(kind: type[TargetOptions]) -> None:
    base, options = job(made(kind)).text(), made(kind)
    for other in (job(options, (2, 4)), job(options, (1, 3)), job(options, workers=4), job(options, recipe="s.yaml")):
        assert other.text() != base


@pytest.mark.parametrize("nodes", [(1, 1), (4, 4), (2, 4)])
@pytest.mark.parametrize("given", [{}, FULL[SlurmOptions]], ids=["plain", "full"])
def test_a_slurm_script_is_valid_and_starts_a_launcher_on_each_machine(
    nodes: tuple[int, int], given: Mapping[str, object]
) -> None:
    text = job(made(SlurmOptions, **given), nodes).text()
    assert is_shell(text)
    lines = text.splitlines()
    directives = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert max(lines.index(line) for line in directives) < first_command, "Slurm reads none behind the first command"
    assert f"#SBATCH --nodes={nodes[0]}{'' if nodes[0] == nodes[1] else '-4'}" in directives
    assert ("--rendezvous" in text) == (nodes[1] > 1)
    assert shlex.quote("rollout.stop=['a b']") in text
    assert f"#SBATCH --signal=USR1@{given.get('warn_s', 120)}" in directives


def test_a_machine_of_cpus_asks_for_no_gpu() -> None:
    assert "--gpus" not in job(made(SlurmOptions, gpus_per_node=0)).text()
    assert "nvidia" not in job(made(KubernetesOptions, gpus_per_node=0)).text()


def crd(name: str) -> Mapping[str, object]:
    """The schema of a Kubernetes resource, from the folder of definitions that `make test-clusters` names."""
    folder = os.environ.get("LEADERLESS_CRDS")
    if not folder:
        pytest.skip("LEADERLESS_CRDS names no folder with the definitions of JobSet and PyTorchJob")
    definition = yaml.safe_load(next(Path(folder).rglob(name)).read_text())
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return closed(schema)


def closed(schema: object) -> object:
    """A schema that refuses unknown fields, as the API server warns of them."""
    if isinstance(schema, list):
        return [closed(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if schema.get("type") == "object" and schema.get("properties") and not is_open:
        result["additionalProperties"] = False
    if result.pop("x-kubernetes-int-or-string", False):
        result.pop("type", None)
    return result


@pytest.mark.parametrize("nodes", [(1, 1), (2, 4)])
@pytest.mark.parametrize("options", [{"image": "x"}, FULL[KubernetesOptions]], ids=["plain", "full"])
@pytest.mark.parametrize(
    ("kind", "file"),
    [("jobset", "jobset.x-k8s.io_jobsets.yaml"), ("pytorchjob", "kubeflow.org_pytorchjobs.yaml")],
)
def test_kubernetes_accepts_what_is_written(
    kind: str, file: str, options: Mapping[str, object], nodes: tuple[int, int]
) -> None:
    manifest = yaml.safe_load(job(made(KubernetesOptions, **{**options, "kind": kind}), nodes).text())
    schema = dict(crd(file))
    schema["properties"] = {**schema["properties"], "metadata": {"type": "object"}}  # type: ignore[dict-item]
    validator = Draft202012Validator(schema)
    validator.validate(manifest)
    manifest["spec"]["unknown"] = 1
    assert not validator.is_valid(manifest)


@pytest.mark.parametrize("kind", ["jobset", "pytorchjob"])
def test_a_manifest_holds_the_command_and_what_it_needs(kind: str) -> None:
    options = made(KubernetesOptions, **{**FULL[KubernetesOptions], "kind": kind})
    manifest = yaml.safe_load(job(options).text())
    assert manifest["metadata"]["name"] == "my-run"
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    spec = manifest["spec"]
    jobs = spec["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else spec["pytorchReplicaSpecs"]["Worker"]
    pod = jobs["template"]["spec"]
    (container,) = pod["containers"]
    script = container["args"][0]
    assert is_shell(script)
    assert script.splitlines()[0] == "nvidia-smi"
    words = shlex.split(script.splitlines()[1])
    assert "rollout.stop=['a b']" in words
    if kind == "jobset":
        assert words[:3] == ["exec", "leaderless", "train"]
        assert words[words.index("--rendezvous") + 1] == "my-run-machines-0-0.my-run:3000"
        assert spec["failurePolicy"]["rules"][0]["onJobFailureReasons"] == ["PodFailurePolicy"]
    else:
        assert words[:4] == ["exec", "torchrun", "-m", "leaderless"]
        assert "--workers" not in words, "torchrun starts the workers"
        assert spec["nprocPerNode"] == "8"
        assert (spec["elasticPolicy"]["minReplicas"], spec["elasticPolicy"]["maxReplicas"]) == (1, 4)
    assert container["resources"]["limits"]["huawei.com/Ascend910"] == 4
    assert pod["terminationGracePeriodSeconds"] == 120
    assert pod["volumes"][1]["persistentVolumeClaim"] == {"claimName": "runs"}


@pytest.mark.parametrize("given", [{}, FULL[RayOptions]], ids=["plain", "full"])
def test_the_program_on_ray_reads_what_the_script_says(given: Mapping[str, object]) -> None:
    text = job(made(RayOptions, **given)).text()
    assert is_shell(text)
    words = shlex.split(text.replace("\\\n", " "), comments=True)
    wish = parse(words[words.index("leaderless.run.clusters.ray_cluster") + 1 :])
    assert list(wish.recipe) == ["r.yaml", "batch.prompts_per_step=64", "rollout.stop=['a b']"]
    assert (wish.smallest, wish.largest, wish.workers, wish.grace_s) == (1, 4, 8, 120)
    options = made(RayOptions, **given)
    for name in ("gpus_per_worker", "cpus_per_worker", "strategy", "placement_timeout_s", "port", "max_restarts"):
        assert getattr(wish, name) == getattr(options, name), name
    assert tuple(wish.setup) == options.setup
    assert "--setup" not in wish.command(2, "h:1")


@pytest.mark.parametrize("nodes", [(1, 1), (2, 4)])
@pytest.mark.parametrize("given", [{}, FULL[SkypilotOptions]], ids=["plain", "full"])
def test_a_task_of_skypilot_is_yaml_with_valid_commands(given: Mapping[str, object], nodes: tuple[int, int]) -> None:
    task = yaml.safe_load(job(made(SkypilotOptions, **given), nodes).text())
    assert is_shell(task["run"])
    assert task["num_nodes"] == nodes[1]
    assert ("run.directory=/runs" in task["run"]) == ("bucket" in given) == ("file_mounts" in task)
    sky = pytest.importorskip("sky", reason="skypilot is in an environment of its own: make test-clusters")
    sky.Task.from_yaml_config(task)


def submit(folder: Path, *words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["submit", str(write_recipe(folder)), *words])
    error = f" {result.exception}" if result.exception and not isinstance(result.exception, SystemExit) else ""
    return result.exit_code, " ".join((result.output + error).replace("│", " ").split())


def test_a_file_is_written_and_the_command_that_submits_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = submit(tmp_path, "--to", "slurm", "--option", "time=12:00:00", "--nodes", "1:2")
    assert code == 0, output
    assert "submit it by: sbatch tiny.slurm.sbatch" in output
    assert "#SBATCH --time=12:00:00" in (tmp_path / "tiny.slurm.sbatch").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--to", "slrum"), "unknown scheduler (did you mean 'slurm'?)"),
        (("--to", "slurm", "--option", "tme=3"), "tme: unknown key (did you mean 'time'?)"),
        (("--to", "slurm", "--option", "time=soon"), "time='soon'"),
        (("--to", "slurm", "--option", 'directives=["reservation=x"]'), "must be options of sbatch"),
        (("--to", "slurm", "--option", "port=80"), "port=80"),
        (("--to", "kubernetes"), "image: must be given"),
        (("--to", "kubernetes", "--option", "image=x", "--option", "volumes.runs=runs"), "an absolute folder"),
        (("--to", "ray", "--nodes", "4:2"), "1 <= MIN <= MAX"),
        (("--to", "slurm", "--nodes", "1:2", "--workers", "1", "layout.rollout.ranks=0-1"), "(planned for 1 machines"),
        (("--to", "slurm", "--out", "no/such/folder/x"), "cannot be written: No such file or directory"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output = submit(tmp_path, *words)
    assert code != 0
    assert message in output
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize("target", OPTIONS)
def test_a_client_that_is_not_installed_is_named_with_its_remedy(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RecipeError) as refused:
        check_client(target)
    assert CLIENTS[target].program in str(refused.value)
    assert CLIENTS[target].remedy in str(refused.value)
    needed = ("--option", "image=x") if target == "kubernetes" else ()
    code, _ = submit(tmp_path, "--to", target, *needed, "--go")
    assert code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


@pytest.mark.parametrize(("code", "expected"), [(0, 0), (3, 1)])
def test_a_job_is_handed_to_the_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, expected: int
) -> None:
    client = tmp_path / "bin/kubectl"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/called\nexit {code}\n')
    client.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(client.parent), prepend=":")
    found, _ = submit(tmp_path, "--to", "kubernetes", "--option", "image=x", "--go")
    assert found == expected
    assert (tmp_path / "called").read_text().split() == ["create", "-f", "tiny.kubernetes.yaml"]
    assert json.loads(json.dumps(yaml.safe_load((tmp_path / "tiny.kubernetes.yaml").read_text())))["kind"] == "JobSet"


@pytest.mark.parametrize(
    ("name", "label"),
    [("My.Run", "my-run"), ("7b-run", "run-7b-run"), ("a" * 50, "a" * 40), ("1" * 50, "run-" + "1" * 36), ("a.", "a")],
)
def test_the_name_of_a_job_is_one_that_a_service_may_have(name: str, label: str) -> None:
    found = ClusterJob("r.yaml", (), name, (1, 2), 8, 60.0, made(KubernetesOptions)).label
    assert found == label
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", found), "RFC 1035, as Kubernetes wants it"


@pytest.mark.parametrize("kind", [KubernetesOptions, SkypilotOptions])
def test_a_command_of_several_lines_stays_one_script(kind: type[TargetOptions]) -> None:
    script = "if true; then\n  echo yes\nfi"
    text = job(made(kind, setup=[script])).text()
    found = json.dumps(yaml.safe_load(text))
    assert json.dumps(script)[1:-1] in found


def test_the_command_that_submits_a_file_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _, output = submit(tmp_path, "--to", "slurm", "--out", "my job")
    assert output.endswith("submit it by: sbatch 'my job'")


def test_a_machine_that_does_not_end_in_time_is_a_failure() -> None:
    class Hanging:
        wish = MachineRequest(("r.yaml",), 1, 2, 1, grace_s=0.0)
        running: ClassVar[dict[str, int]] = {"promise": 0}

        def start(self) -> None:
            """It never ends."""

        def stop(self) -> None:
            """It does not listen."""

        def ended(self) -> list[tuple[int, int]]:
            return []

    stopped = threading.Event()
    stopped.set()
    assert _run_once(cast("Machines", Hanging()), stopped) == 1


def test_a_job_that_is_stopped_while_it_waits_for_machines_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped, removed = threading.Event(), []

    class Group:
        def wait(self, seconds: float) -> bool:
            assert seconds <= POLL_S, "nobody looks for a stop meanwhile"
            stopped.set()
            return False

    made = SimpleNamespace(placement_group=lambda bundles, strategy: Group(), remove_placement_group=removed.append)  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(util=made))
    monkeypatch.setitem(sys.modules, "ray.util", made)
    assert run_machines(MachineRequest(("r.yaml",), 1, 2, 1), stopped) == 1
    assert len(removed) == 1, "no second group is asked for"
