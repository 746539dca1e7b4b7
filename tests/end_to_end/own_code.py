"""Custom code of users: rewards, a stage and a workflow."""

from __future__ import annotations

from tests.end_to_end.own_reward import fail_on_small_letters, share_of_digits

from leaderless import Batch, RewardInput, StageContext, Workflow, stage

__all__ = ["fail_on_small_letters", "share_of_digits"]


def zero_on_small_letters(sample: RewardInput) -> float:
    try:
        return fail_on_small_letters(sample)
    except LookupError:
        return 0.0


def always_fail(sample: RewardInput) -> float:
    raise ConnectionError("the judge is asleep")


@stage(reads=["rewards", "tokens", "rows"], writes=["rewards", "bonus"])
def bonus_for_even_sums(batch: Batch, context: StageContext) -> Batch:
    """A reward that depends on the row and on the first token, in a separate column."""
    import torch

    assert context.node.node.run.endswith("bonus_for_even_sums")
    answers = [int(str(row["answer"])) for row in batch.objects("rows") if isinstance(row, dict)]
    bonus = torch.tensor([float(answer % 2 == 0) for answer in answers])
    context.metrics.mean("bonus", bonus.sum(), len(batch))
    first = torch.stack([row[0] for row in batch.jagged("tokens").rows()])
    return batch.with_columns(rewards=batch.dense("rewards") + bonus * (first + 1), bonus=bonus)


def workflow() -> Workflow:
    """The same as OWN_WORKFLOW."""
    return (
        Workflow("own")
        .node("rollout", run="rollout", role="policy")
        .node("reward", run="reward", after="rollout")
        .node("bonus", run="tests.end_to_end.own_code:bonus_for_even_sums", after=["reward"])
        .node("advantage", run="advantage", after="bonus")
        .node("samples", run="record", after="advantage")
        .node("policy", run="update", role="policy", after=["advantage"])
    )


OWN_WORKFLOW = """
name: own
nodes:
  rollout: {run: rollout, role: policy}
  reward: {run: reward, after: rollout}
  bonus: {run: "tests.end_to_end.own_code:bonus_for_even_sums", after: reward}
  advantage: {run: advantage, after: bonus}
  samples: {run: record, after: advantage}
  policy: {run: update, role: policy, after: advantage}
"""
