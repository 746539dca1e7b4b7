"""The columns that built-in stages exchange.

A column is `dense` (one value per row), `jagged` (a run of values per row, on a named axis) or `object` (JSON-able).
Columns of a stage of one's own need no entry here; what is here is documented and sized in plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal["prompt_tokens", "tokens", "response_tokens"]


@dataclass(frozen=True)
class Column:
    """What a built-in column holds.

    Attributes:
        kind: How values are stored.
        dtype: Their type; `json` for objects.
        meaning: One line for the reader.
        axis: For a jagged column, the axis that its values run along.
        is_prompt: Held once per prompt, in the prompt table that samples point to.
    """

    kind: Literal["dense", "jagged", "object"]
    dtype: Literal["int64", "float32", "bool", "json"]
    meaning: str
    axis: Axis | None = None
    is_prompt: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of one value; for objects an assumed size."""
        return {"int64": 8, "float32": 4, "bool": 1, "json": 512}[self.dtype]


COLUMNS: dict[str, Column] = {
    "prompt_tokens": Column("jagged", "int64", "token ids of the prompt", "prompt_tokens", is_prompt=True),
    "rows": Column("object", "json", "the row of the dataset, all of its columns", is_prompt=True),
    "tokens": Column("jagged", "int64", "token ids of all that follows the prompt", "tokens"),
    "response_mask": Column("jagged", "bool", "which of `tokens` the policy sampled", "tokens"),
    "response_lengths": Column("dense", "int64", "number of sampled tokens"),
    "truncated": Column("dense", "bool", "the response was cut at its longest allowed length"),
    "is_greedy": Column("dense", "bool", "the response was decoded greedily, as a baseline"),
    "policy_versions": Column("dense", "int64", "optimiser steps behind the weights that sampled the response"),
    "rollout_log_probs": Column(
        "jagged", "float32", "log-probability of each sampled token, as the engine sampled it", "response_tokens"
    ),
    "old_log_probs": Column(
        "jagged", "float32", "the trainer's log-probabilities before this step's updates", "response_tokens"
    ),
    "ref_log_probs": Column("jagged", "float32", "log-probabilities under the reference", "response_tokens"),
    "rewards": Column("dense", "float32", "weighted sum of the rewards that apply"),
    "reward_valid": Column("dense", "bool", "all rewards of the sample were computed; false where one failed"),
    "reward_details": Column("object", "json", "each reward by name, and why it failed if it did"),
    "values": Column("jagged", "float32", "what the critic expects before each sampled token", "response_tokens"),
    "advantages": Column("jagged", "float32", "advantage of each sampled token", "response_tokens"),
    "returns": Column("jagged", "float32", "the critic's target at each sampled token", "response_tokens"),
}

DATA_COLUMNS = ("prompt_tokens", "rows")
"""What the dataloader provides for every prompt."""
DATA_RESPONSE_COLUMNS = ("tokens", "response_mask")
"""What it provides as well when `data.train.response` names a column to imitate."""
