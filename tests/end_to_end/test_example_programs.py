"""The example of a program that leads episodes trains, within the worker and as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.test_examples import ROOT, small, train_example

RECIPE = "examples/agent_program/recipe.yaml"


def test_votes_are_samples_of_one_episode_on_any_number_of_ranks(ranks: RankPool, tmp_path: Path) -> None:
    overrides = small(tmp_path, "batch.prompts_per_step=4", "batch.responses_per_prompt=4")
    alone, together = (
        ranks.run(count, train_example, RECIPE, [*overrides, f"name=on-{count}"], 2, init_group=False)[0]
        for count in (1, 2)
    )
    for numbers, same in zip(alone, together, strict=True):
        assert numbers["episode/failed"] == 0
        assert numbers["episode/turns"] == numbers["episode/samples"] == 3
        assert 0 <= numbers["reward/mean"] <= 1
        assert numbers["episode/drift"] == 0, "a model without a chat template writes nothing around messages"
        assert numbers["mismatch/abs_max"] < 1e-4, "what is trained is what was sampled"
        for name in ("reward/mean", "episode/tokens", "rollout/response_tokens"):
            assert same[name] == pytest.approx(numbers[name]), name


def test_a_process_of_its_own_leads_episodes(ranks: RankPool, tmp_path: Path) -> None:
    options = f"{{command: [{sys.executable}, {ROOT / 'examples/agent_program/agent.py'}]}}"
    overrides = small(tmp_path, f"environment={{type: command, options: {options}, max_episode_tokens: 64}}")
    overrides += ["batch.prompts_per_step=2", "batch.responses_per_prompt=2"]
    (steps,) = ranks.run(1, train_example, RECIPE, overrides, 1, init_group=False)
    (numbers,) = steps
    assert numbers["episode/failed"] == 0
    assert (numbers["episode/turns"], numbers["episode/samples"]) == (2, 1)
    assert numbers["rollout/prefix_hits"] > 0.5, "the second question reads only what is new"
    assert numbers["mismatch/abs_max"] < 1e-4, "what is trained is what was sampled"
