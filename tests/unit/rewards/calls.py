"""Rewards and responses that several tests share."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.config import Json
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.pool import Graded, RewardPool
from leaderless.rewards.process import RewardProcess
from leaderless.rewards.protocol import RewardInput

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


EVERYTHING = {
    "exact_match": {"sources": ["exact_match", "both"], "weight": 2.0},
    "format": {"sources": ["format", "both"], "weight": -0.5, "pattern": r"<.*>", "timeout_s": TIMEOUT_S},
} | {own(name): {"sources": [name], "timeout_s": TIMEOUT_S} for name in FUNCTIONS}
EVERYTHING[own("large")] = {"sources": ["large"], "weight": 10.0}
