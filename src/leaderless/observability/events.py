"""Events of guards, as they are recorded. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Self

from leaderless.base.values import Json
from leaderless.config.run import GuardAction

STRENGTH: tuple[GuardAction, ...] = ("warn", "skip", "roll_back", "stop")
"""Actions from the mildest to the strongest."""
_DONE = {
    "warn": "training continues",
    "skip": "the update was left out",
    "roll_back": "back to the newest checkpoint, past the prompts since",
    "stop": "the run stops",
}
_REMEDIES = {
    "non_finite_loss": "look at the rewards and advantages of this step, and at what your own stages divide by",
    "non_finite_gradient": "lower the learning rate, or look at the rewards and advantages of this step",
    "max_skips": "what makes updates bad does not pass: lower the learning rate, look at the samples, at rewards and "
    "at what your own stages divide by, or raise it",
    "grad_norm_limit": "lower the learning rate, look at the samples of this step, or raise the limit",
    "grad_norm_factor": "lower the learning rate, look at the samples of this step, or raise the factor",
    "entropy_limit": "lower the learning rate, raise algorithm.policy_loss.clip_high or algorithm.kl.coefficient, or "
    "lower the limit",
    "effective_samples_limit": "the engine samples from another policy than the one that is trained: let it compute "
    "in a finer format (rollout.external.arguments), correct what remains (algorithm.correction), lower max_staleness "
    "of a channel, or lower the limit",
    "reward_failures_limit": "read the errors in the report; correct the reward, or raise its timeout_s or the limit",
    "failures_limit": "read the errors in the report, and mend what fails; change what is done about it in "
    "environment.failures, or raise the limit",
    "max_roll_backs": "what makes steps bad is not their data: change the settings of training, or raise it",
}
GUARDS = tuple(_REMEDIES)
"""Guards, named after the setting of the section `guards` that holds their limit or action."""
LOWER_BOUNDS = ("entropy_limit", "effective_samples_limit")
"""Guards that act below their limit; all others act above it."""


@dataclass(frozen=True)
class GuardEvent:
    """A finding of one of the `GUARDS` in a step, and the run's response.

    The value may be NaN or infinite. The limit is None if the value only has to be finite. The role is empty for a node
    without one. Roll-backs are counted from the beginning of the run to this event. The kind is that of a failure of
    episodes.
    """

    step: int
    guard: str
    value: float
    limit: float | None
    action: GuardAction
    node: str
    role: str
    num_roll_backs: int
    kind: str = ""

    def __str__(self) -> str:
        """The finding, its place, and the run's response."""
        place = f"step {self.step}, node '{self.node}'" + (f" of role '{self.role}'" if self.role else "")
        if self.limit is None:
            seen = f"guards.{self.guard}: the value is {self.value}"
        elif self.guard == "max_skips" and self.value <= self.limit:
            seen = f"guards.max_skips={self.limit:g}: all {self.value:g} updates of the run were left out"
        else:
            side = "below" if self.guard in LOWER_BOUNDS else "above"
            what = f" (episodes with a failure of the kind '{self.kind}')" if self.kind else ""
            seen = f"guards.{self.guard}={self.limit:g}: {self.value:.6g}{what} is {side} it"
        return f"{place}: {seen}; {_DONE[self.action]}"

    @property
    def remedy(self) -> str:
        """The remedy for the user."""
        return _REMEDIES[self.guard]

    def to_json(self) -> dict[str, Json]:
        """The event as JSON, in which a value that is not finite is null."""
        return asdict(self) | {"value": self.value if math.isfinite(self.value) else None}

    @classmethod
    def from_json(cls, values: Mapping[str, Json]) -> Self:
        """The event that `to_json` wrote; a TypeError if it is something else."""
        value = values.get("value")
        number = float(value) if isinstance(value, int | float) else math.nan
        return cls(**{**values, "value": number})  # type: ignore[arg-type]


class GuardStop(RuntimeError):  # noqa: N818
    """A guard stopped the run. Saved files stay."""


def strongest(actions: Iterable[GuardAction]) -> GuardAction | None:
    """The strongest of some actions; None when there is none."""
    return max(actions, key=STRENGTH.index, default=None)
