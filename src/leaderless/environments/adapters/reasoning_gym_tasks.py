"""Tasks of reasoning-gym: as rows with a reward, and as an environment of one turn. Imports no torch.

A row holds the question and answer, for people and other rewards, and what makes the task again: the name of its
dataset, seed, number and settings. So a task is graded by the package itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from random import Random
from typing import Protocol

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.adapters import needed
from leaderless.environments.protocol import Environment, EpisodeFailed, Task, Turn
from leaderless.rewards.protocol import RewardInput, RewardResult

package = needed("reasoning_gym", "reasoning-gym")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_RIGHT = 1.0
_ENDLESS = 1 << 30
"""Size of datasets, whose tasks are made one by one when they are asked for."""


class _Dataset(Protocol):
    def __getitem__(self, index: int) -> dict[str, Json]: ...

    def score_answer(self, answer: str | None, entry: Mapping[str, Json]) -> float: ...


def make_rows(name: str, count: int, *, seed: int = 0, first: int = 0, **settings: Json) -> Iterator[dict[str, Json]]:
    """Tasks as rows of a dataset.

    Args:
        name: Name of the dataset, such as `chain_sum`.
        count: Number of tasks.
        seed: Seed of the dataset.
        first: Number of the first task; rows for evaluation begin where those for training end.
        settings: Settings of the dataset, such as `min_terms`.

    Raises:
        RecipeError: There is no such dataset, or it has no such settings.
    """
    written = json.dumps(settings, sort_keys=True)
    dataset = _open(name, seed, written)
    for index in range(first, first + count):
        entry = dataset[index]
        made: dict[str, Json] = {"dataset": name, "seed": seed, "index": index, "settings": written}
        yield {"question": entry["question"], "answer": entry["answer"], **made}


def score(sample: RewardInput, /) -> RewardResult:
    """The package's own score of a response, from 0 to 1: a reward for rows of `make_rows`.

    The answer is what is between the last `<answer>` and `</answer>`, or else the whole response. Many datasets give
    partial credit: to a wrong answer in the right form, or if the right one is somewhere in it. `solved` gives none.
    """
    return RewardResult(*_graded(sample.row, sample.response))


def solved(sample: RewardInput, /) -> RewardResult:
    """1 where `score` is 1, else 0."""
    value, answer = _graded(sample.row, sample.response)
    return RewardResult(float(value >= _RIGHT), answer)


class ReasoningGym(Environment):
    """A task of reasoning-gym, answered in one turn and rewarded by the package's own score.

    The rows of the recipe's data come from `make_rows`; or, with `dataset`, any rows: each episode's task is then
    made of its random numbers, so all episodes of a prompt get the same one.
    """

    def __init__(
        self, dataset: str | None = None, *, settings: Mapping[str, Json] | None = None, partial_credit: bool = True
    ) -> None:
        """Choose tasks.

        Args:
            dataset: Name of a dataset to make tasks of; by default the row is the task.
            settings: Settings of that dataset.
            partial_credit: Whether scores below 1 count; if not, they are 0.

        Raises:
            RecipeError: There is no such dataset, or it has no such settings.
        """
        self._dataset, self._settings = dataset, json.dumps(dict(settings or {}), sort_keys=True)
        self._has_partial_credit, self._row = partial_credit, dict[str, Json]()
        if dataset is not None:
            _open(dataset, 0, self._settings)

    @override
    def reset(self, task: Task, rng: Random) -> str:
        """Ask the question."""
        self._row = dict(task)
        if self._dataset is not None:
            made: Task = {"dataset": self._dataset, "settings": self._settings}
            self._row = {"seed": 0, "index": rng.randrange(_ENDLESS), **made}
        question = _entry(self._row)[1]["question"]
        assert isinstance(question, str)
        return question

    @override
    def act(self, text: str) -> Turn:
        """Grade the answer."""
        value, answer = _graded(self._row, text)
        return Turn(
            reward=value if self._has_partial_credit or value >= _RIGHT else 0.0, done=True, info={"answer": answer}
        )


def _graded(row: Mapping[str, Json], text: str) -> tuple[float, str]:
    """The score of a response, and the answer in it."""
    dataset, entry = _entry(row)
    found = _ANSWER.findall(text)
    answer = (found[-1] if found else text).strip()
    return float(dataset.score_answer(answer, entry)), answer


def _entry(row: Mapping[str, Json]) -> tuple[_Dataset, dict[str, Json]]:
    """The task of a row, with its dataset."""
    name, seed, index, settings = (row.get(key) for key in ("dataset", "seed", "index", "settings"))
    if not isinstance(name, str) or not isinstance(seed, int) or not isinstance(index, int):
        raise EpisodeFailed("the row is no task of reasoning-gym: make rows with make_rows, or name a dataset")
    dataset = _open(name, seed, settings if isinstance(settings, str) else "{}")
    return dataset, dataset[index]


@lru_cache(maxsize=64)
def _open(name: str, seed: int, settings: str) -> _Dataset:
    try:
        dataset: _Dataset = package.create_dataset(name, seed=seed, size=_ENDLESS, **json.loads(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError.at("environment.options", f"reasoning-gym does not make '{name}': {error}") from error
    return dataset
