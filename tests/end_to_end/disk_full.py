"""A stage during which the disk fills up and is cleared again, for test_failures.py."""

from __future__ import annotations

import os
import resource

import leaderless


@leaderless.stage(reads=["rewards"], writes=["rewards"])
def fail(batch: leaderless.Batch, context: leaderless.StageContext) -> leaderless.Batch:
    """Writes beyond `FULL_AT` bytes of a file fail from step 2 to step 3."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = int(os.environ["FULL_AT"]) if context.step in {2, 3} else hard
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    return batch.with_columns(rewards=batch.dense("rewards"))
