"""The same workflow as workflow.yaml, built in Python: `workflow: examples.own_workflow.workflow:informative`."""

from __future__ import annotations

from leaderless import Workflow


def informative() -> Workflow:
    """GRPO that scores and trains only samples of groups with a signal."""
    return (
        Workflow("grpo-informative")
        .node("rollout", run="rollout", role="policy")
        .node("reward", run="reward", after="rollout")
        .node("advantage", run="advantage", after="reward")
        .node("samples", run="record", after="advantage")
        .node("informative", run="examples.own_workflow.stages:informative", after="advantage")
        .node("reference", run="log_probs", role="reference", after="informative")
        .node("policy", run="update", role="policy", after=["informative", "reference"])
    )
