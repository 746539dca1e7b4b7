"""A table keeps its columns by writer, including those of prompts, and frees each of them separately."""

from __future__ import annotations

import gc
import weakref

import torch

from leaderless.data.batch import Batch
from leaderless.data.buffer.databuffer import RowTable

WRITER = "rollout"


def samples() -> Batch:
    """Four samples of two prompts, out of order."""
    prompts = Batch(torch.tensor([7, 3]), {"image": torch.tensor([70.0, 30.0]), "answer": ("seven", "three")})
    return Batch(torch.tensor([31, 70, 30, 71]), {"score": torch.arange(4.0)}, prompts, torch.tensor([1, 0, 1, 0]))


def test_tables_that_share_prompts_let_go_of_their_columns_one_by_one() -> None:
    batch = samples()
    first, second = RowTable.of(batch, WRITER), RowTable.of(batch, "filter")
    first.drop([(WRITER, "image")])
    assert first.batch({"answer": WRITER}).names() == ["answer"]
    assert second.batch({"image": "filter"}).dense("image").tolist() == [30, 30, 70, 70]
    assert [*first.prompt_columns, *second.prompt_columns] == [
        (WRITER, "answer"),
        ("filter", "image"),
        ("filter", "answer"),
    ]


def test_a_column_is_freed_of_its_writer_alone() -> None:
    table = RowTable.of(samples(), WRITER)
    # Another node writes about every sample what the first wrote about every prompt.
    table.add(Batch(table.ids, {"image": torch.tensor([1.0, 2, 3, 4])}), "resize")
    assert table.batch({"image": WRITER}).dense("image").tolist() == [30, 30, 70, 70]
    assert table.batch({"image": "resize"}).dense("image").tolist() == [1, 2, 3, 4]
    table.drop([("resize", "image")])
    assert table.batch({"image": WRITER}).dense("image").tolist() == [30, 30, 70, 70]
    table.add(Batch(table.ids, {"image": torch.tensor([1.0, 2, 3, 4])}), "resize")
    table.drop([(WRITER, "image")])
    assert table.batch({"image": "resize", "answer": WRITER}).dense("image").tolist() == [1, 2, 3, 4]


def test_a_prompts_column_that_is_dropped_is_freed() -> None:
    image = torch.ones(2, 1000)
    prompts = Batch(torch.tensor([3, 7]), {"image": image})
    table = RowTable.of(Batch(torch.tensor([30, 70]), {}, prompts, torch.tensor([0, 1])), WRITER)
    seen = weakref.ref(image)
    del image, prompts
    assert seen() is not None
    table.drop([(WRITER, "image")])
    gc.collect()
    assert seen() is None
