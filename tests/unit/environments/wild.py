"""An environment that harms its process. It imports no torch, as each of its processes may have to import it."""

from __future__ import annotations

import os
import random
import signal
import time
from random import Random

from leaderless.environments.protocol import Environment, Observation, Task, Turn


class Wild(Environment):
    """Does what its task says, once; then counts with global random numbers."""

    needs_own_process = True

    def __init__(self, sides: int = 6) -> None:
        if sides < 1:
            raise ValueError("a die has sides")
        self.sides = sides

    def reset(self, task: Task, rng: Random) -> Observation:  # noqa: ARG002
        self.how, self.turn = task["text"], 0
        return f"{random.randrange(self.sides)}:"

    def act(self, text: str) -> Turn:
        print("said", text)
        self.turn += 1
        match self.how:
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(7)
            case "hang":
                time.sleep(60)
            case "fork":
                if os.fork() == 0:
                    time.sleep(0.01)
            case "set":
                return Turn("", info={"values": {1, 2}})  # type: ignore[dict-item]
        time.sleep(0.02 * Random().random())
        told = f"{random.randrange(self.sides)} in {os.getpid()}" if self.how == "pid" else random.randrange(9)
        return Turn(f"<{told}>", reward=0.5, done=self.turn == 3)
