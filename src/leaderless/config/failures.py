"""Failures of episodes by whose fault they are, and what is done about each kind. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

from pydantic import ValidationInfo, field_validator

from leaderless.base.section import Section

FailureKind = Literal["policy", "environment", "tool", "sandbox", "grader", "deadline", "infrastructure"]
"""Kinds of failures, named after whose fault they are."""
FailureRule = Literal["trained", "observation", "retried", "deferred", "absent"]
"""What is done about a failure: the episode counts as it is; the policy is told, and goes on; the episode begins anew;
it waits in the journal for its grade; or it leaves training, and is counted."""
FAILURE_KINDS: tuple[FailureKind, ...] = get_args(FailureKind)


PLAYED_KINDS = tuple(kind for kind in FAILURE_KINDS if kind != "grader")
"""Kinds of failures while an episode is played."""
GUARDED_KINDS = tuple(kind for kind in FAILURE_KINDS if kind != "policy")
"""Kinds of failures that a guard watches."""


class FailureFacts(NamedTuple):
    """A kind of failure, for people.

    Attributes:
        meaning: Event, as a clause for metrics and pages.
        reason: Reason for the rule that holds by default.
    """

    meaning: str
    reason: str


FAILURE_FACTS: Mapping[FailureKind, FailureFacts] = {
    "policy": FailureFacts(
        "the policy wrote a call that cannot be answered, or used up the tokens of its conversation",
        "its own doing is what it learns from, so such an episode keeps its rewards and is trained on",
    ),
    "environment": FailureFacts(
        "the environment, or the program that leads the episode, raised an error, gave up, or ended by itself",
        "what the episode is worth is unknown, and the same error often comes again",
    ),
    "tool": FailureFacts(
        "a tool raised an error other than `ToolError`",
        "the episode is whole, and tools fail where the policy will be used, too",
    ),
    "sandbox": FailureFacts(
        "the sandbox of the policy's programs ended, or cannot be started",
        "it has nothing to do with what the policy wrote, and a new one mostly works",
    ),
    "grader": FailureFacts(
        "a reward of the recipe raised an error, took too long, or gave no number",
        "the episode is whole: once the reward is mended, it can be graded again",
    ),
    "deadline": FailureFacts(
        "an answer took longer than `act_timeout_s`, or a call longer than `tool_timeout_s`",
        "a further attempt would mostly take as long, and what is late may still be running",
    ),
    "infrastructure": FailureFacts(
        "a server cannot be reached, a connection broke, or a process was killed from outside",
        "it hits episodes whatever the policy did, so that trying again favors none, and it mostly passes",
    ),
}
"""Facts about each kind, in the order of the kinds."""

_REFUSALS: Mapping[FailureRule, str] = {
    "trained": "what such an episode is worth is unknown, and would have to be invented",
    "observation": "only the policy's calls of tools have results that could hold an error",
    "retried": "the episode is whole, and playing it again mends no reward",
    "deferred": "an episode that broke off cannot be graded later",
    "absent": "a failure of the policy is its own, and is what it learns from",
}
"""Why kinds that cannot have a rule cannot have it."""


class FailuresConfig(Section):
    """What is done about a failed episode, by the kind of the failure.

    `absent`: it leaves training and its group's statistics, and is counted. `retried`: it begins anew, at most
    `environment.max_attempts` times in all, and is absent then. `observation`: the policy reads the error as the result
    of its call, and goes on. `deferred`: it is absent, and stays in the journal until `leaderless env regrade` has
    graded it. `trained`: it keeps its rewards so far. See [Failures](../../concepts/episodes.md#failures).
    """

    policy: Literal["trained"] = "trained"
    """The policy wrote a call that cannot be answered, or used up the tokens of its conversation. No other rule: such
    failures are what it learns from. To leave episodes that were cut out of the gradient, set
    `algorithm.overlong.filter`."""
    environment: Literal["absent", "retried"] = "absent"
    """The environment, or the program that leads the episode, raised an error, gave up, or ended by itself."""
    tool: Literal["observation", "absent", "retried"] = "observation"
    """A tool raised an error other than `ToolError`."""
    sandbox: Literal["retried", "absent", "observation"] = "retried"
    """The sandbox of the policy's programs ended, or cannot be started."""
    grader: Literal["deferred", "absent"] | None = None
    """A reward of the recipe failed; by default `deferred`, or `absent` if `run.kept_episodes` is 0 and there is no
    journal."""
    deadline: Literal["absent", "retried"] = "absent"
    """A time limit of the recipe has passed."""
    infrastructure: Literal["retried", "absent"] = "retried"
    """A server cannot be reached, a connection broke, or a process was killed from outside."""

    @field_validator("*", mode="before")
    @classmethod
    def _rule_makes_sense(cls, value: object, info: ValidationInfo) -> object:
        kind = next(kind for kind in FAILURE_KINDS if kind == info.field_name)
        rule = next((rule for rule in _REFUSALS if rule == value), None)
        if rule is None or rule in rules_of(kind):
            return value  # what is no rule at all is refused by its type
        reason, remedy = _REFUSALS[rule], f"set {' or '.join(rules_of(kind))}"
        if kind == "policy":
            reason = _REFUSALS["absent"]
            remedy = "leave it out; to keep episodes that are cut out of the gradient, set algorithm.overlong.filter"
        elif kind == "deadline" and rule == "observation":
            reason = "what is late may still be running, and would change what the policy sees next"
            remedy += ", or give the tool a time limit of its own that ends in a ToolError"
        raise ValueError(f"{kind} failures cannot have the rule '{rule}': {reason}; {remedy}")

    def kinds_with(self, rule: FailureRule) -> frozenset[FailureKind]:
        """The kinds of failures that have a rule."""
        return frozenset(kind for kind in FAILURE_KINDS if getattr(self, kind) == rule)


def rules_of(kind: FailureKind) -> tuple[FailureRule, ...]:
    """The rules that a kind may have, the default one first."""
    arguments = get_args(FailuresConfig.model_fields[kind].annotation)
    rules: tuple[FailureRule, ...] = arguments if isinstance(arguments[0], str) else get_args(arguments[0])
    return rules
