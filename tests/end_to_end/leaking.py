"""Rewards that quote a secret in an error, for test_secrets.py, like a library whose address contains a token."""

from __future__ import annotations

import os

import leaderless

WORKFLOW = """
name: leaking
nodes:
  rollout:   {run: rollout, role: policy}
  reward:    {run: reward, after: rollout}
  leak:      {run: "tests.end_to_end.leaking:leak", after: reward}
  old:       {run: log_probs, role: policy, after: rollout}
  advantage: {run: advantage, after: leak}
  samples:   {run: record, after: advantage}
  policy:    {run: update, role: policy, after: [advantage, old]}
"""


def quote_token(sample: leaderless.RewardInput) -> float:
    """Fail for some responses."""
    if sum(map(ord, sample.response)) % 2:
        raise ConnectionError(f"401 for https://{os.environ['HF_TOKEN']}@host; headers {os.environ['WANDB_API_KEY']}")
    return float(len(sample.response))


@leaderless.stage(reads=["rewards"], writes=["rewards"])
def leak(batch: leaderless.Batch, context: leaderless.StageContext) -> leaderless.Batch:
    """Fail on demand."""
    if os.environ.get("LEAK"):
        raise ConnectionError(f"403 for {os.environ['AWS_SECRET_ACCESS_KEY']}")
    return batch.with_columns(rewards=batch.dense("rewards"))
