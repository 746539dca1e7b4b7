"""Scores of a model from several responses to one prompt."""

from __future__ import annotations

from itertools import combinations

import pytest

from leaderless.algorithms import majority_is_correct, pass_at_k


def test_pass_at_k_is_the_chance_over_all_choices() -> None:
    for num_correct in range(6):
        outcomes = [i < num_correct for i in range(5)]
        for k in range(1, 6):
            chosen = list(combinations(outcomes, k))
            expected = sum(any(choice) for choice in chosen) / len(chosen)
            assert pass_at_k(5, num_correct, k) == pytest.approx(expected)


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_needs_as_many_responses(k: int) -> None:
    with pytest.raises(ValueError, match=f"k={k}: must be between 1 and the 5"):
        pass_at_k(5, 1, k)


def test_the_majority_votes_among_responses_that_have_an_answer() -> None:
    assert majority_is_correct(["4", "5", "4"], [True, False, True])
    assert not majority_is_correct(["4", "5", "5"], [True, False, False])
    assert majority_is_correct([None, None, "4"], [False, False, True])
    assert majority_is_correct(["4", "5"], [True, False]), "of equally frequent answers the first counts"
    assert not majority_is_correct([None, None], [False, False])
