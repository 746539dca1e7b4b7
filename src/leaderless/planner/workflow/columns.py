"""The columns that built-in stages exchange.

A column is `dense` (one value per row), `jagged` (a list of values per row, on a named axis) or `object` (JSON-able).
Columns of custom stages need no entry here; those that have one are documented and sized in plans.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Axis = Literal[
    "prompt_tokens",
    "image_bytes",
    "later_image_bytes",
    "tokens",
    "first_tokens",
    "second_tokens",
    "response_tokens",
    "experts",
    "support",
    "teacher",
    "observations",
    "decisions",
    "steps",
]


@dataclass(frozen=True)
class Column:
    """The content of a built-in column.

    Attributes:
        kind: Form in which values are stored.
        dtype: Type of the values; `json` for objects.
        meaning: One line for the reader.
        axis: Axis of a jagged column.
        is_prompt: Whether it is stored once per prompt, in the prompt table that samples point to.
    """

    kind: Literal["dense", "jagged", "object"]
    dtype: Literal["int64", "int32", "uint8", "float32", "bool", "json"]
    meaning: str
    axis: Axis | None = None
    is_prompt: bool = False

    @property
    def item_bytes(self) -> int:
        """Bytes of one value; for objects an assumed size."""
        return {"int64": 8, "int32": 4, "uint8": 1, "float32": 4, "bool": 1, "json": 512}[self.dtype]


PLAY_COLUMNS = (
    "prompt_tokens",
    "episode_ids",
    "joint_ids",
    "actor",
    "turns",
    "turn_rewards",
    "environment_rewards",
    "environment_failed",
)
"""Further columns that rollouts write in an environment."""
SEEN_COLUMNS = ("frames", "states")
"""Columns of a body's observations before each decision, and at the end of its episode."""
BODY_COLUMNS = (
    "prompt_tokens",
    *SEEN_COLUMNS,
    "choices",
    "turns",
    "env_steps",
    "turn_rewards",
    "env_rewards",
    "environment_rewards",
    "environment_failed",
    "success",
)
"""Further columns that rollouts of a body write."""
TAKEN_COLUMNS = ("taken", "step_rewards", "num_steps", "intervened")
"""Columns of each decision's actions and results, for workflows that keep transitions."""
IS_GREEDY = "is_greedy"
"""Column that says which samples are baselines, decoded greedily."""
EPISODE_IDS = "episode_ids"
"""Column of samples that share an episode with others; `Batch.episode_ids` gives the default without it."""
COLUMNS: dict[str, Column] = {
    "prompt_tokens": Column("jagged", "int64", "token ids of the prompt", "prompt_tokens", is_prompt=True),
    "images": Column(
        "jagged", "uint8", "files of the prompt's images, with their places", "image_bytes", is_prompt=True
    ),
    "later_images": Column(
        "jagged",
        "uint8",
        "files of the images after the prompt, with their places from the beginning of the prompt on",
        "later_image_bytes",
    ),
    "rows": Column("object", "json", "the row of the dataset, all of its columns", is_prompt=True),
    "tokens": Column("jagged", "int64", "token ids of everything after the prompt", "tokens"),
    "first_tokens": Column("jagged", "int64", "token ids of the chosen, or of the only, response", "first_tokens"),
    "second_tokens": Column(
        "jagged", "int64", "token ids of the rejected response, or of one to another prompt", "second_tokens"
    ),
    "desirable": Column("dense", "bool", "whether the only response is desirable; true for pairs"),
    "margins": Column("dense", "float32", "by how much the chosen response is better, or 0"),
    "reference_scores": Column("dense", "float32", "log-probabilities of both responses under the reference"),
    "response_mask": Column("jagged", "bool", "which of `tokens` the policy sampled", "tokens"),
    "response_lengths": Column("dense", "int64", "number of sampled tokens"),
    "episode_ids": Column("dense", "int64", "the episode of the sample; without it, each sample is one"),
    "joint_ids": Column("dense", "int64", "the play of an environment that the sample is from; its agents share it"),
    "actor": Column("dense", "int64", "which of the environment's agents has sampled this one"),
    "turns": Column("jagged", "int32", "number of the turn in the play, of all agents together", "response_tokens"),
    "turn_rewards": Column(
        "jagged", "float32", "the environment's reward of a turn at its last token, else 0", "response_tokens"
    ),
    "env_rewards": Column("jagged", "float32", "the environment's reward of each step of a body's episode", "steps"),
    "frames": Column("jagged", "uint8", "pixels of all cameras before each decision, and at the end", "observations"),
    "states": Column("jagged", "float32", "state of a body before each decision, and at the end", "observations"),
    "choices": Column("jagged", "float32", "what a policy chose in each decision, as it scores it again", "decisions"),
    "taken": Column(
        "jagged", "float32", "actions that were executed in each decision, a person's where one acted", "decisions"
    ),
    "step_rewards": Column("jagged", "float32", "rewards of the steps of each decision", "decisions"),
    "num_steps": Column("jagged", "int64", "steps of each decision that were executed", "decisions"),
    "intervened": Column("jagged", "bool", "in which steps of a decision a person acted", "decisions"),
    "env_steps": Column("jagged", "int32", "step of the environment that a chosen number is for", "response_tokens"),
    "success": Column("dense", "bool", "the environment says that a body has done its task"),
    "final_values": Column("dense", "float32", "the critic's value of what a body saw at the end of its episode"),
    "embeddings": Column("dense", "float32", "what a body's episode looked like, as a vector"),
    "environment_rewards": Column("dense", "float32", "all rewards of the environment for the agent in the play"),
    "environment_failed": Column("object", "json", "why the episode has failed, or null"),
    "truncated": Column("dense", "bool", "the response was cut at its longest allowed length"),
    "is_greedy": Column("dense", "bool", "the response was decoded greedily, as a baseline"),
    "agent": Column("dense", "int64", "which of the roles that sample responses has sampled this one"),
    "policy_versions": Column(
        "jagged", "int32", "optimizer updates made before each token was sampled", "response_tokens"
    ),
    "temperatures": Column(
        "jagged", "float32", "temperature at which each token is scored: the one it was sampled at", "response_tokens"
    ),
    "rollout_log_probs": Column(
        "jagged", "float32", "log-probability of each sampled token under the engine", "response_tokens"
    ),
    "old_log_probs": Column(
        "jagged", "float32", "the trainer's log-probabilities before this step's updates", "response_tokens"
    ),
    "ref_log_probs": Column("jagged", "float32", "log-probabilities under the reference", "response_tokens"),
    "experts": Column(
        "jagged", "uint8", "experts of each token of the sample but the last: k for each layer with experts", "experts"
    ),
    "support": Column(
        "jagged", "int32", "words that each sampled token could be drawn as, where others were left out", "support"
    ),
    "support_sizes": Column(
        "jagged", "int32", "number of these words for each sampled token; 0 where it could be any", "response_tokens"
    ),
    "teacher_tokens": Column(
        "jagged", "int32", "likeliest words of a teacher at each sampled token, and the token itself", "teacher"
    ),
    "teacher_log_probs": Column("jagged", "float32", "the teacher's log-probabilities of these words", "teacher"),
    "teacher_sizes": Column(
        "jagged", "int32", "number of these words for each sampled token; 0 where no teacher judges", "response_tokens"
    ),
    "rewards": Column("dense", "float32", "weighted sum of the rewards that apply"),
    "reward_valid": Column("dense", "bool", "whether all rewards of the sample could be computed"),
    "reward_details": Column("object", "json", "each reward by name, and why it failed if it did"),
    "values": Column("jagged", "float32", "the critic's value before each sampled token", "response_tokens"),
    "advantages": Column("jagged", "float32", "advantage of each sampled token", "response_tokens"),
    "returns": Column("jagged", "float32", "the critic's target at each sampled token", "response_tokens"),
}

