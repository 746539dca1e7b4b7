"""A simulated programmer who uses a policy while it is trained, and by that teaches it a style.

It makes the model, starts `leaderless train examples/online/recipe.yaml`, and asks for completions with OpenAI's
package from several threads. A completion with blanks around its operator is accepted; one that only lacks blanks is
edited, and others are rejected. Run it from the root of the repository: `python -m examples.online.programmer`.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import openai
from examples.online.prepare import DIGITS, OPERATORS, fragment, prepare
from openai import OpenAI
from openai.types import Completion

from leaderless.observability.run_directory import RunDirectory

NUM_THREADS, NUM_CHOICES = 4, 2
ACCEPTED = re.compile(rf" [{re.escape(OPERATORS)}] [{DIGITS}]")
EDITED = re.compile(rf" ?[{re.escape(OPERATORS)}] ?[{DIGITS}]")


class Seen(NamedTuple):
    """A completion as the programmer has seen it: when, after how many seconds, and whether it was accepted."""

    at_s: float
    took_s: float
    is_accepted: bool


class Programmer:
    """Asks in several threads until the run ends.

    Attributes:
        seen: All completions.
        failed: Requests that failed before the run's end.
    """

    def __init__(self, url: str, seed: int) -> None:
        """Ask at an address."""
        self._client = OpenAI(base_url=url, api_key="none", max_retries=0)
        self.seen: list[Seen] = []
        self.failed: list[str] = []
        self._begin = time.monotonic()
        sources = [random.Random(f"{seed}/{number}") for number in range(NUM_THREADS)]
        self._threads = [threading.Thread(target=self._work, args=(source,)) for source in sources]
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        """Wait for the end of the run."""
        for thread in self._threads:
            thread.join()

    def _work(self, generator: random.Random) -> None:
        while True:
            try:
                self._complete(fragment(generator))
            except openai.APIConnectionError:
                return  # the run has ended
            except openai.APIStatusError as error:
                if error.code == "run_ending":
                    return
                self.failed.append(str(error))

    def _complete(self, begun: str) -> None:
        begin = time.monotonic()
        reply = ask(self._client, begun)
        now = time.monotonic()
        for word in tell(self._client, reply):
            self.seen.append(Seen(now - self._begin, now - begin, word == "accepted"))


def ask(client: OpenAI, begun: str) -> Completion:
    """Some completions of a line."""
    return client.completions.create(model="policy", prompt=begun, n=NUM_CHOICES, max_tokens=8)


def tell(client: OpenAI, reply: Completion) -> list[str]:
    """Say what has become of completions; returns a word for each."""
    words = [judge(choice.text) for choice in reply.choices]
    for choice, word in zip(reply.choices, words, strict=True):
        client.post("/feedback", body={"id": reply.id, "choice": choice.index, "feedback": word}, cast_to=object)
    return words


def judge(text: str) -> str:
    """What the programmer does with a completion."""
    if ACCEPTED.fullmatch(text):
        return "accepted"
    return "edited" if EDITED.fullmatch(text) else "rejected"


def main() -> None:
    """Make the model, train it and use it, and print how that went."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="Folder of the model and of the run.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the model and of the programmer.")
    parser.add_argument("--steps", type=int, default=60, help="Number of steps.")
    given = parser.parse_args()
    shutil.rmtree(given.folder / "online-data", ignore_errors=True)
    model = prepare(given.folder / "online-data", given.seed)
    recipe = Path(__file__).with_name("recipe.yaml")
    settings = {"models.policy.path": model, "run.directory": given.folder, "seed": given.seed, "steps": given.steps}
    overrides = [f"{name}={value}" for name, value in settings.items()]
    run = RunDirectory(given.folder / "online")
    shutil.rmtree(run.doors, ignore_errors=True)
    training = subprocess.Popen([sys.executable, "-m", "leaderless", "train", recipe, *overrides, "--fresh"])
    url = address_of(run, lambda: training.poll() is not None)
    programmer = Programmer(url, given.seed)
    code = training.wait()
    programmer.join()
    report(programmer, run)
    sys.exit(code or len(programmer.failed))


def address_of(run: RunDirectory, has_ended: Callable[[], bool]) -> str:
    """Where the first replica answers, as soon as it does; the program ends if the run does."""
    while not (run.doors / "0").exists():
        if has_ended():
            sys.exit("the run has ended before anybody could ask")
        time.sleep(0.05)
    return (run.doors / "0").read_text(encoding="utf-8").strip()


def report(programmer: Programmer, run: RunDirectory) -> None:
    """Print acceptance over time, latencies, and failed requests."""
    seen = programmer.seen
    end_s = seen[-1].at_s
    print(f"{len(seen)} completions in {end_s:.0f} s, {len(programmer.failed)} requests failed")
    for tenth in range(10):
        part = [one for one in seen if tenth <= 10 * one.at_s / end_s < tenth + 1] or seen[-1:]
        print(f"  from {tenth * end_s / 10:5.1f} s: {sum(one.is_accepted for one in part) / len(part):4.0%} accepted")
    took = sorted(one.took_s for one in seen)
    print(f"latency: p50 {1000 * took[len(took) // 2]:.0f} ms, p95 {1000 * took[len(took) * 95 // 100]:.0f} ms")
    records = list(run.read_metrics())
    for name, what in (("latency", "with the engine at work"), ("latency_training", "which waited for training")):
        for kind, label in (("s", "mean"), ("p95_s", "p95")):
            values = [record[key] for record in records if (key := f"online/{name}_{kind}") in record]
            if values:
                print(f"  {what}: {label} {1000 * sum(values) / len(values):.0f} ms")
    for name in ("requests", "interrupted", "stale", "without_feedback", "failed"):
        print(f"  {name}: {sum(record.get(f'online/{name}', 0) for record in records):.0f}")


if __name__ == "__main__":
    main()
