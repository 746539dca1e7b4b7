"""Tasks in Harbor's format: two made here, played in bubblewrap and with a stand-in for Docker's program."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.unit.environments.led import END, lead

from leaderless.config import RecipeError
from leaderless.environments.adapters import harbor_worlds
from leaderless.environments.adapters.harbor_folder import HarborTask
from leaderless.environments.adapters.harbor_tasks import make_rows, solution_reward
from leaderless.environments.adapters.harbor_worlds import DockerWorld, LocalWorld, choose_world
from leaderless.environments.episode import Episode
from leaderless.environments.protocol import EpisodeFailed
from leaderless.rewards.sandbox.sandboxes import bubblewrap_refusal

TASKS = Path(__file__).parent / "harbor"
needs_bubblewrap = pytest.mark.skipif(bubblewrap_refusal() is not None, reason="bubblewrap does not work here")
DOCKER = """#!/usr/bin/env python3
import os, pathlib, shutil, subprocess, sys
home = pathlib.Path(os.environ["STAND_IN"])
with open(home / "log", "a") as log:
    print(*sys.argv[1:], file=log)
what, *rest = sys.argv[1:]
def here(text):  # places of the container are folders here
    for top in ("/app", "/logs", "/tests", "/solution"):
        text = text.replace(top, f"{home}{top}")
    return text
if what == "version":
    print("28")
elif what == "build":
    (home / "app/data").mkdir(parents=True)
    for file in pathlib.Path(rest[-1]).glob("*.*"):
        shutil.copy(file, home / "app/data" / file.name)
    print("sha256:image")
elif what == "run":
    print("warning: it runs")
    print("container")
elif what == "exec":
    env = dict(part[6:].split("=", 1) for part in rest if part.startswith("--env="))
    command = [part for part in rest if not part.startswith("--env=")][1:]
    os.environ.update(env, KIND="words")
    for script in home.glob("*/*.sh"):
        script.write_text(here(script.read_text().replace(str(home), "")))
    sys.exit(subprocess.call([here(part) for part in command]))
elif what == "cp":
    shutil.copytree(rest[0], here(rest[1].partition(":")[2]), dirs_exist_ok=True)
