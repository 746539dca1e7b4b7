"""How much a node worked on, for the trace: what a profile needs to separate the costs of rows from those of tokens."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.training.micro_batches import response_lengths

AXIS = "response_tokens"


def sizes_of(*batches: Batch, are_lengths_shown: bool) -> Mapping[str, int | list[int]]:
    """Rows, sampled tokens and the most of a row, of the first batch that has tokens; else rows alone.

    Args:
        batches: Output and input of a node, in this order.
        are_lengths_shown: Whether to add the tokens of each row.
    """
    for batch in batches:
        found = _sampled_tokens(batch)
        if found is not None:
            lengths: list[int] = found.tolist()
            sizes: dict[str, int | list[int]] = {"rows": len(lengths), "tokens": sum(lengths)}
            sizes["longest"] = max(lengths, default=0)
            return {**sizes, "lengths": lengths} if are_lengths_shown else sizes
    return {"rows": max(len(batch) for batch in batches)}


def _sampled_tokens(batch: Batch) -> Tensor | None:
    """[n] sampled tokens of each row, if the batch has a column that shows them."""
    if "response_mask" in batch:
        return response_lengths(batch.jagged("response_mask"))
    columns = batch.columns.values()
    return next((x.lengths for x in columns if isinstance(x, Jagged) and x.axis == AXIS), None)
