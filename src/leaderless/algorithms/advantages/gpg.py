"""GPG: centered rewards, scaled up for groups without a signal."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups

if TYPE_CHECKING:
    from torch import Tensor


class GpgAdvantage(Advantage):
    """Rewards minus their group's mean, scaled up to make up for groups without a signal.

    A mean over all groups shrinks the gradient by the share of groups with a signal; the scale undoes this.

    Formula: (r - mean) / signal_share.

    Source: GPG, arXiv 2504.02546, with F_norm = 1. The paper counts samples, B / (B - M), which is the same for groups
    of equal size.
    """

    type: Literal["gpg"] = "gpg"

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses."""
        share = inputs.signal_share()
        return AdvantageOutput(gpg_advantages(inputs.rewards, inputs.is_valid, inputs.group_ids, signal_share=share))


def gpg_advantages(rewards: Tensor, is_valid: Tensor, group_ids: Tensor, *, signal_share: float) -> Tensor:
    """Centered and scaled rewards, [n] float32; `signal_share` is the share of groups with a signal, on all ranks."""
    groups = Groups.of(rewards, is_valid, group_ids)
    return groups.keep_signal(groups.centered() / max(signal_share, 1e-12))
