"""The workflow of `leaderless eval`: a model answers, and the worker grades its responses, perhaps by other models."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from leaderless.config.functions import name_of
from leaderless.workflow.stage import STAGES, StageSpec
from leaderless.workflow.stages import BUILTIN_STAGES
from leaderless.workflow.workflow import Workflow

if TYPE_CHECKING:
    from leaderless.data.batch import Batch
    from leaderless.stages.context import StageContext


ANSWER = "answer"
"""Name of the node that samples the responses."""
JUDGE = "judge"
"""Name of the node that has the judges which are models of the recipe."""


def evaluation_workflow(role: str, *, is_judged: bool = False) -> Workflow:
    """A workflow in which a role answers; with judges that are models, they have a node, and so a layout, as well."""
    workflow = Workflow("evaluation").node(ANSWER, run=name_of(answer), role=role)
    return workflow.node(JUDGE, run=name_of(judge), after=ANSWER) if is_judged else workflow


def answer(batch: Batch, context: StageContext) -> Batch:
    """Sample as `rollout` does, even if no other node reads the responses, and greedily if asked to."""
    from leaderless.stages.rollout import rollout

    return rollout(batch, context)


def judge(batch: Batch, context: StageContext) -> Batch:  # noqa: ARG001
    """Leave the responses as they are: what evaluates asks the judges of this node itself."""
    return batch


STAGES.declare(answer, replace(BUILTIN_STAGES["rollout"], has_effect=True, check=None))
STAGES.declare(judge, StageSpec(name_of(judge), has_effect=True, grades=True))
