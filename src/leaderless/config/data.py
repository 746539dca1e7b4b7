"""What is trained on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from typing_extensions import override

from leaderless.config.base import Section, ShorthandSection
from leaderless.config.json import Json

DATASET_COLUMN = "_dataset"
"""Column that rows of a mixture have besides their own: the name of their dataset."""
COMPRESSED = ".jsonl.gz"
"""What can be read from its beginning only."""


class DatasetConfig(Section):
    """A table of rows, and which of its columns mean what."""

    path: str = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, a folder of them, a pattern such as `rows/part-*.jsonl`, or the name of a dataset
    on the hub."""
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
    columns: tuple[str, ...] | None = None
    """Columns that are kept besides those named here; all when not given. Of Parquet no others are read."""

    @field_validator("template")
    @classmethod
    def _template_is_known(cls, value: str) -> str:
        if value not in {"auto", "chat", "plain"} and "{" not in value:
            raise ValueError("must be 'auto', 'chat', 'plain' or a text with {column} placeholders")
        return value

    def wanted_columns(self) -> frozenset[str] | None:
        """Columns that rows keep; None for all."""
        if self.columns is None:
            return None
        named = {self.prompt, self.answer, self.response, self.source} - {None}
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self.template) if field]
        except ValueError:
            fields = []  # what is wrong with the template is said of the first row that is filled in
        return frozenset({*self.columns, *filter(None, named), *(re.split(r"[.\[]", field)[0] for field in fields)})


class CurriculumConfig(ShorthandSection):
    """The order of rows by a column, anew in every epoch.

    Equal rows are in the order of the file, or in a random one if `data.shuffle` is set.
    """

    shorthand: ClassVar[str] = "column"
    shorthand_types: ClassVar[tuple[type, ...]] = (str,)

    column: str = Field(min_length=1)
    """Column that holds a number, such as a level of difficulty."""
    order: Literal["ascending", "descending"] = "ascending"
    """Which rows come first: those with small or those with large numbers."""


class TrainingSetConfig(DatasetConfig):
    """A dataset to train on."""

    curriculum: CurriculumConfig | None = None
    """Take rows in the order of a column."""
    streaming: bool = False
    """Read rows one behind the other, without looking at all of them first; `.jsonl.gz` files and datasets that are too
    large to download are read in this way."""
    shuffle_buffer: int = Field(default=1024, ge=2)
    """Rows of a stream that are held in memory and shuffled together, if `data.shuffle` is set."""

    @override
    def wanted_columns(self) -> frozenset[str] | None:
        wanted = super().wanted_columns()
        return wanted if wanted is None or self.curriculum is None else wanted | {self.curriculum.column}

    @model_validator(mode="after")
    def _is_possible(self) -> TrainingSetConfig:
        if self.streaming and self.curriculum is not None:
            raise ValueError("a stream cannot be sorted: leave out `curriculum`, or `streaming`")
        return self


class MixedSetConfig(TrainingSetConfig):
    """A dataset that is part of a mixture."""

    weight: float = 1.0
    """Its share of the prompts, relative to the weights of the others."""

    @field_validator("weight")
    @classmethod
    def _weight_counts(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("must be above 0; leave a dataset out that shall not be used")
        return value


def _form_of(value: object) -> str:
    """Whether training data are one dataset, or several by name."""
    if not isinstance(value, Mapping) or not value or TrainingSetConfig.model_fields.keys() & value:
        return "dataset"
    return "mixture" if all(isinstance(inner, Mapping | Section) for inner in value.values()) else "dataset"


class DataConfig(Section):
    """Training and held-out data."""

    train: Annotated[
        Annotated[TrainingSetConfig, Tag("dataset")] | Annotated[Mapping[str, MixedSetConfig], Tag("mixture")],
        Discriminator(_form_of),
    ]
    """What is trained on: a dataset, or several by name that are mixed by weight."""
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
    prefetch_steps: int = Field(default=1, ge=0)
    """Steps whose prompts are read and tokenised ahead, beside the step that is done; 0 reads when a step begins."""

    @model_validator(mode="after")
    def _datasets_agree(self) -> DataConfig:
        sets = self.train_sets()
        for key in sets:
            if not re.fullmatch(r"data\.train(\.[A-Za-z0-9_-]+)?", key):
                raise ValueError(f"{key} must have letters, digits, '_' and '-' only in its name")
        without = [key for key, config in sets.items() if config.response is None]
        if without and len(without) < len(sets):
            raise ValueError(f"{without[0]}.response must be given, as it is for another dataset of the mixture")
        return self

    def train_sets(self) -> Mapping[str, TrainingSetConfig]:
        """The training data by key in the recipe: `data.train`, or `data.train.<name>` of each dataset, by name."""
        if isinstance(self.train, TrainingSetConfig):
            return {"data.train": self.train}
        return {f"data.train.{name}": self.train[name] for name in sorted(self.train)}

    @property
    def has_responses(self) -> bool:
        """Whether the training data hold responses to imitate."""
        return all(config.response is not None for config in self.train_sets().values())

    def train_set_of(self, row: Mapping[str, Json]) -> TrainingSetConfig:
        """The dataset that a row was read from.

        Args:
            row: Of the training data.
        """
        return self.train if isinstance(self.train, TrainingSetConfig) else self.train[str(row[DATASET_COLUMN])]

    def source_of(self, row: Mapping[str, Json]) -> str | None:
        """Where a row comes from: what its column `source` says, else in a mixture the name of its dataset.

        Args:
            row: Of the training data.
        """
        column = self.train_set_of(row).source
        name = row.get(DATASET_COLUMN) if isinstance(self.train, Mapping) else None
        return str(row[column]) if column else (None if name is None else str(name))
