"""Files of rows, a tokenizer that needs no model, and recipes that train on them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.config.data import DatasetConfig, TrainingSetConfig
from leaderless.data.batch import Batch
from leaderless.data.dataloader import Dataloader, open_training_set
from leaderless.data.dataset import Dataset, TrainingSet, open_dataset
from leaderless.data.prompts.encode import RowEncoder
from leaderless.data.sources.disk_cache import DataCache
from leaderless.data.sources.open_source import open_source
from leaderless.data.sources.row_sources import Row, RowSource

BOS, EOS = 1, 2


class Characters:
    """A tokenizer whose tokens are characters."""

    def __init__(self, chat_template: str | None = None, eos_token_id: int | None = EOS) -> None:
        self.chat_template, self.eos_token_id = chat_template, eos_token_id

    def __len__(self) -> int:
        return sys.maxunicode + 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + [ord(character) for character in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:  # noqa: ARG002
        return "".join(map(chr, token_ids))

    def apply_chat_template(self, conversation: Sequence[Json], *, add_generation_prompt: bool, tokenize: bool) -> str:
        assert not tokenize
        turns = [f"{turn['role']}:{turn['content']};" for turn in conversation if isinstance(turn, dict)]
        return "".join(turns) + "assistant:" * add_generation_prompt

    def save_pretrained(self, save_directory: str) -> object:
        return Path(save_directory, "tokenizer.json").write_text(json.dumps([self.chat_template, self.eos_token_id]))


def text_of(tokens: Sequence[int]) -> str:
    return "".join({BOS: "<", EOS: ">"}.get(token) or chr(token) for token in tokens)


def write_jsonl(path: Path, rows: Sequence[Json]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def open_path(path: Path) -> RowSource:
    return open_source(DatasetConfig(path=str(path)), "data.train")


def rows_of(source: RowSource) -> list[Row]:
    return [source.row(index) for index in range(len(source))]


def recipe_of(path: Path | str, data: dict[str, object] | None = None, **settings: object) -> Recipe:
    """A recipe that trains on a file; `data` and `settings` as in YAML."""
    data = dict(data or {})
    train = {"path": str(path), **{key: data.pop(key) for key in list(data) if key in TrainingSetConfig.model_fields}}
    return Recipe.model_validate(
        {"name": "test", "workflow": "grpo", "models": {"policy": "x"}, "steps": 1, "data": {"train": train} | data}
        | settings
    )


def open_recipe(recipe: Recipe, tokenizer: Characters | None = None) -> Dataset:
    train = recipe.data.train
    assert isinstance(train, TrainingSetConfig)
    encoder = RowEncoder(tokenizer or Characters(), train, "data.train")
    return open_dataset(open_source(train, "data.train"), encoder, recipe, DataCache())


def mixed_recipe(train: Mapping[str, Json], data: Mapping[str, Json] | None = None, **settings: object) -> Recipe:
    """A recipe with `data.train` as in YAML; `data` and `settings` likewise."""
    base = {"name": "test", "workflow": "grpo", "models": {"policy": "x"}, "steps": 1}
    return Recipe.model_validate(base | {"data": {"train": train, **(data or {})}} | settings)


def open_sets(recipe: Recipe, cache: DataCache | None = None) -> list[TrainingSet]:
    """All datasets of a recipe."""
    return [
        open_training_set(config, key, Characters(), recipe, cache or DataCache())
        for key, config in recipe.data.train_sets().items()
    ]


def prompts_of(batch: Batch) -> list[Json]:
    return [row["prompt"] for row in batch.objects("rows") if isinstance(row, dict)]


def take(loaders: Sequence[Dataloader], num_steps: int) -> list[tuple[int, Json]]:
    """The group ids and prompts that the shards of some steps hold together."""
    taken: list[tuple[int, Json]] = []
    for _ in range(num_steps):
        batch = Batch.concat([loader.next() for loader in loaders])
        taken += zip(batch.ids.tolist(), prompts_of(batch), strict=True)
    return taken


def shards_of(recipe: Recipe, num_shards: int, position: int = 0, cache: DataCache | None = None) -> list[Dataloader]:
    """A dataloader for each shard, as different processes would have them."""
    loaders = [Dataloader(open_sets(recipe, cache), recipe, shard, num_shards) for shard in range(num_shards)]
    for loader in loaders:
        loader.position = position
    return loaders