CUSTOM_COLUMN = Column("dense", "int64", "column of a custom stage")
"""Estimated form of a column of a custom stage."""
DATA_COLUMNS = ("prompt_tokens", "rows")
"""Columns that the dataloader provides for every prompt."""
IMAGES = "images"
"""Column that it also provides if `data` names a column of images; who reads `prompt_tokens` reads it, too."""
LATER_IMAGES = "later_images"
"""Column of the images that environments show later; who reads `prompt_tokens` reads it, too."""
IMAGE_BYTES_PER_TOKEN = 256
"""Estimate for a prompt with images: a photograph file takes a quarter of a byte per pixel, and a token stands for 32 x
32 pixels."""
EXPERTS = "experts"
"""Column that rollouts write where experts are replayed."""
EXPERTS_PER_TOKEN = 384
"""Estimate of its size: 8 experts in each of 48 layers."""
SUPPORT, SUPPORT_SIZES = SUPPORT_COLUMNS = ("support", "support_sizes")
"""Columns that rollouts write where tokens are left out."""
TEACHER_TOKENS, TEACHER_LOG_PROBS, TEACHER_SIZES = TEACHER_COLUMNS = (
    "teacher_tokens",
    "teacher_log_probs",
    "teacher_sizes",
)
"""Columns by which a teacher on other ranks, or behind an address, says what it finds likely."""
TEACHER_WORDS_PER_TOKEN = 64
"""Estimate of the length of the first two, where a plan does not know it."""
SUPPORT_PER_TOKEN = 64
"""Estimate of the size of the former."""
DATA_RESPONSE_COLUMNS = ("tokens", "response_mask")
"""Columns that it also provides if `data.train.response` names a column to imitate."""
DATA_PREFERENCE_COLUMNS = ("first_tokens", "second_tokens", "desirable", "margins", "reference_scores")
"""Columns that it provides in their place if the data have preferences."""


def column_of(name: str) -> Column:
    """The column of a name, for estimates: log-probabilities of all roles are alike."""
    return COLUMNS["old_log_probs"] if name.endswith("_log_probs") else COLUMNS.get(name, CUSTOM_COLUMN)
