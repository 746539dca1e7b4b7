"""The workflow of `leaderless eval`: a model answers, and the worker grades its responses, perhaps by other models."""

from __future__ import annotations

from leaderless.planner.workflow.builtin_stages import KEEP, RESPOND
from leaderless.planner.workflow.workflow import Workflow

ANSWER = "answer"
"""Name of the node that samples the responses."""
JUDGE = "judge"
"""Name of the node that has the judges which are models of the recipe."""


def evaluation_workflow(role: str, *, is_judged: bool = False) -> Workflow:
    """A workflow in which a role answers; with judges that are models, they have a node, and so a layout, as well."""
    workflow = Workflow("evaluation").node(ANSWER, run=RESPOND, role=role)
    return workflow.node(JUDGE, run=KEEP, after=ANSWER) if is_judged else workflow
