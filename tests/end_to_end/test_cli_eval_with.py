"""`leaderless eval --with lm-eval`: the server, the package in another process, and what is kept; with a stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tests.end_to_end.alone import refused, run_alone
from tests.tiny import tiny_model, write_recipe
from transformers import AutoModelForCausalLM

from leaderless.observability.evaluations import TaskEvaluation, read_evaluations
from leaderless.serving.api.engine_thread import EngineHost

STAND_IN = Path(__file__).parents[1] / "fakes/lm_eval_environment"
NEEDED = ("aiohttp", "requests", "tenacity")
DEADLINE_S = 120.0


def harness_python(folder: Path, version: str | None = "0.4.13", needed: Sequence[str] = NEEDED) -> str:
    """An "interpreter" of an environment with the stand-in for lm-eval, in a version, with some packages."""
    packages, path = folder / "packages", folder / "python"
    packages.mkdir(parents=True)
    for name in needed:
        (packages / f"{name}.py").touch()
    if version is not None:
        (packages / f"lm_eval-{version}.dist-info").mkdir()
        (packages / f"lm_eval-{version}.dist-info/METADATA").write_text(f"Name: lm_eval\nVersion: {version}\n")
    # Without -I, which the first argument is: the stand-in is found by a variable.
    call = f'shift\nPYTHONPATH={packages}:{STAND_IN} exec {sys.executable} "$@"'
    path.write_text(f"#!/bin/sh\necho $$ >> {folder}/processes\n{call}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with a checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    outcome = run_alone(folder, "train", write_recipe(folder, tiny_model(), {"checkpoint": {"every_steps": 1}}))
    assert outcome.code == 0, outcome
    return folder / "runs/tiny"


def log_prob(model: str | Path, tokens: list[int]) -> float:
    """The log-probability of tokens after the first one."""
    decoder = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        scores = decoder(torch.tensor([tokens])).logits[0].log_softmax(-1)
    return float(scores[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).sum())


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_numbers_of_a_run_are_printed_kept_in_its_folder_and_shown_in_its_report(tmp_path: Path, run: Path) -> None:
    options = ("--with", "lm-eval", "--with-python", harness_python(tmp_path), "--task", "sums")
    further = ("--limit", 3, "--num-fewshot", 2, "--", "--gen_kwargs", "temperature=0.5")
    outcome = run_alone(tmp_path, "eval", run, *options, *further)
    assert outcome.code == 0, outcome
    (found,) = read_evaluations(run)
    newest = run / "checkpoints/step-000002"
    assert (found.by, found.model, found.weights) == ("lm-eval 0.4.13", "tiny", str(newest))
    assert found.arguments == {
        "tasks": ["sums"],
        "limit": 3,
        "num_fewshot": 2,
        "include_path": None,
        "arguments": ["--gen_kwargs", "temperature=0.5"],
    }
    accuracy, length = found.scores
    assert run_alone(tmp_path, "export", newest, tmp_path / "exported").code == 0
    assert accuracy.value == pytest.approx(log_prob(tmp_path / "exported", [3, 4, 5]), abs=1e-4)
    assert (accuracy.task, accuracy.metric, accuracy.standard_error) == ("sums", "acc", 0.25)
    assert (accuracy.num_rows, accuracy.num_shots) == (3, 2)
    assert (length.metric, length.standard_error) == ("length (strict)", None)
    assert f"sums │ acc │ {accuracy.value:.4f} ± 0.2500 │ 3 │ 2" in " ".join(outcome.output.split())
    folder = Path(re.findall(r"evaluation: (\S+)", outcome.output)[0])
    assert folder.parent == run / "evaluations"
    assert "Requesting API" in (folder / "log.txt").read_text()
    (results,) = folder.glob("model/results_*.json")
    assert json.loads(results.read_text())["further"] == ["--gen_kwargs", "temperature=0.5"]
    assert run_alone(tmp_path, "report", run).code == 0
    page = re.sub(r"<[^>]+>", " ", (run / "report.html").read_text())
    row = f"sums acc {accuracy.value:.4f} ± 0.2500 3 2 step-000002 lm-eval 0.4.13"
    assert row in " ".join(page.split())


def test_numbers_of_a_model_are_printed_as_json_alone(tmp_path: Path) -> None:
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "own.yaml").touch()
    python = harness_python(tmp_path / "environment")
    options = ("--with", "lm-eval", "--task", "own", "--include-path", tasks, "--with-python", python)
    outcome = run_alone(tmp_path, "eval", tiny_model(), *options, "--json")
    assert outcome.code == 0, outcome
    printed = json.loads(outcome.output)
    assert printed["scores"][0]["value"] == pytest.approx(log_prob(tiny_model(), [3, 4, 5]), abs=1e-4)
    assert [one.scores[0].task for one in read_evaluations(tmp_path / "runs/eval-qwen2")] == ["own"]
    again = ("--out", next((tmp_path / "runs/eval-qwen2/evaluations").iterdir()))
    assert "is not empty: name another folder" in refused(tmp_path, "eval", tiny_model(), *options, *again)


def test_ctrl_c_ends_the_package_and_the_server(tmp_path: Path) -> None:
    out, python = tmp_path / "out", harness_python(tmp_path)

    def press() -> None:
        end = time.monotonic() + DEADLINE_S
        while not (out / "asked").exists() and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    options = ("--with", "lm-eval", "--with-python", python, "--task", "slow_sums", "--out", out)
    outcome = run_alone(tmp_path, "eval", tiny_model(), *options)
    thread.join()
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert (out / "asked").exists()
    assert not [number for number in (tmp_path / "processes").read_text().split() if is_running(int(number))]
    address = re.findall(r"http://127\.0\.0\.1:\d+", (out / "lm-eval.yaml").read_text())[0]
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(address, timeout=5)
    assert not (out / "evaluation.json").exists()


def test_an_error_of_the_package_is_told_with_what_the_server_has_said(tmp_path: Path) -> None:
    options = ("--with", "lm-eval", "--with-python", harness_python(tmp_path), "--task", "failing_sums")
    said = refused(tmp_path, "eval", tiny_model(), *options, "--out", tmp_path / "out")
    assert "lm-eval has ended with code 1: API request failed! Status code: 400, Response text: too long" in said
    assert f"its output is in {tmp_path}/out/log.txt" in said


def test_a_server_that_fails_ends_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(host: EngineHost) -> None:
        raise RuntimeError("no more memory for caches")

    monkeypatch.setattr(EngineHost, "_step", fail)
    options = ("--with", "lm-eval", "--with-python", harness_python(tmp_path), "--task", "slow_sums")
    outcome = run_alone(tmp_path, "eval", tiny_model(), *options, "--out", tmp_path / "out")
    assert outcome.code == 1
    words = "the server of the model has ended before lm-eval: no more memory for caches; see "
    assert words in " ".join(outcome.errors.split())
    assert not [number for number in (tmp_path / "processes").read_text().split() if is_running(int(number))]


@pytest.mark.parametrize(
    ("version", "needed", "arguments", "words"),
    [
        (None, NEEDED, ("--task", "sums"), "has no lm-eval: from a copy of the project, pip install --editable"),
        ("0.4.2", NEEDED, ("--task", "sums"), "is 0.4.2, but must be at least 0.4.10 and older than 0.5"),
        ("0.5.0", NEEDED, ("--task", "sums"), "is 0.5.0, but must be at least 0.4.10 and older than 0.5"),
        ("0.4.13", ("aiohttp", "requests"), ("--task", "sums"), "lacks tenacity: from a copy of the project"),
        ("0.4.13", NEEDED, ("--task", "summs"), "'summs' is no task of lm-eval 0.4.13 (did you mean 'sums'?)"),
        ("0.4.13", NEEDED, (), "--task: is needed with --with lm-eval"),
        ("0.4.13", NEEDED, ("--task", "sums", "--include-path", "nowhere"), "--include-path: nowhere is no folder"),
        ("0.4.13", NEEDED, ("--task", "sums", "steps=3"), "steps=3: is for recipes, which lm-eval does not read"),
        ("0.4.13", NEEDED, ("--task", "sums", "--", "--limit=3"), "--limit=3: is set by this command: use --task"),
        ("0.4.13", NEEDED, ("--task", "sums", "--workers", "2"), "--workers: is for held-out prompts"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_a_model_is_loaded(
    tmp_path: Path, version: str | None, needed: Sequence[str], arguments: Sequence[str], words: str
) -> None:
    python = harness_python(tmp_path, version, needed)
    options = ("--with", "lm-eval", "--with-python", python, *arguments)
    assert words in " ".join(refused(tmp_path, "eval", tmp_path / "no-model", *options).split())


def test_options_of_the_package_are_for_it_alone(tmp_path: Path) -> None:
    assert "--task: is for --with: give both" in refused(tmp_path, "eval", tmp_path, "--task", "sums")
    options = ("--with", "lm-eval", "--task", "sums", "--with-python", tmp_path / "none")
    assert "none cannot be started: No such file" in refused(tmp_path, "eval", tmp_path, *options)


def test_damaged_files_of_evaluations_are_left_out(tmp_path: Path) -> None:
    good = TaskEvaluation("a 1", "m", "w", "2026-01-02", 1.0, {}, [])
    good.write(tmp_path / "evaluations/a")
    for name, text in (
        ("b", "{"),
        ("c", "[" * 100_000),
        ("d", '{"time": "2026-01-01", "scores": [1, {"value": "x"}]}'),
    ):
        (tmp_path / "evaluations" / name).mkdir()
        (tmp_path / "evaluations" / name / "evaluation.json").write_text(text)
    first, second = read_evaluations(tmp_path)
    assert first == good
    assert (second.by, second.scores) == ("", [])
