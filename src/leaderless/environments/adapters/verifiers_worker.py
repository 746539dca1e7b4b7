"""Plays episodes of an environment of the package verifiers. Imports nothing of this package.

It runs in the Python in which verifiers is installed. Its arguments are the environment's name and arguments. Each line
that it reads is a question as JSON with a `number`: an episode to play, `rows` to list, or one to `cancel`. Each line
that it writes is an answer with that number, or the reason why it ends. It ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from threading import Event, Thread
from types import ModuleType
from typing import Any

Json = Any
LEAVING_S = 10.0
"""Seconds after the end of the input in which the process ends, whatever it does."""


class VerifiersPlayer:
    """Answers questions about one environment of the package verifiers."""

    def __init__(self, package: ModuleType, environment: Any) -> None:  # noqa: ANN401 - of another package
        self._package, self._environment = package, environment
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def answer(self, questions: asyncio.Queue[str | None], say: Callable[[Json], None]) -> None:
        """Answer questions, which are lines that were read, until None says that there are no more."""
        while (line := await questions.get()) is not None:
            question = json.loads(line)
            number = question["number"]
            if "rows" in question:
                say({"number": number, **self._rows(question)})
            elif "cancel" in question:
                if task := self._playing.pop(question["cancel"], None):
                    task.cancel()
            else:
                self._playing[number] = asyncio.create_task(self._play(question, say))

    async def _play(self, question: Mapping[str, Json], say: Callable[[Json], None]) -> None:
        number = question["number"]
        try:
            say({"number": number, **await self._outcome(question)})
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this episode alone
            say({"number": number, "error": f"{type(error).__name__}: {error}"})
        finally:
            self._playing.pop(number, None)

    async def _outcome(self, question: Mapping[str, Json]) -> Mapping[str, Json]:
        """Reward of a rollout of an example."""
        from openai import AsyncOpenAI  # which verifiers brings

        dataset, index = self._dataset(question["split"]), question["example"]
        if not 0 <= index < len(dataset):
            return {"error": f"example={index}: the split '{question['split']}' has {len(dataset)} examples"}
        # The policy may be busy for long: how long an episode may take is decided elsewhere.
        async with AsyncOpenAI(
            base_url=question["base_url"], api_key=question["api_key"], timeout=None, max_retries=0
        ) as client:
            rollout = await self._environment.run_rollout(
                dict(dataset[index]), self._package.OpenAIChatCompletionsClient(client), "policy", {}
            )
        found = {"reward": rollout["reward"], "metrics": rollout["metrics"], "stop": rollout.get("stop_condition")}
        # An empty answer, or a call that cannot be read, is the policy's own: the rubric grades what there is.
        if (error := rollout.get("error")) and error["error"] not in {"EmptyModelResponseError", "ToolParseError"}:
            found |= {"error": f"{error['error']}: {error['error_chain_str']}", "type": error["error"]}
        return found

    def _rows(self, question: Mapping[str, Json]) -> Mapping[str, Json]:
        """Examples as rows of a dataset of tasks."""
        (first, count), dataset = question["rows"], self._dataset(question["split"])
        if first + count > len(dataset):
            return {"error": f"the split '{question['split']}' has {len(dataset)} examples, not {first + count}"}
        rows = []
        for index in range(first, first + count):
            example, prompt = dataset[index], dataset[index]["prompt"]
            text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
            answer = {"answer": example["answer"]} if "answer" in example else {}
            rows.append({"question": text, **answer, "split": question["split"], "example": index})
        return {"rows": rows}

    def _dataset(self, split: str) -> Any:  # noqa: ANN401 - of another package
        return self._environment.get_eval_dataset() if split == "eval" else self._environment.get_dataset()


async def main(name: str, arguments: Mapping[str, Json], say: Callable[[Json], None]) -> None:
    """Load the environment, and answer."""
    questions: asyncio.Queue[str | None] = asyncio.Queue()
    loop, is_loaded = asyncio.get_running_loop(), Event()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(questions.put_nowait, line)
        loop.call_soon_threadsafe(questions.put_nowait, None)
        is_loaded.wait()
        time.sleep(LEAVING_S)
        os._exit(1)  # an environment that blocks does not outlive whoever has asked

    Thread(target=read, daemon=True).start()  # at once, so that whoever writes need not wait for what follows
    package = import_module("verifiers")
    if not hasattr(package, "load_environment"):
        raise RuntimeError(f"verifiers {package.__version__} has no load_environment: it needs verifiers>=0.3,<0.4")
    environment = package.load_environment(name, **arguments)
    is_loaded.set()
    if environment.requires_group_rollouts:
        raise RuntimeError(f"'{name}' has rewards of whole groups, and an episode is played and rewarded by itself")
    await VerifiersPlayer(package, environment).answer(questions, say)


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # what the environment prints is no answer

    def say(answer: Json) -> None:
        """Write an answer as a line."""
        answers.write(json.dumps(answer) + "\n")

    try:
        asyncio.run(main(sys.argv[1], json.loads(sys.argv[2]), say))
    except Exception as error:  # noqa: BLE001 - it is reported to whoever has asked
        say({"fatal": f"{type(error).__name__}: {error}"})
        sys.exit(1)
