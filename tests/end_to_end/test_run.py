"""A whole run in one process, as in a program, a notebook or a debugger."""

from __future__ import annotations

import asyncio
import itertools
import random
import runpy
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, succeed
from tests.tiny import tiny_model, write_additions, write_recipe
from transformers import AutoModelForCausalLM

from leaderless import RewardInput, Run
from leaderless.worker.supervision.failure import WorkerFailure, WorkersFailed
from leaderless.worker.supervision.stop import Interrupted

ROOT = Path(__file__).parents[2]
SETTINGS = {"reward": {"format": {"pattern": r".*\d.*"}}, "run.reward_processes": 0}


def define(function: Callable[[RewardInput], float], monkeypatch: pytest.MonkeyPatch) -> Callable[[RewardInput], float]:
    """Let a function look like one that a notebook defines."""
    function.__module__, function.__qualname__ = "__main__", function.__name__
    monkeypatch.setattr(sys.modules["__main__"], function.__name__, function, raising=False)
    return function


def test_a_run_in_python_is_that_of_the_command_line(ranks: RankPool, tmp_path: Path) -> None:
    rows = write_additions(tmp_path / "test.jsonl", 12)
    data = {"data.evaluation": {"path": str(rows), "prompt": "question", "answer": "answer", "template": "plain"}}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SETTINGS | data | {"steps": 3})
    run = Run(recipe, name="python")
    assert run.plan(2).world_size == 2
    table = run.train()
    succeed(ranks, tmp_path, "train", recipe, "name=shell")
    assert metrics(tmp_path / "runs/python") == metrics(tmp_path / "runs/shell")
    assert table["reward/mean"] == [line["reward/mean"] for line in metrics(tmp_path / "runs/shell")]
    assert repr(run) == "Run('python': step 3 of 3)"
    assert run.report().read_text().startswith("<!")
    scores = run.evaluate()
    assert scores["evaluation/failed"] == 0
    assert 0 <= scores["evaluation/mean@1"] <= 1
    responses = run.generate(["1+1=", "1+1=", "2+2="], temperature=1.0, max_tokens=5)
    assert len(responses) == 3
    assert responses[0] != responses[1], "each has noise of its own"
    assert run.generate(["1+1="]) == run.generate([{"question": "1+1="}]), "a text, or a row"
    weights = AutoModelForCausalLM.from_pretrained(run.export(tmp_path / "model")).state_dict()
    before = AutoModelForCausalLM.from_pretrained(tiny_model(num_layers=1)).state_dict()
    assert any(not weights[name].equal(before[name]) for name in before)
    assert not dist.is_initialized()


def test_a_notebook_may_have_an_event_loop_and_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[threading.Thread] = []

    def has_digit(sample: RewardInput) -> float:
        seen.append(threading.current_thread())
        return float(any(map(str.isdigit, sample.response)))

    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"reward": {}, "steps": 1})
    rewards = {"reward": {define(has_digit, monkeypatch): 1.0}}

    async def cell() -> None:
        Run(recipe, name="loop", **rewards).train()
        await asyncio.to_thread(Run(recipe, name="thread", **rewards).train)

    asyncio.run(cell())
    assert metrics(tmp_path / "runs/loop") == metrics(tmp_path / "runs/thread")
    assert seen[0] is threading.main_thread(), "a debugger stops in the user's function"
    assert seen[-1] is not threading.main_thread()


def generators() -> tuple[object, ...]:
    """States of the global generators."""
    _, keys, *place = np.random.get_state()  # noqa: NPY002
    return random.getstate(), keys.tolist(), place, torch.get_rng_state().tolist()


def test_a_program_has_its_generators_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(sample: RewardInput) -> float:
        return random.random() + np.random.random() + torch.rand(()).item()  # noqa: NPY002

    rows = write_additions(tmp_path / "test.jsonl", 2)
    data = {"data.evaluation": {"path": str(rows), "prompt": "question", "answer": "answer", "template": "plain"}}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), data | {"reward": {}, "steps": 1})
    rewards = {"reward": {define(draw, monkeypatch): 1.0}}
    run = Run(recipe, **rewards)
    before = generators()
    rewards_drawn = run.train()["reward/mean"]
    assert generators() == before
    run.evaluate()
    run.generate(["1+1="], temperature=1.0)
    assert generators() == before
    random.seed(5)
    np.random.seed(5)  # noqa: NPY002
    torch.manual_seed(5)
    assert Run(recipe, **rewards, name="other").train()["reward/mean"] == rewards_drawn, "a step has its own seed"


def test_ctrl_c_ends_the_run_and_not_the_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = itertools.count()

    def pressed(sample: RewardInput) -> float:
        if next(calls) == 3:  # the first call tries the reward, before the first step
            signal.raise_signal(signal.SIGINT)
        return 1.0

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"reward": {}, "steps": 2})
    run = Run(recipe, reward={define(pressed, monkeypatch): 1})
    with pytest.raises(Interrupted):
        run.train()
    assert repr(run) == "Run('tiny': step 1 of 2)"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert run.train()["step"] == [1, 2]


def test_a_failure_is_the_programs_own_exception_and_it_can_train_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SETTINGS)
    with monkeypatch.context() as context:
        context.setattr("leaderless.stages.reward.reward_inputs", lambda *_, **__: {}["no such thing"])
        with pytest.raises(KeyError, match="no such thing") as caught:
            Run(recipe).train()
    assert caught.value.__notes__ == ["at step 1, in reward, on rank 0"]
    assert len(Run(recipe).train()) == 2


def test_the_traceback_of_a_worker_comes_with_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = WorkerFailure(1, "error", "rank 1 failed: KeyError", trace="Traceback ...")

    def fail(*_: object) -> None:
        raise WorkersFailed(failure)

    run = Run(write_recipe(tmp_path, tiny_model(num_layers=1), SETTINGS))
    monkeypatch.setattr("leaderless.run.launch.agent.Agent.run", fail)
    with pytest.raises(WorkersFailed, match="rank 1 failed") as caught:
        run.train(workers=2)
    assert caught.value.__notes__ == ["Traceback ..."]
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"call work\(\) in each of them"):
        run.train()


def test_the_example_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny_model(num_layers=1), tmp_path / "runs/quickstart-base")
    runpy.run_path(str(ROOT / "examples/python_run/train.py"), run_name="__main__")
    assert "[20 rows x" in capsys.readouterr().out
    assert len(metrics(tmp_path / "runs/python-run")) == 20
