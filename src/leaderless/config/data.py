"""Training and held-out data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from string import Formatter
from typing import Annotated, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, field_validator, model_validator
from typing_extensions import override

from leaderless.algorithms.preference_loss import Preferences
from leaderless.base.section import Section, ShorthandSection
from leaderless.base.values import Json

DATASET_COLUMN = "_dataset"
"""Column added to the rows of a mixture: the name of their dataset."""
COMPRESSED = ".jsonl.gz"
"""Suffix of files that can only be read from the beginning."""


class DatasetConfig(Section):
    """A table of rows, and the meaning of its columns."""

    path: str = Field(min_length=1)
    """A `.jsonl` or `.parquet` file, a folder of such files, a pattern such as `rows/part-*.jsonl`, or the name of a
    dataset on the hub."""
    subset: str | None = None
    """Configuration of a hub dataset, such as `main` of `openai/gsm8k`."""
    split: str = "train"
    """Split of a hub dataset."""
    prompt: str = "prompt"
    """Column that holds the prompt: text, or a list of chat messages."""
    answer: str | None = None
    """Column that holds the expected answer, for rewards that compare."""
    response: str | None = None
    """Column that holds the response to imitate, for supervised fine-tuning."""
    chosen: str | None = None
    """Column that holds the preferred one of two responses, to learn from preferences: text, or a list of messages.
    Without a column `prompt`, both responses contain the prompt, and it is what they share at their beginning."""
    rejected: str | None = None
    """Column that holds the other response."""
    desirable: str | None = None
    """Column that says whether `response` is desirable, as true or false, to learn from single responses."""
    margin: str | None = None
    """Column that holds by how much the chosen response is better, as a number, for a reward model."""
    images: str | None = None
    """Column that holds the images of a prompt, for a model that sees them: a path or a data URL, or a list of these;
    paths begin at the folder of the file. In the text `<image>` marks their places, or they come before it."""
    source: str | None = None
    """Column that names the source of a row; rewards may apply to some sources only."""
    template: str = "auto"
    """How a prompt becomes tokens: `chat` (the tokenizer's chat template), `plain` (the text as it is), `auto` (`chat`
    if the tokenizer has a template, else `plain`), or a text with `{column}` placeholders."""
    system: str | None = None
    """System message before the prompt; needs a chat template."""
    columns: tuple[str, ...] | None = None
    """Further columns to keep; all by default. Of Parquet files, only these and the columns named above are read."""

    @field_validator("template")
    @classmethod
    def _template_is_known(cls, value: str) -> str:
        if value not in {"auto", "chat", "plain"} and "{" not in value:
            raise ValueError("must be 'auto', 'chat', 'plain' or a text with {column} placeholders")
        return value

    @model_validator(mode="after")
    def _preferences_are_whole(self) -> DatasetConfig:
        if (self.chosen is None) != (self.rejected is None):
            given, missing = ("chosen", "rejected") if self.rejected is None else ("rejected", "chosen")
            raise ValueError(f"{given}={getattr(self, given)} needs `{missing}`, the column of the other response")
        if self.chosen is not None and self.response is not None:
            raise ValueError("has `response` next to `chosen` and `rejected`: pairs and single responses are not mixed")
        if self.desirable is not None and self.response is None:
            raise ValueError(f"desirable={self.desirable} needs `response`, the column that it is about")
        if self.margin is not None and self.chosen is None:
            raise ValueError(f"margin={self.margin} needs `chosen` and `rejected`, the columns that it is about")
        return self

    @property
    def preferences(self) -> Preferences | None:
        """Form of the preferences in rows; None if there are none."""
        if self.chosen is not None:
            return "pairs"
        return "singles" if self.desirable is not None else None

    def wanted_columns(self) -> frozenset[str] | None:
        """Columns that rows keep; None for all."""
        if self.columns is None:
            return None
        named = {self.prompt, self.answer, self.response, self.images, self.source} - {None}
        named |= {self.chosen, self.rejected, self.desirable, self.margin} - {None}
        try:
            fields = [field for _, field, _, _ in Formatter().parse(self.template) if field]
        except ValueError:
            fields = []  # the error is reported for the first row that is filled in
        return frozenset({*self.columns, *filter(None, named), *(re.split(r"[.\[]", field)[0] for field in fields)})


class CurriculumConfig(ShorthandSection):
    """An order of rows by a column, in every epoch.

    Rows with equal values keep the order of the file, or are in random order if `data.shuffle` is set.
    """

    shorthand: ClassVar[str] = "column"

    column: str = Field(min_length=1)
    """Column that holds a number, such as a level of difficulty."""
    order: Literal["ascending", "descending"] = "ascending"
    """Whether rows with small or with large numbers come first."""


class TrainingSetConfig(DatasetConfig):
    """A dataset to train on."""

    limit: int | None = Field(default=None, ge=1)
    """Number of rows to use, from the first; all by default."""
    curriculum: CurriculumConfig | None = None
    """Order of rows by a column."""
    streaming: bool = False
    """Read rows in their order without an index, as for `.jsonl.gz` files and datasets too large to download."""
    shuffle_buffer: int = Field(default=1024, ge=2)
    """Rows of a stream that are held in memory and shuffled together if `data.shuffle` is set."""

    @override
    def wanted_columns(self) -> frozenset[str] | None:
        wanted = super().wanted_columns()
        return wanted if wanted is None or self.curriculum is None else wanted | {self.curriculum.column}

    @model_validator(mode="after")
    def _is_possible(self) -> TrainingSetConfig:
        if self.streaming and self.curriculum is not None:
            raise ValueError("a stream cannot be sorted: leave out `curriculum`, or `streaming`")
        if self.streaming and self.desirable is not None:
            raise ValueError(
                "a stream has no `desirable`: each row is compared with the response of another one, which is read "
                "next to it; leave out `streaming`"
            )
        return self


class MixedSetConfig(TrainingSetConfig):
    """A dataset that is part of a mixture."""

    weight: float = 1.0
    """Share of the prompts, relative to the weights of the other datasets."""

    @field_validator("weight")
    @classmethod
    def _weight_counts(cls, value: float) -> float:
        if value <= 0:
            raise ValueError("must be above 0; to use no row of a dataset, leave it out")
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
    """Training data: one dataset, or several by name that are mixed by weight."""
    evaluation: DatasetConfig | None = None
    """Held-out prompts, for `evaluation`."""
    max_prompt_tokens: int = Field(default=512, ge=1)
    """Rows with a longer prompt are overlong."""
    max_response_tokens: int = Field(default=2048, ge=1)
    """Rows with a longer response to imitate are overlong; `rollout.max_response_tokens` limits generated responses."""
    overlong: Literal["drop", "error"] = "drop"
    """Drop overlong rows, before rows are divided among ranks, or stop with an error."""
    shuffle: bool = True
    """Take rows in a new seeded random order every epoch, instead of file order."""
    prefetch_steps: int = Field(default=1, ge=0)
    """Number of later steps whose prompts are read and tokenized in advance; 0 reads them when a step begins."""

    @model_validator(mode="after")
    def _datasets_agree(self) -> DataConfig:
        sets = self.train_sets()
        for key in sets:
            if not re.fullmatch(r"data\.train(\.[A-Za-z0-9_-]+)?", key):
                raise ValueError(f"{key} must have letters, digits, '_' and '-' only in its name")
        if len({config.preferences for config in sets.values()}) > 1:
            raise ValueError("data.train: all datasets of a mixture must have pairs, all `desirable`, or none of both")
        without = [key for key, config in sets.items() if config.response is None]
        if without and len(without) < len(sets):
            raise ValueError(f"{without[0]}.response must be given, as it is for another dataset of the mixture")
        return self

    def train_sets(self) -> Mapping[str, TrainingSetConfig]:
        """The training datasets by their keys: `data.train`, or `data.train.<name>` in the order of names."""
        if isinstance(self.train, TrainingSetConfig):
            return {"data.train": self.train}
        return {f"data.train.{name}": self.train[name] for name in sorted(self.train)}

    @property
    def has_responses(self) -> bool:
        """Whether the training data have responses to imitate."""
        return self.preferences is None and all(config.response is not None for config in self.train_sets().values())

    @property
    def preferences(self) -> Preferences | None:
        """Form of the preferences in the training data; None if there are none."""
        return next(iter(self.train_sets().values())).preferences

    @property
    def has_images(self) -> bool:
        """Whether some prompts have images."""
        held_out = [] if self.evaluation is None else [self.evaluation]
        return any(config.images is not None for config in (*self.train_sets().values(), *held_out))

    def train_set_of(self, row: Mapping[str, Json]) -> TrainingSetConfig:
        """The dataset that a row of the training data was read from."""
        return self.train if isinstance(self.train, TrainingSetConfig) else self.train[str(row[DATASET_COLUMN])]

    def named(self, key: str, row: Mapping[str, Json]) -> dict[str, Json]:
        """A row of the training dataset with a key; in a mixture it has the name of the dataset."""
        return {**row} if isinstance(self.train, TrainingSetConfig) else {**row, DATASET_COLUMN: key.rpartition(".")[2]}

    def source_of(self, row: Mapping[str, Json]) -> str | None:
        """The source of a row of the training data: its column `source`, else in a mixture the name of its dataset."""
        column = self.train_set_of(row).source
        name = row.get(DATASET_COLUMN) if isinstance(self.train, Mapping) else None
        return str(row[column]) if column else (None if name is None else str(name))
