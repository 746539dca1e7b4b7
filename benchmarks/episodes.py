"""Episodes: how long it takes to play them when tools are slow, and how much of that time the engine works.

    python benchmarks/episodes.py && python docs/generate.py

Episodes of 8 turns are played with the native engine on the CPU, on one thread, 64 at a time. In each turn the policy
says 32 tokens and a tool answers with 32, after a delay that is lognormal with a given mean. The package plays each
episode by itself; a loop that waits, as in other programs, lets 64 episodes speak, runs their tools together, and
waits for the slowest. Both do this with keys and values kept between turns, and with every turn reading its whole
conversation. The ways take turns, have the same delays, and sample the same tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, TypedDict

sys.path.insert(0, str(Path(__file__).parent))  # where the documentation reads it
from made import CHARACTERS

if TYPE_CHECKING:
    from leaderless.environments.chat_writer import ChatWriter
    from leaderless.environments.episode import EpisodePosition
    from leaderless.environments.protocol import Environment
    from leaderless.rollout.engine import Delta, Request, RolloutEngine, SamplingParams

RESULTS = Path(__file__).resolve().parents[1] / "docs/performance/episodes.json"
SAID_TOKENS = TOLD_TOKENS = 32
PROMPT_TOKENS = 256
AT_ONCE = 64
"""Episodes that are played at the same time."""
SPREAD = 1.0
"""Standard deviation of the logarithm of delays."""
WAYS = {
    "waits anew": "waits for all tools, reads anew",
    "waits keeping": "waits for all tools, keeps",
    "plays anew": "leaderless, reads anew",
    "plays keeping": "leaderless, keeps",
}


class Run(TypedDict):
    """One measurement.

    Attributes:
        episodes: Number of episodes.
        delay_s: Mean delay of a tool.
        way: Name of the way.
        seconds: Seconds until the last episode was over.
        busy_s: Seconds in which the engine worked.
        read_tokens: Tokens of prompts that the engine read.
        sampled_tokens: Tokens that it sampled.
    """

    episodes: int
    delay_s: float
    way: str
    seconds: float
    busy_s: float
    read_tokens: int
    sampled_tokens: int


class Results(TypedDict):
    """All runs, and what they ran on."""

    cores: int
    versions: dict[str, str]
    at_once: int
    turns: int
    runs: list[Run]


@dataclass
class WatchedEngine:
    """See `RolloutEngine`. It measures another one, and may be one that keeps nothing between turns."""

    engine: RolloutEngine
    does_keep: bool
    busy_s: float = 0.0
    read_tokens: int = 0
    said: dict[int, list[int]] = field(default_factory=dict)
    _sample_ids: dict[int, int] = field(default_factory=dict)

    def submit(self, request: Request, params: SamplingParams) -> int:
        self.read_tokens += len(request.prompt)
        number = self.engine.submit(request if self.does_keep else replace(request, conversation=None), params)
        self._sample_ids[number] = request.sample_ids[0]
        return number

    def step(self) -> list[Delta]:
        begin = time.perf_counter()
        deltas = self.engine.step()
        self.busy_s += time.perf_counter() - begin
        for delta in deltas:
            self.read_tokens -= delta.cached_tokens
            self.said.setdefault(self._sample_ids[delta.request], []).extend(delta.tokens)
        return deltas

    def abort(self, request: int) -> None:
        self.engine.abort(request)

    def forget(self, conversation: int) -> None:
        self.engine.forget(conversation)


def make_tool(delay_s: float, num_turns: int) -> Environment:
    """An environment whose answers are late."""
    from leaderless.environments.protocol import Environment, Observation, Task, Turn

    class SlowTool(Environment):
        def reset(self, task: Task, rng: Random) -> Observation:
            self.left = num_turns
            # The mean of a lognormal is exp(mean + spread^2 / 2).
            self.delays = [
                delay_s * math.exp(rng.gauss(0, SPREAD) - SPREAD**2 / 2) if delay_s else 0.0 for _ in range(num_turns)
            ]
            self.answers = ["".join(rng.choices(CHARACTERS, k=TOLD_TOKENS)) for _ in range(num_turns)]
            return str(task["text"])

        def act(self, text: str) -> Turn:  # noqa: ARG002
            self.left -= 1
            time.sleep(self.delays[self.left])
            return Turn(self.answers[self.left], done=self.left == 0)

    return SlowTool()


def make_places(num_episodes: int, writer: ChatWriter) -> list[EpisodePosition]:
    """The same episodes for all ways."""
    from leaderless.config.rollout import SamplingConfig
    from leaderless.environments.episode import EpisodePosition
    from leaderless.rollout.engine import SamplingParams

    generator, params = Random(0), SamplingParams(SamplingConfig(), SAID_TOKENS)
    texts = ["".join(generator.choices(CHARACTERS, k=PROMPT_TOKENS)) for _ in range(num_episodes)]
    return [EpisodePosition(1000 + n, f"0/{n}", {"text": text}, writer, params) for n, text in enumerate(texts)]


def play(engine: WatchedEngine, places: Sequence[EpisodePosition], delay_s: float, num_turns: int) -> None:
    """Play episodes as the package does: each goes on when its own tool has answered."""
    from leaderless.config.environment import EnvironmentConfig
    from leaderless.environments.guarded_environment import ThreadEnvironment
    from leaderless.environments.player import play_all

    config = EnvironmentConfig(type="benchmarks.episodes:SlowTool", max_turns=num_turns + 1, concurrency=AT_ONCE)
    episodes, _ = play_all(
        engine,
        config,
        lambda: ThreadEnvironment(lambda: make_tool(delay_s, num_turns), 600.0),
        places,
        PROMPT_TOKENS + num_turns * (SAID_TOKENS + TOLD_TOKENS),
        lambda _: None,
    )
    assert not any(episode.cause for episode in episodes), episodes[0].error


def wait(engine: WatchedEngine, places: Sequence[EpisodePosition], delay_s: float, num_turns: int) -> None:
    """Play episodes in a loop that waits for all tools in each turn."""
    for begin in range(0, len(places), AT_ONCE):
        _wait(engine, places[begin : begin + AT_ONCE], delay_s, num_turns)


def _wait(engine: WatchedEngine, places: Sequence[EpisodePosition], delay_s: float, num_turns: int) -> None:
    from leaderless.environments.episode_runner import noise_id
    from leaderless.environments.guarded_environment import messages_of
    from leaderless.rollout.engine import Request, generate

    tools = [make_tool(delay_s, num_turns) for _ in places]
    writer, params = places[0].writer, places[0].params
    first = [tool.reset(place.task, Random(place.seed)) for tool, place in zip(tools, places, strict=True)]
    texts = [writer.begin(messages_of(str(text)))[1] for text in first]
    with ThreadPoolExecutor(len(places)) as threads:
        for turn in range(num_turns):
            ids = [noise_id(place.number, 0, turn) for place in places]
            requests = [Request(list(text), [one], (), n) for n, (text, one) in enumerate(zip(texts, ids, strict=True))]
            said = [completion.tokens for (completion,) in generate(engine, requests, params)]
            answers = threads.map(lambda tool, tokens: tool.act(writer.text(tokens)), tools, said)
            for text, tokens, answer in zip(texts, said, answers, strict=True):
                text += [*tokens, *writer.add(messages_of(str(answer.observation)), tokens)]
    for number in range(len(places)):
        engine.forget(number)


class Bench:
    """A model, its engine and the episodes."""

    def __init__(self, folder: Path, num_turns: int, hidden_size: int = 64) -> None:
        import torch

        from leaderless.config.models import ModelConfig
        from leaderless.environments.chat_writer import ChatWriter
        from leaderless.models.causal_lm import load_causal_lm
        from leaderless.models.loading.tiny import write_tiny_model
        from leaderless.models.loading.tokenizer import load_tokenizer
        from leaderless.rollout.native.engine import NativeEngine

        write_tiny_model(folder, CHARACTERS, hidden_size=hidden_size, num_layers=2, num_heads=4, max_positions=2048)
        config = ModelConfig(path=str(folder))
        model, tokenizer = load_causal_lm(config, "policy").eval(), load_tokenizer(config, "policy")
        self.engine = NativeEngine(model, tokenizer, frozenset(), AT_ONCE, torch.device("cpu"))
        self.writer, self.num_turns = ChatWriter(tokenizer, is_chat=False), num_turns

    def measure(self, way: str, num_episodes: int, delay_s: float) -> tuple[Run, Mapping[int, list[int]]]:
        """A run, and what was sampled, by sample id."""
        kind, _, keeping = way.partition(" ")
        watched = WatchedEngine(self.engine, does_keep=keeping == "keeping")
        places, begin = make_places(num_episodes, self.writer), time.perf_counter()
        (play if kind == "plays" else wait)(watched, places, delay_s, self.num_turns)
        seconds, sampled = time.perf_counter() - begin, sum(map(len, watched.said.values()))
        run = Run(
            episodes=num_episodes,
            delay_s=delay_s,
            way=way,
            seconds=seconds,
            busy_s=watched.busy_s,
            read_tokens=watched.read_tokens,
            sampled_tokens=sampled,
        )
        return run, watched.said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--delays", nargs="+", type=float, default=(0.0, 0.05, 0.5), help="mean delays in seconds")
    parser.add_argument("--many", type=int, default=256, help="episodes that are played once, with the largest delay")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "transformers")}
    cores = len(os.sched_getaffinity(0))
    results = Results(cores=cores, versions=versions, at_once=AT_ONCE, turns=options.turns, runs=[])
    cases = [(AT_ONCE, delay_s) for _ in range(options.repeats) for delay_s in options.delays]
    cases.append((options.many, max(options.delays)))
    with tempfile.TemporaryDirectory(prefix="episodes-") as folder:
        bench = Bench(Path(folder), options.turns)
        bench.measure("plays keeping", AT_ONCE, 0.0)  # to warm up
        for num_episodes, delay_s in cases:
            for way in WAYS:
                results["runs"].append(bench.measure(way, num_episodes, delay_s)[0])
                print(results["runs"][-1], file=sys.stderr)
                options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


def load(path: Path = RESULTS) -> Results | None:
    """The results so far; None if there are none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def summary(results: Results) -> str:
    """What was measured, in a line."""
    cases = [(run["episodes"], run["delay_s"], run["way"]) for run in results["runs"]]
    return (
        f"{results['turns']} turns, {results['at_once']} episodes at a time, one thread, torch "
        f"{results['versions']['torch']}; medians of up to {max(map(cases.count, cases))} runs."
    )


def table(results: Results) -> str:
    """A row for each case and way, in Markdown."""
    lines = [
        "| episodes | mean delay, ms | | total, s | engine works | tokens read | as fast as the first way |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: |",
    ]
    runs = results["runs"]
    for case in dict.fromkeys((run["episodes"], run["delay_s"]) for run in runs):
        first = 0.0
        for way, title in WAYS.items():
            mine = [run for run in runs if (run["episodes"], run["delay_s"], run["way"]) == (*case, way)]
            seconds, busy = (median(run[key] for run in mine) for key in ("seconds", "busy_s"))
            first = first or seconds
            read = f"{median(run['read_tokens'] for run in mine):,.0f}"
            lines.append(
                f"| {case[0]} | {1000 * case[1]:g} | {title} | {seconds:.1f} | {busy / seconds:.0%} | {read} | "
                f"{first / seconds:.2f} × |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
