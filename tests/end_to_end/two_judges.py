"""A workflow in which two judges look at the same samples, on ranks of their own, and take a time for each sample."""

from __future__ import annotations

from leaderless import Batch, StageContext, Workflow, stage

SECONDS = 20.0
"""Seconds by `CLOCK` that a judge takes for a sample, unless the run is called `quick`.

A switch must save more than models have taken to load, which is measured by a real clock: on a busy machine, long.
"""
SLOW_FROM = 5
"""Step from which the first judge takes twice as long."""


class SlowClock:
    """A clock on which only judges take much time, however busy the machine is; it takes the place of a real one.

    Attributes:
        now_s: Seconds that have passed.
    """

    LOOK_S = 1e-6
    """Seconds that pass whenever the time is read, so that nothing takes none at all."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        self.now_s += self.LOOK_S
        return self.now_s


CLOCK = SlowClock()
"""The clock of this process."""


def look(batch: Batch, context: StageContext, factor: int = 1) -> None:
    """Take the time."""
    if context.recipe.name != "quick":
        CLOCK.now_s += SECONDS * len(batch) * factor


@stage(reads=["rewards"], writes=["first"])
def first_judge(batch: Batch, context: StageContext) -> Batch:
    """Look at samples, slower from some step on."""
    look(batch, context, 2 if context.step >= SLOW_FROM else 1)
    return batch.with_columns(first=batch.dense("rewards") * 2)


@stage(reads=["rewards"], writes=["second"])
def second_judge(batch: Batch, context: StageContext) -> Batch:
    """Look at samples, too."""
    look(batch, context)
    return batch.with_columns(second=batch.dense("rewards") * 3)


@stage(reads=["first", "second"], writes=["rewards"])
def agree(batch: Batch, context: StageContext) -> Batch:
    """What both judges say."""
    return batch.with_columns(rewards=batch.dense("first") + batch.dense("second"))


def workflow() -> Workflow:
    here = "tests.end_to_end.two_judges"
    return (
        Workflow("judged")
        .node("rollout", run="rollout", role="policy")
        .node("reward", run="reward", after="rollout")
        .node("first", run=f"{here}:first_judge", after="reward")
        .node("second", run=f"{here}:second_judge", after="reward")
        .node("agree", run=f"{here}:agree", after=["first", "second"])
        .node("advantage", run="advantage", after="agree")
        .node("policy", run="update", role="policy", after="advantage")
    )


def layout(first: str, second: str) -> dict[str, dict[str, str]]:
    """The ranks of the judges; what they say comes together on a rank of the first one, so that sums stay the same."""
    ranks = {"first": first, "second": second, "agree": "0", "policy": "all"}
    return {node: {"ranks": text} for node, text in ranks.items()}
