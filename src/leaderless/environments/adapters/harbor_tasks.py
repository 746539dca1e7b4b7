"""Tasks in Harbor's format, as programs that lead episodes. Imports no torch.

read the folder -> make its world -> the policy calls `bash` until it calls no more -> tests/test.sh -> reward file
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import cast

from leaderless.base.values import Json, is_finite_number
from leaderless.config import RecipeError
from leaderless.environments.adapters.harbor_folder import SOLUTION, TESTS, HarborTask, read_tasks
from leaderless.environments.adapters.harbor_worlds import LocalWorld, TaskWorld, choose_world
from leaderless.environments.programs.chat import Chat
from leaderless.environments.programs.conversations import AskRefusedError
from leaderless.environments.protocol import EpisodeFailed, Message, Task

BASH: Json = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command of the shell, and return what it prints. Files are kept for later commands.",
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "string", "description": "The command."}},
            "required": ["command"],
        },
    },
}
"""The tool of the policy."""
_REWARDS = ("/logs/verifier/reward.json", "/logs/verifier/reward.txt")
_VERIFIER_S = 600.0
"""Seconds that a verifier may take whose task does not say."""


class Harbor:
    """Lets the policy work on a task by commands of the shell, and rewards it by the task's verifier.

    Args:
        world: Place of tasks: `docker`, `local` (bubblewrap, with the programs of this machine), or `auto` for Docker
            where a daemon answers.
        instructions: Text before the task's own instruction.
        command_timeout_s: Seconds that a command may take; then it is ended, and the policy is told.
        max_result_characters: Characters that the policy reads of what a command prints; the middle of a longer text is
            left out.
        reward: Name of the reward in a reward.json with several.

    Raises:
        RecipeError: There is no such world, or it does not work here.
    """

    def __init__(
        self,
        *,
        world: str = "auto",
        instructions: str = "",
        command_timeout_s: float = 20.0,
        max_result_characters: int = 4000,
        reward: str = "reward",
    ) -> None:
        self._world, self._instructions, self._reward = choose_world(world), instructions, reward
        self._command_timeout_s, self._max_characters = command_timeout_s, max_result_characters

    async def __call__(self, task: Task, chat: Chat) -> Mapping[str, Json]:
        """Play the task that a row names, and return what its verifier gives.

        Raises:
            EpisodeFailed: The row names no task, or the verifier gives no reward.
        """
        found = _task_of(task)
        async with self._world(found) as world:
            await self._work(world, chat)
            rewards = await verified(world)
        name = self._reward if len(rewards) > 1 else next(iter(rewards), self._reward)
        if name not in rewards:
            known = ", ".join(rewards)
            raise EpisodeFailed(
                f"the verifier of '{found.name}' gives {known}: name one by environment.options.reward", "environment"
            )
        return {"reward": rewards[name], "rewards": cast("Json", dict(rewards)), "task": found.name}

    async def _work(self, world: TaskWorld, chat: Chat) -> None:
        """Let the policy work until it calls nothing more, or reaches a limit; the verifier judges what there is."""
        text = f"{self._instructions}\n{world.task.instruction}".strip()
        messages: list[Message] = [{"role": "user", "content": text}]
        while True:
            try:
                answer = await chat.ask(messages, tools=[BASH])
            except AskRefusedError:
                if chat.overflow is None or not chat.num_answers:
                    raise
                return
            if not answer.tool_calls:
                return
            messages.append(answer.message)
            for call in answer.tool_calls:
                shown = await self._called(world, call)
                messages.append({"role": "tool", "name": "bash", "tool_call_id": call["id"], "content": shown})

    async def _called(self, world: TaskWorld, call: Mapping[str, Json]) -> str:
        function = call["function"]
        assert isinstance(function, Mapping)
        try:
            arguments = json.loads(str(function["arguments"]))
        except ValueError:
            arguments = None
        command = arguments.get("command") if isinstance(arguments, Mapping) else None
        if function["name"] != "bash" or not isinstance(command, str):
            return "Error: there is one tool, bash(command: string)."
        ran = await world.run(command, self._command_timeout_s)
        if ran.code is None:
            return f"Error: the command took more than {self._command_timeout_s:g} s and was ended."
        text = self._cut(ran.output.strip())
        return f"{text}\n(exit code {ran.code})".lstrip() if ran.code else text or "(no output)"

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_characters:
            return text
        half = self._max_characters // 2
        return f"{text[:half]}\n[... {len(text) - 2 * half:,} characters left out ...]\n{text[-half:]}"


def make_rows(folder: str | Path, *, world: str = "auto") -> Iterator[dict[str, Json]]:
    """The tasks of a folder as rows of a dataset.

    Args:
        folder: Folder that holds a folder for each task.
        world: World in which they will be played; see `Harbor`.

    Raises:
        RecipeError: Some cannot be played in this world, or have no verifier; each is named.
    """
    tasks = list(read_tasks(folder))
    if choose_world(world) is LocalWorld:
        problems = [(task.name, LocalWorld.refusal(task)) for task in tasks]
        if refused := [f"the task '{name}': {problem}" for name, problem in problems if problem]:
            raise RecipeError.at("folder", "; ".join(refused))
    for task in tasks:
        yield {"task": str(task.folder), "instruction": task.instruction}


async def verified(world: TaskWorld) -> Mapping[str, float]:
    """Rewards of a task's verifier by name, after the policy's work.

    Raises:
        EpisodeFailed: The verifier takes too long, or gives no reward.
    """
    task, limit_s = world.task, world.task.number("verifier", "timeout_sec", _VERIFIER_S)
    # The policy may have written some.
    await world.run(f"rm -rf {' '.join(_REWARDS)}; mkdir -p /logs/verifier", limit_s)
    await world.put(task.folder / TESTS.parent, "/tests")
    ran = await world.run("chmod +x /tests/test.sh && /tests/test.sh", limit_s, task.variables("verifier"))
    if ran.code is None:
        raise EpisodeFailed(
            f"the verifier of '{task.name}' took more than {limit_s:g} s (verifier.timeout_sec)", "deadline"
        )
    for place in _REWARDS:
        text = await world.read(place)
        if text is not None:
            return _rewards(task, place, text)
    shown = ran.output.strip()[-500:] or "it has printed nothing"
    raise EpisodeFailed(f"the verifier of '{task.name}' has written no {' or '.join(_REWARDS)}: {shown}", "environment")


async def solution_reward(folder: str | Path, *, world: str = "auto") -> Mapping[str, float]:
    """Rewards of a task's own solution, which a sound task gives 1.

    Raises:
        ValueError: It is no task, or has no solution.
        EpisodeFailed: The verifier gives no reward.
    """
    task = HarborTask.read(Path(folder))
    if not (task.folder / SOLUTION).is_file():
        raise ValueError(f"the task '{task.name}' has no {SOLUTION}")
    async with choose_world(world)(task) as opened:
        await opened.put(task.folder / SOLUTION.parent, "/solution")
        limit_s = task.number("agent", "timeout_sec", _VERIFIER_S)
        await opened.run("chmod +x /solution/solve.sh && /solution/solve.sh", limit_s, task.variables("solution"))
        return await verified(opened)


@lru_cache(maxsize=4096)
def _read(folder: str) -> HarborTask:
    return HarborTask.read(Path(folder))


def _task_of(row: Task) -> HarborTask:
    """The task that a row names.

    Raises:
        EpisodeFailed: It names none.
    """
    folder = row.get("task")
    if not isinstance(folder, str):
        raise EpisodeFailed("the row is no task of Harbor: make rows with make_rows")
    try:
        return _read(folder)
    except ValueError as error:
        raise EpisodeFailed(str(error)) from error


def _rewards(task: HarborTask, place: str, text: str) -> Mapping[str, float]:
    """Rewards in a file of the verifier."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    rewards = found if isinstance(found, dict) and place.endswith(".json") else {"reward": found}
    for value in rewards.values():
        if isinstance(value, bool) or not is_finite_number(value):
            problem = f"the verifier of '{task.name}' has written {text[:80]!r} to {place}: it must be a number"
            raise EpisodeFailed(problem, "environment")
    return rewards