"""


def call(command: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'bash', 'arguments': {'command': command}})}</tool_call>{END}"


def in_turn(*messages: str) -> Callable[[str], str]:
    """A policy that says one message after the other, and then nothing more."""
    left = [*messages]
    return lambda _: left.pop(0) if left else f"done{END}"


def played(
    name: str, *messages: str, tasks: Path = TASKS, options: dict[str, Any] | None = None, **settings: Any
) -> Episode:
    (row,) = (row for row in make_rows(tasks, world="local") if row["task"] == str((tasks / name).resolve()))
    chosen = {"world": "local", **(options or {})}
    settings = {"tool_format": "hermes", "max_tokens": 4000, **settings}
    (episode,), _ = lead(None, in_turn(*messages), [row], type="harbor", options=chosen, **settings)
    return episode


def told(episode: Episode) -> list[str]:
    return [str(one["content"]) for node in episode.trace.nodes for one in node.messages if one["role"] == "tool"]


def total(episode: Episode) -> float:
    return sum(node.said.reward for node in episode.trace.said() if node.said)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TASKS, tmp_path / "tasks"))


@needs_bubblewrap
@pytest.mark.parametrize(("name", "rewards"), [("count-lines", {"reward": 1}), ("mend-sum", {"reward": 1, "pairs": 2})])
def test_a_task_gives_its_own_solution_a_reward_of_1(name: str, rewards: dict[str, float]) -> None:
    assert asyncio.run(solution_reward(TASKS / name, world="local")) == rewards


@needs_bubblewrap
def test_the_policy_works_by_commands_and_the_verifier_rewards_it() -> None:
    episode = played("count-lines", call("cat data/words.txt; echo $KIND"), call("echo 3 > count.txt; exit 7"))
    assert (episode.cause, episode.error, total(episode)) == ("", "", 1.0)
    assert told(episode) == ["one\ntwo\nthree\nwords", "(exit code 7)"]
    assert episode.info == {"rewards": {"reward": 1}, "task": "count-lines"}
    assert "Write the number of lines" in str(episode.trace.nodes[0].messages[-1]["content"])
    assert total(played("count-lines", call("echo 4 > count.txt"))) == 0.0


@needs_bubblewrap
def test_a_reward_of_several_is_named() -> None:
    mend = call("sed -i s/-/+/ total.sh")
    assert total(played("mend-sum", mend)) == 1.0
    assert total(played("mend-sum", mend, options={"reward": "pairs"})) == 2.0
    episode = played("mend-sum", mend, options={"reward": "pair"})
    assert (episode.cause, "gives reward, pairs: name one by environment.options.reward" in episode.error) == (
        "environment",
        True,
    )


@needs_bubblewrap
def test_the_policy_can_neither_see_nor_forge_how_it_is_judged() -> None:
    forge = "echo 1 > /logs/verifier/reward.txt; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; ls /tests"
    link = "ln -s /etc/hostname /tests/x; rm -rf /logs/verifier; ln -s /app /logs/verifier; ls / /work; cat /etc/shadow"
    episode = played("count-lines", call(forge), call(link))
    assert (episode.cause, total(episode)) == ("", 0.0)
    assert told(episode)[0] == "test.sh", "what it has put there itself, which is gone when it is judged"
    assert "cannot access '/work'" in told(episode)[1]
    assert "/etc/shadow: No such file" in told(episode)[1]


@needs_bubblewrap
def test_a_command_that_hangs_or_floods_is_answered() -> None:
    options = {"command_timeout_s": 1.0, "max_result_characters": 20, "instructions": "Use bash."}
    wrong = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>' + END
    episode = played("count-lines", call("sleep 60"), call("seq 100"), wrong, options=options)
    slow, long, unknown = told(episode)
    assert slow == "Error: the command took more than 1 s and was ended."
    assert "characters left out" in long
    assert long.startswith("1\n2\n3\n4\n5\n\n[... 271 ")
    assert unknown == "Error: there is one tool, bash(command: string)."
    assert str(episode.trace.nodes[0].messages[-1]["content"]).startswith("Use bash.\nWrite the number")


@needs_bubblewrap
def test_the_verifier_judges_what_there_is_when_the_policy_reaches_a_limit() -> None:
    episode = played("count-lines", call("echo 3 > count.txt"), call("ls"), max_turns=2)
    assert (episode.is_cut, episode.cause, total(episode)) == (True, "", 1.0)


@needs_bubblewrap
@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        ("echo it broke; exit 1", "environment", r"has written no /logs/verifier/reward.json or \S+: it broke"),
        ("echo good > /logs/verifier/reward.txt", "environment", r"has written 'good\\n' to /logs/verifier/reward.txt"),
        ("sleep 60", "deadline", r"took more than 1 s \(verifier.timeout_sec\)"),
    ],
)
@pytest.mark.parametrize("max_turns", [1, 8])
def test_a_verifier_that_fails_gives_no_reward(
    copied: Path, script: str, kind: str, words: str, max_turns: int
) -> None:
    (copied / "count-lines/tests/test.sh").write_text(f"#!/bin/bash\n{script}\n")
    settings = (copied / "count-lines/task.toml").read_text()
    (copied / "count-lines/task.toml").write_text(
        settings.replace("timeout_sec = 20.0\n\n[verifier.env]", "timeout_sec = 1.0\n")
    )
    forged = call("echo 1 > /logs/verifier/reward.txt")
    episode = played("count-lines", forged, tasks=copied, max_turns=max_turns)
    assert episode.cause == kind
    assert re.search(words, episode.error), episode.error


def test_tasks_that_cannot_be_judged_or_played_are_refused_by_name(copied: Path) -> None:
    def refused(change: Callable[[Path], object], world: str = "local") -> str:
        folder = copied.parent / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(copied, folder)
        change(folder / "mend-sum")
        with pytest.raises(RecipeError) as found:
            list(make_rows(folder, world=world))
        return str(found.value)

    def settings(text: str) -> Callable[[Path], object]:
        return lambda task: (task / "task.toml").write_text(text)

    def dockerfile(text: str) -> Callable[[Path], object]:
        return lambda task: (task / "environment/Dockerfile").write_text(text)

    assert "the task 'mend-sum' has no verifier: it needs tests/test.sh" in refused(
        lambda task: (task / "tests/test.sh").unlink()
    )
    assert "the task 'mend-sum' cannot be read" in refused(lambda task: (task / "instruction.md").unlink())
    assert "cannot be read: Invalid value" in refused(settings("version ="))
    assert "has several steps" in refused(settings('[[steps]]\nname = "a"'))
    assert "is for windows" in refused(settings('environment.os = "windows"'))
    assert "in an environment of its own" in refused(settings('verifier.environment_mode = "separate"'))
    assert "needs environment.gpus" in refused(settings("environment.gpus = 1"))
    assert "has several containers" in refused(lambda task: (task / "environment/docker-compose.yaml").touch())
    if bubblewrap_refusal() is None:
        run = refused(dockerfile("FROM x\nRUN apt-get install -y cowsay"))
        assert "'mend-sum': its Dockerfile has 'RUN apt-get install -y cowsay', which the local world does not" in run
        assert "set world to docker" in run
        assert "which belongs to this machine" in refused(dockerfile("FROM x\nCOPY total.sh /usr/bin/"))
        assert "copies '../x', which is not in environment/" in refused(dockerfile("FROM x\nCOPY ../x y"))
    with pytest.raises(RecipeError, match="holds no tasks"):
        list(make_rows(copied / "mend-sum"))


def test_a_canary_is_not_shown(copied: Path) -> None:
    file = copied / "mend-sum/instruction.md"
    wanted = file.read_text()
    file.write_text(f"<!-- a CANARY of tests -->\n# canary 1\n\n{wanted}")
    assert HarborTask.read(file.parent).instruction == wanted
    file.write_text(f"# A title\n# canary 1\n{wanted}")
    assert HarborTask.read(file.parent).instruction.startswith("# A title\n# canary")


def test_a_variable_that_is_not_set_is_named(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = HarborTask.read(copied / "count-lines")
    assert task.variables("verifier") == {"WANTED": "3"}
    monkeypatch.setenv("LEADERLESS_TESTS_WANTED", "4")
    assert task.variables("verifier") == {"WANTED": "4"}
    file = copied / "count-lines/task.toml"
    file.write_text(file.read_text().replace(":-3", ""))
    monkeypatch.delenv("LEADERLESS_TESTS_WANTED")
    with pytest.raises(ValueError, match="'count-lines' needs the environment variable LEADERLESS_TESTS_WANTED"):
        HarborTask.read(copied / "count-lines").variables("verifier")


def test_worlds_are_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(harbor_worlds, "_docker_refusal", lambda: "no daemon of Docker answers")
    with pytest.raises(RecipeError, match="is docker, but no daemon of Docker answers: start it, or choose local"):
        choose_world("docker")
    with pytest.raises(RecipeError, match="must be auto, local or docker"):
        choose_world("jail")
    monkeypatch.setattr(harbor_worlds, "bubblewrap_refusal", lambda: "finds no program 'bwrap'")
    with pytest.raises(RecipeError, match="finds no program 'bwrap'; and no daemon of Docker answers"):
        choose_world("auto")
    monkeypatch.setattr(harbor_worlds, "_docker_refusal", lambda: None)
    assert choose_world("auto") is DockerWorld
    monkeypatch.setattr(harbor_worlds, "bubblewrap_refusal", lambda: None)
    assert choose_world("local") is LocalWorld


def test_a_container_is_built_used_and_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin/docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    assert asyncio.run(solution_reward(TASKS / "count-lines", world="docker")) == {"reward": 1}
    lines = [line for line in (tmp_path / "log").read_text().splitlines() if not line.startswith("version")]
    assert lines[0] == f"build --quiet {TASKS / 'count-lines/environment'}"
    assert lines[1] == "run --detach --rm --cpus=1 --memory=512m sha256:image sleep infinity"
    assert lines[-1] == "rm --force container"
    assert any(line.startswith("exec --env=WANTED=3 container timeout --kill-after=1 20 bash -c") for line in lines)

    async def broken() -> None:
        async with DockerWorld(HarborTask.read(TASKS / "mend-sum")):
            pass

    program.write_text("#!/bin/sh\necho no space left\nexit 3\n")
    with pytest.raises(RuntimeError, match="docker build for mend-sum ended with exit code 3: no space left"):
        asyncio.run(broken())


def test_a_row_that_is_no_task_fails() -> None:
    from leaderless.environments.adapters.harbor_tasks import _task_of

    with pytest.raises(EpisodeFailed, match="make rows with make_rows"):
        _task_of({"question": "x"})
    with pytest.raises(EpisodeFailed, match="the task 'none' cannot be read"):
        _task_of({"task": str(TASKS / "none")})
