"""Samples kept for people to read: columns from other nodes, and single tokens."""

from __future__ import annotations

import pytest
from tests.unit.recipes import plan_of

from leaderless.stages.recorded_samples import TokenRecorder


class Letters:
    """A tokenizer with one token per letter."""

    def decode(self, tokens: list[int], *, skip_special_tokens: bool = False) -> str:
        assert not skip_special_tokens
        return "".join(chr(97 + token) for token in tokens)


def recorder(room: int = 8) -> TokenRecorder:
    return TokenRecorder(Letters(), room)  # type: ignore[arg-type]


def columns_of_samples(workflow: str, **sections: object) -> set[str]:
    plan = plan_of(workflow, **sections)
    return {column for edge in plan.edges if edge.target == "samples" for column in edge.columns}


@pytest.mark.parametrize("workflow", ["grpo", "dapo"])
def test_log_probs_are_recorded_where_others_need_them(workflow: str) -> None:
    columns = columns_of_samples(workflow, batch={"updates_per_step": 2})
    assert {"rollout_log_probs", "old_log_probs"} <= columns


def test_no_node_runs_only_to_be_recorded() -> None:
    settings = {"algorithm": {"policy_loss": {"type": "reinforce"}, "correction": {"type": "none"}}}
    with_samples = plan_of("grpo", **settings)
    without = plan_of("grpo", **settings, run={"recorded_prompts": 0})
    assert with_samples.pruned == ("old", "reference")
    assert {*without.pruned} == {*with_samples.pruned, "samples"}


def test_tokens_come_with_their_texts_and_log_probs() -> None:
    view = recorder().describe([0, 1], {"rollout": [-0.12345, -2.0], "old": [-0.1, -3.0]})
    assert view == {"total": 2, "text": ["a", "b"], "rollout": [-0.123, -2.0], "old": [-0.1, -3.0]}


def test_tokens_that_were_not_sampled_have_no_log_prob() -> None:
    view = recorder().describe([0, 1, 2], {"rollout": [-1.0, -2.0]}, [True, False, True])
    assert view == {"total": 3, "text": ["a", "b", "c"], "rollout": [-1.0, None, -2.0], "mask": [1, 0, 1]}


def test_a_step_has_room_for_a_number_of_tokens() -> None:
    tokens = recorder(room=3)
    first, second, third = (tokens.describe([0, 1], {"rollout": [-1.0, -2.0]}) for _ in range(3))
    assert isinstance(first, dict)
    assert first["text"] == ["a", "b"]
    assert second == {"total": 2, "text": ["a"], "rollout": [-1.0]}
    assert third is None
