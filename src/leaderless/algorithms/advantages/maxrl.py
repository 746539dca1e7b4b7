"""MaxRL: correct responses relative to how many there are."""

from __future__ import annotations

from typing import ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups


class MaxrlAdvantage(Advantage):
    """Correct responses relative to their share of the group, so that hard prompts weigh more.

    While `rloo` follows the gradient of the chance p to be correct, this follows that of log p, which is that of p
    divided by p. On average over groups of n it is the gradient of the first n - 1 terms of the series of log p in
    1 - p.

    Formula: (c - p) / p, with c = 1 for a correct response and 0 for a wrong one, and p the share of correct ones.

    Source: MaxRL, arXiv 2602.02710, as in its code. That has rewards in place of c, which is the same for rewards of 0
    and 1, and adds 1e-6 to p. As there, a group without a correct response has no signal.
    """

    type: Literal["maxrl"] = "maxrl"
    correct_at: float = 1.0
    """Reward from which a response counts as correct."""

    compares_siblings: ClassVar[bool] = True
    judges: ClassVar[str] = "asks whether a response is correct"

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        is_correct = (inputs.rewards >= self.correct_at).double()
        groups = Groups.of(is_correct, inputs.is_valid, inputs.group_ids)
        # A group with a signal has a correct response, so that its share is no less than 1 / n.
        share = groups.mean.where(groups.has_signal, 1.0)
        return AdvantageOutput(groups.keep_signal(groups.centered() / share[groups.index]))
