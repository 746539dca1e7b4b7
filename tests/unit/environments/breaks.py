"""An environment that breaks for real, in ways that its task names; imports no torch, so that processes start fast."""

from __future__ import annotations

import os
import signal
import time
import urllib.request
from contextlib import suppress
from random import Random

from leaderless.environments.protocol import Environment, EpisodeFailed, Observation, Task, Turn
from leaderless.environments.tools import tool


class Breaks(Environment):
    """A message that is `!` breaks it as the task says; any other one ends it with a reward."""

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        self.how = str(task["how"])
        return "?"

    @tool
    def broken(self) -> str:
        """Raise an error."""
        raise KeyError("no such row")

    @tool
    def unreachable(self) -> str:
        """Ask a server that is gone."""
        return ask(self.how)

    @tool
    def hang(self) -> str:
        """Take long."""
        time.sleep(30)
        return ""

    @tool
    def kill_sandboxes(self) -> str:
        """Kill what runs the policy's programs."""
        import psutil

        me = psutil.Process()
        for child in me.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if "sandbox.supervisor" in " ".join(child.cmdline()):
                    child.kill()
        return "killed"

    def act(self, text: str) -> Turn:
        if text != "!":
            return Turn(reward=0.5 + 0.25 * (text == "1"), done=True)
        match self.how.partition(" ")[0]:
            case "raises":
                raise ValueError("no more")
            case "site":
                raise EpisodeFailed("the site is down", "infrastructure")
            case "hangs":
                time.sleep(30)
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "ends":
                os._exit(3)
            case "talks":
                return Turn("x" * 200)
            case "asks":
                ask(self.how.split()[1])
        return Turn("?")


def ask(address: str) -> str:
    with urllib.request.urlopen(address, timeout=5) as answer:
        return answer.read().decode()
