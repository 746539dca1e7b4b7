"""The stage that scores sampled tokens under a role."""

from __future__ import annotations

from leaderless.data.batch import Batch
from leaderless.stages.context import StageContext


def log_probs(batch: Batch, context: StageContext) -> Batch:
    """Add the log-probabilities of the sampled tokens under the node's role, at the temperature of sampling.

    The column is `old_log_probs` for a role that is trained, `ref_log_probs` for the reference, and `<role>_log_probs`
    for any other.
    """
    scores = context.role.train_engine.log_probs(batch, context.recipe.rollout.temperature)
    (column,) = context.node.writes
    return batch.with_columns({column: scores})
