"""A program of its own, in any language, as what leads an episode; in bubblewrap if it is to be confined."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit

from leaderless.base.leftover_processes import exit_in_words
from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.guarded_environment import EnvironmentFailure, kind_of_end
from leaderless.environments.programs.chat import Chat
from leaderless.environments.programs.run_command import run_command
from leaderless.environments.protocol import Task
from leaderless.rewards.sandbox.sandboxes import bubblewrap_refusal, find_bubblewrap

_SHOWN_CHARACTERS = 2000
_MAX_TASK_BYTES = 2**17 - len("LEADERLESS_TASK=") - 1
"""Limit of Linux for one environment variable, without its name and end."""
_KEY = "environment.options"


class Command:
    """Runs a command anew for each episode, in a process group that ends with the episode.

    It finds the policy at OPENAI_BASE_URL with OPENAI_API_KEY, or at ANTHROPIC_BASE_URL with ANTHROPIC_API_KEY, its
    task as JSON in LEADERLESS_TASK, and a text to seed random numbers with in LEADERLESS_SEED. Its reward is the last
    line that it prints, as `{"reward": 1.0}`; or it posts such an object to `$OPENAI_BASE_URL/reward`.

    Args:
        command: Program and arguments.
        env: Further environment variables.
        confine: Whether it runs in bubblewrap: it reads this machine's files, writes only to a folder of its own and
            /tmp, which end with it, and reaches no address but the policy's.

    Raises:
        RecipeError: The command cannot be run.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str] | None = None, *, confine: bool = False) -> None:
        is_text = isinstance(command, str)
        if is_text or not command or not all(isinstance(part, str) for part in command):
            raise RecipeError.at(
                f"{_KEY}.command", f"is {command!r:.80}: must be a list of texts, such as [sh, agent.sh]"
            )
        if shutil.which(command[0]) is None:
            raise RecipeError.at(f"{_KEY}.command", f"'{command[0]}' is no program that can be run: give its path")
        if confine and (problem := bubblewrap_refusal()):
            raise RecipeError.at(f"{_KEY}.confine", problem)
        self._command, self._env, self._confine = command, dict(env or {}), confine

    async def __call__(self, task: Task, chat: Chat) -> Mapping[str, Json]:
        """Run the command, and return the object with its reward.

        Raises:
            EnvironmentFailure: It ended with an error, or gave no reward.
        """
        row = json.dumps(task, ensure_ascii=False)
        if len(row.encode()) > _MAX_TASK_BYTES:
            raise EnvironmentFailure(
                "environment",
                f"a task has {len(row.encode()):,} bytes as JSON, and an environment variable holds "
                f"{_MAX_TASK_BYTES:,}: leave out columns, or name a file in the row",
            )
        facts = {
            "OPENAI_BASE_URL": chat.base_url,
            "OPENAI_API_KEY": chat.api_key,
            "ANTHROPIC_BASE_URL": chat.base_url.removesuffix("/v1"),  # its clients add the version
            "ANTHROPIC_API_KEY": chat.api_key,
            "LEADERLESS_TASK": row,
            "LEADERLESS_SEED": chat.rules.seed,
        }
        if not self._confine:
            return await self._run(self._command, os.environ | self._env | facts, chat)
        with tempfile.TemporaryDirectory(prefix="leaderless-program-") as folder:
            async with Confinement(folder, chat.base_url) as confinement:
                kept = {name: value for name, value in os.environ.items() if name in {"PATH", "LANG", "LC_ALL"}}
                env = kept | {"HOME": confinement.home} | self._env | facts
                return await self._run(confinement.command(self._command), env, chat)

    async def _run(self, command: Sequence[str], env: Mapping[str, str], chat: Chat) -> Mapping[str, Json]:
        code, printed, told = await run_command(command, env)
        if code != 0:
            shown = f"{printed.rstrip()}\n{told.rstrip()}".strip()[-_SHOWN_CHARACTERS:]
            raise EnvironmentFailure(
                kind_of_end(code),
                f"the command '{self._name}' ended with {exit_in_words(code)}: {shown or 'no output'}",
            )
        if chat.reward is not None:
            return {"reward": chat.reward}
        return self._reward(printed)

    @property
    def _name(self) -> str:
        return " ".join(self._command)

    def _reward(self, printed: str) -> Mapping[str, Json]:
        last = next((line for line in reversed(printed.splitlines()) if line.strip()), "")
        with suppress(ValueError):
            found = json.loads(last)
            if isinstance(found, Mapping) and "reward" in found:
                return found
        raise EnvironmentFailure(
            "environment",
            f"the command '{self._name}' gave no reward; its last line is {last[-80:]!r}: print "
            '{"reward": 1.0} as the last line, or post it to $OPENAI_BASE_URL/reward',
        )


_FORWARD = Path(__file__).with_name("socket_forward.py")
_PIECE_BYTES = 65536
_DOOR = "/run/leaderless-door"


class Confinement:
    """Surroundings of one command, in a context.

    It has a network of its own, in which one address leads, through a socket in the file system, to the same address
    outside.
    """

    def __init__(self, folder: str, base_url: str) -> None:
        """Confine nothing yet; the folder is an empty one of this command."""
        address = urlsplit(base_url)
        assert address.hostname is not None
        assert address.port is not None
        self._host, self._port = address.hostname, address.port
        self._socket = str(Path(folder, "door"))
        self.home = str(Path(folder, "home"))
        """Folder that the command may write to."""
        Path(self.home).mkdir()
        self._carrying: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._carry, self._socket)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._server.close()
        for task in list(self._carrying):
            task.cancel()
        await asyncio.gather(*self._carrying, return_exceptions=True)

    def command(self, command: Sequence[str]) -> Sequence[str]:
        """The command line that runs a command inside."""
        program = find_bubblewrap()
        assert program is not None, "it was asked whether it works"
        here = str(Path.cwd())
        return [
            *(program, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"),
            *("--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run"),  # noqa: S108
            *("--ro-bind-try", here, here, "--chdir", here),
            *("--bind", self._socket, _DOOR, "--bind", self.home, self.home),
            *(sys.executable, "-I", "-S", str(_FORWARD), _DOOR, self._host, str(self._port), *command),
        ]

    async def _carry(self, inside: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Carry a connection from inside to the address."""
        task = asyncio.current_task()
        assert task is not None
        self._carrying.add(task)
        try:
            answers, questions = await asyncio.open_connection(self._host, self._port)
            try:
                await asyncio.gather(_copy(inside, questions), _copy(answers, back))
            finally:
                questions.close()
        finally:
            self._carrying.discard(task)
            back.close()


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await source.read(_PIECE_BYTES):
            target.write(data)
            await target.drain()
    with suppress(OSError):
        target.write_eof() if target.can_write_eof() else target.close()
