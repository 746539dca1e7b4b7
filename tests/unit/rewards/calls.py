"""Rewards and responses that several tests share."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from leaderless.base.values import Json
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.protocol import GradingOutcome, RewardInput
from leaderless.rewards.reward_process import RewardProcess

ROOT = Path(__file__).parents[3]
TIMEOUT_S = 1.0
FUNCTIONS = (
    *("length", "one", "large", "echo", "what_is_said", "hash_order", "process_id", "loaded_modules", "chatter"),
    *("leave_thread", "sleep_as_told", "crash_once", "mark_and_do"),
)


def own(name: str) -> str:
    return f"tests.unit.reward_functions:{name}"


def make_config(rewards: Mapping[str, object]) -> RewardsConfig:
    return RewardsConfig.model_validate(rewards)


def make_sample(response: str, answer: Json = None) -> RewardInput:
    return RewardInput("prompt", response, answer, {"question": "prompt"}, is_truncated=False)


def grade(rewards: RewardPool, name: str, responses: Sequence[str], answer: Json = None) -> list[Graded]:
    return rewards.grade([make_sample(response, answer) for response in responses], [name] * len(responses))


def error_of(graded: Graded, name: str) -> str:
    assert not graded.is_valid
    assert graded.value == 0.0
    detail = graded.details[name]
    assert isinstance(detail, Mapping)
    assert "value" not in detail
    return str(detail["error"])


def reward_pids() -> set[int]:
    return {child.pid for child in multiprocessing.active_children() if isinstance(child, RewardProcess)}


def serve_and_leave(
    is_grading: bool,
    is_hanging: bool,
    config: RewardsConfig,
    worker: Connection,
    outcomes: Connection,
    printed: Connection,
) -> None:
    """Serve as a reward process that hangs or ends at the response "second", or just before it unless it comes first.

    The answer of a response is the file to which the size of its chunk is added.
    """
    with suppress(EOFError, BrokenPipeError):
        worker.send_bytes(b"[]")
        while True:
            _, calls = worker.recv()
            samples = [sample for (sample,) in calls]
            with Path(samples[0].answer).open("a") as sizes:
                sizes.write(f"{len(samples)} ")
            for index, sample in enumerate(samples):
                is_culprit = sample.response == "second" and (is_grading or index > 0)
                if is_grading or not is_culprit:
                    os.write(outcomes.fileno(), b" ")
                if is_culprit and is_hanging:
                    time.sleep(600.0)
                if is_culprit:
                    os._exit(3)
                os.write(outcomes.fileno(), json.dumps([GradingOutcome(1.0)]).encode() + b"\n")
            worker.send_bytes(b"")


EVERYTHING = {
    "exact_match": {"sources": ["exact_match", "both"], "weight": 2.0},
    "format": {"sources": ["format", "both"], "weight": -0.5, "pattern": r"<.*>", "timeout_s": TIMEOUT_S},
} | {own(name): {"sources": [name], "timeout_s": TIMEOUT_S} for name in FUNCTIONS}
EVERYTHING[own("large")] = {"sources": ["large"], "weight": 10.0}
