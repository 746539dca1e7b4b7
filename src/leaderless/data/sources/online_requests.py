"""The training data of an online run: tasks without content, as many as are wanted; clients bring what is asked."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from leaderless.data.dataset import Feed, Prompt, TrainingSet
from leaderless.data.prompts.encode import RowEncoder


class RequestSet(TrainingSet, Feed):
    """Tasks that stand for groups of requests."""

    def __init__(self, encoder: RowEncoder) -> None:
        self.encoder = encoder

    @override
    def feed(self, seed: int, number: int, *, shuffle: bool) -> Feed:
        return self

    @override
    def take(self, places: Sequence[int]) -> list[Prompt]:
        return [Prompt({}, self.encoder.encode({}, f"request group {place}")) for place in places]

    @override
    def epoch(self, num_rows: int) -> float:
        return 0.0  # there is no end of them

    @override
    def summary(self, path: str) -> str:
        return "requests of clients"
