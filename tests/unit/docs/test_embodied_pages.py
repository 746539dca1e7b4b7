"""What pages say of measured curves of bodies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3] / "docs"))  # as when it is run
from generate_bodies import race
from generate_embodied import first_at, rlpd, srpo_steps, success_at, verdict

FAST = [(0, 0.5), (10, 0.8), (20, 0.9)]
SLOW = [(0, 0.5), (10, 0.7), (20, 0.8), (30, 0.85), (40, 0.95)]
NEVER = [(0, 0.5), (10, 0.6), (20, 0.7), (30, 0.7), (40, 0.75)]


def test_the_first_evaluation_at_the_target_counts() -> None:
    assert [first_at(one) for one in (FAST, SLOW, NEVER)] == [20, 40, None]
    assert [success_at(SLOW, steps) for steps in (0, 13, 17, 1000)] == [0.5, 0.7, 0.8, 0.95]


@pytest.mark.parametrize(
    ("grpo", "srpo", "said"),
    [
        ([SLOW], [FAST], "SRPO was first with 1 and GRPO with 0. Where both reached it, SRPO took 0.50 times"),
        ([FAST], [SLOW], "SRPO was first with 0 and GRPO with 1. Where both reached it, SRPO took 2.00 times"),
        ([NEVER], [FAST], "At the last step that both have, the success of SRPO minus that of GRPO was +20.0 points"),
        ([NEVER], [NEVER], "GRPO with 0; with 1, both were there at the same evaluation, or neither ever."),
        ([FAST, SLOW], [SLOW, FAST], "(median of 2; 0.50 to 2.00)"),
    ],
)
def test_seeds_are_compared_in_pairs(grpo: list, srpo: list, said: str) -> None:
    page = srpo_steps({"grpo": dict(zip("01", grpo, strict=False)), "srpo": dict(zip("01", srpo, strict=False))})
    assert said in page


def test_a_gain_is_claimed_only_where_seeds_show_it() -> None:
    """Five heads in five throws have a chance of 2 / 32 on either side, six of 2 / 64."""
    assert verdict(5, 0).endswith("p = 0.06), these seeds do not show that either needs fewer steps.")
    assert verdict(6, 0).endswith("p = 0.03), SRPO needs fewer steps.")
    assert verdict(0, 6).endswith("GRPO needs fewer steps.")
    assert verdict(2, 2).endswith("p = 1.00), these seeds do not show that either needs fewer steps.")


def test_arms_are_judged_by_their_steps() -> None:
    page = rlpd(
        {"rlpd": {"0": [(0, 0.0), (990, 0.5), (2100, 0.92), (3040, 1.0)]}, "sac": {"0": [(0, 0.0), (3100, 0.04)]}}
    )
    assert "| RLPD | 0 | 50% | 92% | 100% | 2,100 |" in page
    assert "| 0 | 0% | 4% | 4% | more than 3,100 |" in page


def test_a_race_compares_seeds_that_both_have_ended() -> None:
    fast, slow, never = [(0, 0.0, 0.1), (3200, 10.0, 0.96)], [(0, 0.0, 0.1), (6400, 40.0, 0.95)], [(38400, 99.0, 0.9)]
    page = race({"leaderless": {"0": slow, "1": never, "2": fast}, "sb3_16": {"0": fast, "1": fast}})
    assert "| 0 | 6,400 | 40 | 3,200 | 10 |\n| 1 | more than 38,400 | more than 99 | 3,200 | 10 |\n\n" in page
    assert "Seeds with which both reached it: 1 of 2." in page
    assert "took 2.00 times the steps and 4.00 times the seconds of Stable-Baselines3, by one seed" in page
    page = race({"leaderless": {"0": slow, "1": fast}, "sb3_16": {"0": fast, "1": fast}})
    assert "took 1.50 times (1.00 to 2.00) the steps and 2.50 times (1.00 to 4.00) the seconds" in page
