"""What is trained on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from leaderless.config.base import Section


class DatasetConfig(Section):
    """A table of rows, and which of its columns mean what."""

    path: str = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, a folder of them, or the name of a dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset, as `main` of `openai/gsm8k`."""
    split: str = "train"
    """Split of a hub dataset."""
    prompt: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    answer: str | None = None
    """Column that holds the expected answer, for rewards that compare."""
    response: str | None = None
    """Column that holds the response to imitate, for supervised fine-tuning."""
    source: str | None = None
    """Column that names where a row comes from; rewards may apply to some sources only."""
    template: str = "auto"
    """How a prompt becomes tokens: `chat` (the tokenizer's chat template), `plain` (as it is), `auto` (`chat` where
    the tokenizer has a template), or a text with `{column}` placeholders."""
    system: str | None = None
    """System message put before the prompt; needs a chat template."""
    limit: int | None = Field(default=None, ge=1)
    """Use only this many rows, from the first."""

    @field_validator("template")
    @classmethod
    def _template_is_known(cls, value: str) -> str:
        if value not in {"auto", "chat", "plain"} and "{" not in value:
            raise ValueError("must be 'auto', 'chat', 'plain' or a text with {column} placeholders")
        return value


class DataConfig(Section):
    """Training and held-out data."""

    train: DatasetConfig
    """What is trained on."""
    evaluation: DatasetConfig | None = None
    """Held-out prompts, for `evaluation`."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Rows with a longer prompt are overlong."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Rows with a longer response to imitate are overlong; generated responses have `rollout.max_response_tokens`."""
    overlong: Literal["drop", "error"] = "drop"
    """What happens to overlong rows; they are dropped before rows are divided among ranks."""
    shuffle: bool = True
    """Take rows in a new seeded random order every epoch, instead of file order."""
