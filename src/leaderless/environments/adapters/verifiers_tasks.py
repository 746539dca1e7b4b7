"""Environments of verifiers by the addresses of their servers, as programs that lead episodes. Imports no torch.

row -> server: its harness runs, and asks the policy by its address -> its rewards
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.adapters import needed
from leaderless.environments.adapters.verifiers_outcome import outcome_of
from leaderless.environments.adapters.verifiers_server import VerifiersServer
from leaderless.environments.programs.chat import Chat
from leaderless.environments.protocol import EpisodeFailed, Task

_v1 = needed("verifiers.v1", "verifiers")


class Verifiers:
    """Lets a server of verifiers play the task of a row, and returns the reward that it gives.

    Args:
        url: Address of the server, such as `tcp://127.0.0.1:5000`.
        wait_s: Seconds that an episode waits for a server that does not answer.

    Raises:
        RecipeError: It is no address of this machine.
    """

    def __init__(self, url: str, *, wait_s: float = 30.0) -> None:
        self._server = VerifiersServer(url, wait_s)

    async def check(self) -> None:
        """Ask the server whether it is there, before models are loaded. Errors as of the server."""
        await self._server.check()

    async def __call__(self, task: Task, chat: Chat) -> Mapping[str, Json]:
        """Play a task.

        Raises:
            EpisodeFailed: The row is no task, or the episode failed at the server.
        """
        try:
            data = json.loads(str(task["task"]))
        except (KeyError, ValueError) as error:
            raise EpisodeFailed("the row is no task of verifiers: make rows with make_rows") from error
        episode = await self._server.play(data, chat)
        return outcome_of(episode, chat.admission.model, is_cut=chat.overflow is not None)


def make_rows(environment: Mapping[str, Json], count: int, *, first: int = 0) -> Iterator[dict[str, Json]]:
    """Tasks as rows of a dataset.

    Args:
        environment: Settings of the environment, with which it is served as well, such as `{"taskset": {"id": NAME}}`.
        count: Number of tasks.
        first: Number of the first one.

    Raises:
        RecipeError: The taskset cannot be loaded, has fewer tasks, or gives no rewards.
    """
    try:
        config = _v1.resolve_env_config(dict(environment))
        taskset = _v1.load_taskset(config.taskset)
        # A generator may be endless.
        tasks = list(islice(taskset, first, first + count))
    except Exception as error:
        problem = f"verifiers does not load it: {type(error).__name__}: {error}"
        raise RecipeError.at("environment", problem) from error
    if len(tasks) < count:
        found = first + len(tasks)
        raise RecipeError.at("count", f"is {count} from task {first} on, but '{config.taskset.id}' has only {found}")
    is_judged = _v1.environment_class(config.taskset.id, config.id).finalize is not _v1.Env.finalize
    for task in tasks:
        if not (task.hooks("reward") or task.config.judges or is_judged):
            raise RecipeError.at(
                "environment",
                f"{type(task).__name__} of '{config.taskset.id}' gives no reward: give it a method with @vf.reward, or "
                "plug a judge",
            )
        yield {"question": task.data.prompt_text, "task": json.dumps(task.data.model_dump(mode="json"))}
