"""The stage that keeps some samples for people to look at."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from leaderless.config import Json
from leaderless.data.batch import Batch
from leaderless.stages.context import StageContext
from leaderless.stages.reward import decode_responses


def record(batch: Batch, context: StageContext) -> Batch:
    """Write all samples of the first prompts of this rank, on the first rank of the node, into the run's folder.

    Args:
        batch: Samples, in whole groups.
        context: Whose recipe says how many prompts.

    Returns:
        The samples as they are.
    """
    if context.process_group.rank == context.node.layout.ranks[0] and len(batch):
        kept = torch.unique(batch.group_ids)[: context.recipe.run.recorded_prompts]
        chosen = batch.select((batch.group_ids[:, None] == kept).any(dim=1))
        context.run_directory.write_samples(context.step, context.process_group.rank, _describe(chosen, context))
    return batch


def _describe(batch: Batch, context: StageContext) -> list[dict[str, Json]]:
    texts = decode_responses(context.tokenizer, batch.jagged("tokens").to_lists(), context.recipe)
    advantages = [float(row[0]) if len(row) else 0.0 for row in batch.jagged("advantages").rows()]
    samples: list[dict[str, Json]] = []
    for index, row in enumerate(batch.objects("rows")):
        assert isinstance(row, Mapping)
        config = context.recipe.data.train_set_of(row)
        samples.append(
            {
                "step": context.step,
                "group_id": int(batch.group_ids[index]),
                "sample_id": int(batch.ids[index]),
                "prompt": row.get(config.prompt),
                "response": texts[index],
                "answer": row[config.answer] if config.answer else None,
                "reward": float(batch.dense("rewards")[index]),
                "is_valid": bool(batch.dense("reward_valid")[index]),
                "details": batch.objects("reward_details")[index],
                "advantage": advantages[index],
                "is_truncated": bool(batch.dense("truncated")[index]),
            }
        )
    return samples
