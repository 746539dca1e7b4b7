"""`leaderless env try`: an episode in the terminal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random
from unittest.mock import patch

import jsonschema
import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, Outcome, command, environment, run, succeed
from tests.tiny import tiny_model
from tests.unit.environments.sums import Sums
from tests.unit.environments.test_toolbox import Point, draw

from leaderless.environments.tools.function_tool import FunctionTool
from leaderless.environments.try_episode import random_value

SUMS = "tests.unit.environments.sums:Sums"
assert f"{Sums.__module__}:{Sums.__name__}" == SUMS


def try_out(*arguments: str, typed: str = "") -> Outcome:
    """The outcome of the command in this process, for somebody who types."""
    reading, writing = os.pipe()
    os.write(writing, typed.encode())
    os.close(writing)
    with os.fdopen(reading) as keyboard, patch.object(sys, "stdin", keyboard):
        return command(str(ROOT), ["env", "try", *arguments])


def test_a_person_plays_an_episode(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    (tmp_path / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n')
    recipe.write_text(
        f"name: x\nworkflow: grpo\nsteps: 1\nmodels: {{policy: x}}\n"
        f"data: {{train: {{path: {tmp_path / 'rows.jsonl'}}}}}\n"
        f"environment: {{type: '{SUMS}', tools: ['tests.unit.environments.sums:flood'], max_result_characters: 200}}\n"
    )
    typed = '/count {"by": 2}\n/cont {}\n/count by=1\n/flood\n2\n'
    done = try_out("--recipe", str(recipe), "--row", "1", typed=typed)
    assert done.code == 0, done.errors
    assert "tools: count(by: integer), flood()" in done.output
    assert "< Count2:" in done.output
    assert "result 2 (" in done.output
    assert "There is no tool 'cont' (did you mean 'count'?)" in done.output
    assert "arguments must be a JSON object" in done.output
    assert "[... 9,999,800 characters left out ...]" in done.output
    assert "reward +1" in done.output
    assert "over after 5 turns; reward 1" in done.output


def test_the_end_of_the_input_leaves_the_episode() -> None:
    done = try_out(SUMS, typed="/count {}\n")
    assert done.code == 0, done.errors
    assert "left before its end after 1 turns; reward 0" in done.output


def test_an_episode_that_fails_says_why() -> None:
    done = try_out("tests.end_to_end.test_episodes_on_ranks:Echo", typed="x\n")
    assert done.code == 1
    assert "the episode failed (environment): Echo.reset raised KeyError: 'question'" in done.errors


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "name an environment, or a --recipe that has one"),
        (["no.such:World"], "module 'no.such' cannot be imported"),
        ([SUMS, "--task", "{"], "is no JSON"),
        ([SUMS, "--task", "[1]"], "must be a JSON object, not [1]"),
        (["examples.agent_program.solve:vote"], "is a program, which asks the policy by itself"),
    ],
)
def test_what_cannot_be_tried_is_refused(arguments: list[str], problem: str) -> None:
    done = try_out(*arguments)
    assert done.code == 2
    assert problem in " ".join(done.errors.replace("│", "").split())


def test_chance_plays_the_same_episode_again() -> None:
    chance = [try_out(SUMS, "--policy", "random", "--seed", "3").output for _ in range(2)]
    assert "over after" in chance[0]
    assert [line for line in chance[0].splitlines() if "result" not in line] == [
        line for line in chance[1].splitlines() if "result" not in line
    ]


def test_a_model_plays_an_episode(ranks: RankPool, tmp_path: Path) -> None:
    count = "tests.unit.environments.scripted:Count"
    output = succeed(ranks, tmp_path, "env", "try", count, "--policy", tiny_model(), "--task", '{"text": "1+1"}')
    assert "< 1+1:" in output
    assert "over after 3 turns" in output
    done = run(ranks, tmp_path, "env", "try", SUMS, "--policy", tiny_model())
    assert done.code == 2, "auto needs a chat template"
    assert "set environment.tool_format" in done.errors


def test_ctrl_c_ends_an_episode() -> None:
    words = [sys.executable, "-m", "leaderless", "env", "try", SUMS]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment(), cwd=ROOT
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        seen = b""
        while b"Count:" not in seen:
            found = os.read(process.stdout.fileno(), 1000)
            assert found, process.stderr.read()
            seen += found
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
        assert process.stderr.read().decode().strip() == "stopped"


def test_random_arguments_fit_the_schema() -> None:
    drawn, rng = FunctionTool.of(draw), Random(1)
    seen = []
    for _ in range(200):
        arguments = random_value(drawn.parameters, drawn.parameters["$defs"], rng)
        jsonschema.validate(json.loads(json.dumps(arguments)), drawn.parameters)
        assert isinstance(arguments, dict)
        seen.append(drawn.prepare(arguments))
    assert {one.get("color") for one in seen} == {None, "red", "blue"}
    assert any(isinstance(point, Point) for one in seen for point in one["points"])  # type: ignore[attr-defined]
    bounds = {"type": "integer", "exclusiveMinimum": 2, "maximum": 4}
    assert {random_value(bounds, {}, rng) for _ in range(50)} == {3, 4}
