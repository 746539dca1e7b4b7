"""The workflow of `leaderless eval`: a model answers, and the worker grades its responses."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leaderless.config.functions import name_of
from leaderless.workflow.stage import STAGES
from leaderless.workflow.stages import BUILTIN_STAGES
from leaderless.workflow.workflow import Workflow

if TYPE_CHECKING:
    from leaderless.data.batch import Batch
    from leaderless.stages.context import StageContext


ANSWER = "answer"
"""Name of the node that samples the responses."""


def evaluation_workflow(role: str) -> Workflow:
    """A workflow of one node, in which a role answers."""
    return Workflow("evaluation").node(ANSWER, run=name_of(answer), role=role)


def answer(batch: Batch, context: StageContext) -> Batch:
    """Sample as `rollout` does, even if no other node reads the responses, and greedily if asked to."""
    from leaderless.stages.rollout import rollout

    return rollout(batch, context)


STAGES.declare(answer, replace(BUILTIN_STAGES["rollout"], has_effect=True, grades=True, check=None))
