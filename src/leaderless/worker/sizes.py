"""How much a node worked on, for the trace: what a profile needs to tell the costs of rows from those of tokens."""

from __future__ import annotations

from collections.abc import Mapping

from leaderless.data.batch import Batch, Jagged

AXIS = "response_tokens"


def sizes_of(*batches: Batch, are_lengths_shown: bool) -> Mapping[str, int | list[int]]:
    """Rows, sampled tokens and the most of a row, of the first batch that has tokens; else rows alone.

    Args:
        batches: What a node has made and what it was given, in this order.
        are_lengths_shown: Whether to add the tokens of each row.
    """
    for batch in batches:
        columns = batch.columns.values()
        found = next((x.lengths for x in columns if isinstance(x, Jagged) and x.axis == AXIS), None)
        if found is not None:
            lengths: list[int] = found.tolist()
            sizes: dict[str, int | list[int]] = {"rows": len(lengths), "tokens": sum(lengths)}
            sizes["longest"] = max(lengths, default=0)
            return {**sizes, "lengths": lengths} if are_lengths_shown else sizes
    return {"rows": max(len(batch) for batch in batches)}
