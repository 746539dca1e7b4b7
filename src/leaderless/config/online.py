"""Learning in use: people and programs ask the policy that is trained, and say what its responses were worth."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, field_validator

from leaderless.base.section import Section

ONLINE = "online"
"""Path of the training data of an online run, which are the requests of clients."""

MAX_REWARD = 1e30
"""Largest absolute value of a reward, which training holds as a float32 number."""


class OnlineConfig(Section):
    """Where clients ask the policy, and what their feedback is worth. It takes the place of `data.train`."""

    host: str = Field(default="127.0.0.1", min_length=1)
    """Interface to listen on. Where other machines can reach it, clients send the key in LEADERLESS_TOKEN."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the first replica of the rollout; the next ones have the ports after it. 0 for any free ones."""
    feedback: Mapping[str, float] = {"accepted": 1.0, "edited": 0.5, "rejected": 0.0}
    """Reward of each word that clients may send; they may also send a number."""
    feedback_timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a response without feedback is dropped."""
    max_staleness: int = Field(default=8, ge=0)
    """Most optimizer steps between the oldest token of a response and the weights of the step that takes it; an older
    response is dropped."""
    tool_format: str = Field(default="auto", min_length=1)
    """How the policy writes calls of tools; see `environment.tool_format`."""

    @field_validator("feedback")
    @classmethod
    def _words_are_given(cls, value: Mapping[str, float]) -> Mapping[str, float]:
        if not value or "" in value:
            raise ValueError("must name at least one word, and none that is empty")
        large = next((word for word in value if abs(value[word]) > MAX_REWARD), None)
        if large is not None:
            raise ValueError(f"gives '{large}' {value[large]:g}, but a reward is at most {MAX_REWARD:g}")
        return value
