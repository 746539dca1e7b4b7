"""The lengths of rows, and the bytes they take."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from benchmarks.simulated.controllers import separate_bytes
from tests.unit.planner.simulate.clusters import cluster, equal_rows
from tests.unit.recipes import make_recipe

from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer.wire import HeldRows, ragged_keys, schema_of
from leaderless.planner.simulate.rows import SimulatedRows, sample_workload


def workload(recipe_changes=None, **changes):
    batch = {"prompts_per_step": 4000, "responses_per_prompt": 2}
    sections = {"batch": batch, "rollout": {"max_response_tokens": 400}, **(recipe_changes or {})}
    return sample_workload(make_recipe(**sections), cluster(**changes).workload)


def test_lengths_have_the_median_and_the_tail_that_is_asked_for():
    lengths = workload(workload__response_sigma=0.8).samples.response_tokens
    assert np.median(lengths) == pytest.approx(100, rel=0.05)
    # A standard normal is above ln(4) / 0.8 = 1.733 with a probability of 4.16 %, and is then cut at the limit.
    assert (lengths == 400).mean() == pytest.approx(0.0416, abs=0.006)
    assert lengths.max() == 400
    assert (workload(workload__response_sigma=0).samples.response_tokens == 100).all()


def test_lengths_follow_from_the_seed_alone():
    one, again, other = workload(), workload(), workload({"seed": 1})
    assert np.array_equal(one.samples.response_tokens, again.samples.response_tokens)
    assert not np.array_equal(one.samples.response_tokens, other.samples.response_tokens)


def test_samples_have_their_prompts_lengths():
    drawn = workload()
    assert np.array_equal(drawn.samples.prompt_tokens, np.repeat(drawn.prompts.prompt_tokens, 2))
    assert drawn.samples.groups.tolist()[:5] == [0, 0, 1, 1, 2]
    assert not drawn.prompts.response_tokens.any()


def test_responses_of_the_data_are_there_from_the_start():
    data = {"train": {"path": "rows.jsonl", "response": "text"}, "max_response_tokens": 50}
    drawn = workload({"data": data, "workflow": "sft"})
    assert 1 <= drawn.prompts.response_tokens.min() < drawn.prompts.response_tokens.max() == 50


def value_bytes(batch: Batch) -> int:
    held = HeldRows(batch)
    for key in ragged_keys(schema_of(batch)):
        held.lengths(key, np.arange(len(batch)))  # so that texts are created
    return sum(int(held.column(name).sizes.sum()) for name in batch.columns)


def test_bytes_and_lengths_are_those_of_rows_that_travel():
    lengths = torch.tensor([3, 5])
    total = int(lengths.sum())
    text = "x" * 510  # and its quotes: an object is assumed to take 512 bytes
    samples = Batch(
        torch.tensor([0, 1]),
        {
            "tokens": Jagged(torch.zeros(total, dtype=torch.int64), lengths, "tokens"),
            "response_mask": Jagged(torch.ones(total, dtype=torch.bool), lengths, "tokens"),
            "old_log_probs": Jagged(torch.zeros(total), lengths, "response_tokens"),
            "ref_log_probs": Jagged(torch.zeros(total), lengths, "response_tokens"),
            "reward_details": (text, text),
            "rewards": torch.zeros(2),
        },
    )
    tokens = Jagged(torch.zeros(7, dtype=torch.int64), torch.tensor([7]), "prompt_tokens")
    prompts = Batch(torch.tensor([0]), {"prompt_tokens": tokens, "rows": (text,)})
    rows = SimulatedRows(np.array([0, 0]), np.array([7, 7]), np.array([3, 5]), are_samples=True)
    names = [*samples.columns, *prompts.columns]
    assert rows.row_bytes(names).sum() == value_bytes(samples)
    assert rows.prompt_bytes(names).tolist() == [value_bytes(prompts)] * 2
    assert rows.num_lengths(names) == tuple(len(ragged_keys(schema_of(table))) for table in (samples, prompts))
    assert rows.num_lengths(names) == (3, 2), "two axes and an object; one of each"


def test_rows_in_memory_have_ids_and_lengths_besides():
    rows = SimulatedRows(np.array([0, 1]), np.array([7, 4]), np.array([3, 50]), are_samples=True)
    assert rows.held_bytes(["tokens", "response_mask", "prompt_tokens"]).tolist() == [16 + 8 + 27, 16 + 8 + 450]


def test_padded_rows_are_as_long_as_the_longest_and_have_their_own_prompt():
    rows = SimulatedRows(np.array([0, 1]), np.array([7, 4]), np.array([3, 50]), are_samples=True)
    assert separate_bytes(rows, ["tokens"], is_padded=True).tolist() == [50 * 8] * 2
    columns = ["tokens", "prompt_tokens", "rewards"]
    assert separate_bytes(rows, columns, is_padded=True).tolist() == [50 * 8 + 7 * 8 + 4] * 2
    assert separate_bytes(rows, columns, is_padded=False).tolist() == [3 * 8 + 7 * 8 + 4, 50 * 8 + 4 * 8 + 4]


def test_a_prompt_is_a_row_before_there_are_samples():
    rows = SimulatedRows(np.arange(2), np.array([7, 4]), np.zeros(2, dtype=np.int64), are_samples=False)
    assert rows.row_bytes(["prompt_tokens"]).tolist() == [56, 32]
    assert rows.num_lengths(["prompt_tokens"]) == (1, 0)
    assert not rows.prompt_bytes(["prompt_tokens"]).any()


def test_only_lengths_that_travel_cost():
    rows, shards = equal_rows(2, prompt=10, response=20), np.zeros(2, dtype=np.int64)
    assert rows.costs(["tokens", "prompt_tokens"], shards, 1000).tolist() == [30, 30]
    assert rows.costs(["tokens"], shards, 1000).tolist() == [20, 20]
    assert rows.costs(["rewards"], shards, 1000).tolist() == [1, 1]


def test_a_prompt_costs_once_where_siblings_are_held():
    rows = equal_rows(2, siblings=3, prompt=10, response=20)
    shards, columns = np.array([0, 0, 0, 1, 2, 1]), ["tokens", "prompt_tokens"]
    assert rows.costs(columns, shards, 1000).tolist() == [30, 20, 20, 30, 30, 20]
    prompts = SimulatedRows(np.arange(2), np.array([7, 4]), np.zeros(2, dtype=np.int64), are_samples=False)
    assert prompts.costs(["prompt_tokens"], np.zeros(2, dtype=np.int64), 1000).tolist() == [7, 4]
