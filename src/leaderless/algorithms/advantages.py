"""Advantages, [n] float32, of whole responses, most of them relative to the other responses to the same prompt.

- `rewards`: [n] float, one for each response.
- `is_valid`: [n] bool, false where the reward failed.
- `group_ids`: [n] int64, the prompt of each response; whole groups, in any order.
- `lengths`: [n] int64, response tokens.
- `signal_share`: groups with a signal over all groups, on all ranks; see `count_groups`.

A response whose reward failed is left out of its group's statistics and has advantage 0. In advantages that compare
the responses of a group, so has every response of a group with fewer than two rewards or with equal ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.groups import Groups
from leaderless.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def grpo_advantages(
    rewards: Tensor, is_valid: Tensor, group_ids: Tensor, *, normalize_by_std: bool, epsilon: float
) -> Tensor:
    """Group-relative advantages; without the division, those of Dr. GRPO.

    Formula: (r - mean) / (std + epsilon), or r - mean.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision); Dr. GRPO, arXiv 2503.20783, section
    3.2. GRPO's paper does not say which standard deviation it means; this is the sample's (n - 1), as is common.

    `epsilon`, above 0, is added to the standard deviation.
    """
    groups = Groups.of(rewards, is_valid, group_ids)
    advantages = groups.centered()
    if normalize_by_std:
        advantages = advantages / (groups.std() + epsilon)[groups.index]
    return groups.keep_signal(advantages)


def rloo_advantages(rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Tensor:
    """Leave-one-out advantages: each reward minus the mean of the others in its group.

    Formula: n / (n - 1) (r - mean).

    Source: RLOO, Ahmadian et al., arXiv 2402.14740; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free",
    2019. n counts the rewards that did not fail.
    """
    groups = Groups.of(rewards, is_valid, group_ids)
    scale = groups.count / (groups.count - 1).clamp(min=1)
    return groups.keep_signal(groups.centered() * scale[groups.index])


def opo_advantages(rewards: Tensor, is_valid: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages over a length-weighted baseline, which has the least variance on policy.

    Formula: r - sum(l r) / sum(l), with l the response's tokens.

    Source: OPO, arXiv 2505.23585, in its practical form: gradients of tokens are taken to be orthogonal and equally
    large.
    """
    groups = Groups.of(rewards, is_valid, group_ids)
    baseline = groups.sum(groups.values * lengths) / groups.sum(lengths.double()).clamp(min=1)
    return groups.keep_signal(groups.values - baseline[groups.index])


def gpg_advantages(rewards: Tensor, is_valid: Tensor, group_ids: Tensor, *, signal_share: float) -> Tensor:
    """Mean-centered rewards, scaled up to make up for groups without a signal.

    A mean over all groups shrinks the gradient by the share of groups with a signal; the scale undoes this.

    Formula: (r - mean) / signal_share.

    Source: GPG, arXiv 2504.02546, with F_norm = 1. The paper counts samples, B / (B - M), which is the same for groups
    of equal size.
    """
    groups = Groups.of(rewards, is_valid, group_ids)
    return groups.keep_signal(groups.centered() / max(signal_share, 1e-12))


def cpgd_advantages(
    rewards: Tensor, is_valid: Tensor, group_ids: Tensor, *, signal_share: float, max_weight: float
) -> Tensor:
    """CPGD's clip-filter-like weighting: mean-centered rewards, scaled up for groups without a signal, to a limit.

    Formula: min(max_weight, 1 / signal_share) (r - mean).

    Source: CPGD, arXiv 2505.12504. Its two other weightings are 1 (Dr. GRPO) and 1 / std (GRPO). The paper does not say
    over what the share is taken; here it is over the groups of the step, on all ranks.

    `max_weight` is at least 1.
    """
    groups = Groups.of(rewards, is_valid, group_ids)
    weight = min(max_weight, 1 / max(signal_share, 1e-12))
    return groups.keep_signal(weight * groups.centered())


def pass_at_k_advantages(is_correct: Tensor, is_valid: Tensor, group_ids: Tensor, *, k: int) -> Tensor:
    """Advantages for which a set of k responses is worth as much as its best one, averaged over all such sets.

    Formula: (1 - p) / s for a correct response and (1 - p - C(wrong - 1, k - 1) / C(n - 1, k - 1)) / s for a wrong one,
    with p = 1 - C(wrong, k) / C(n, k) and s = sqrt(p (1 - p)).

    Source: Pass@k Training, arXiv 2508.10751, analytical derivation. A group has no signal if it has fewer than k
    rewards, or if every set of k holds a correct response.

    `is_correct` is [n] bool; `k` is at least 1.
    """
    groups = Groups.of(is_correct.double(), is_valid, group_ids)
    wrong = groups.count - groups.sum(groups.values)
    all_wrong = _ratio_of_binomials(wrong, groups.count, k)
    deviation = (all_wrong * (1 - all_wrong)).sqrt()
    for_wrong = all_wrong - _ratio_of_binomials(wrong - 1, groups.count - 1, k - 1)
    advantages = torch.where(groups.values > 0, all_wrong[groups.index], for_wrong[groups.index])
    has_deviation = (deviation > 0)[groups.index]
    return groups.keep_signal(torch.where(has_deviation, advantages / deviation[groups.index], 0.0))


def _ratio_of_binomials(top: Tensor, bottom: Tensor, k: int) -> Tensor:
    """C(top, k) / C(bottom, k) where top <= bottom; 0 where top < k."""
    ratio = torch.ones_like(top)
    for i in range(k):
        ratio = ratio * (top - i).clamp(min=0) / (bottom - i).clamp(min=1)
    return ratio


def remax_advantages(rewards: Tensor, is_valid: Tensor, greedy_rewards: Tensor, is_greedy_valid: Tensor) -> Tensor:
    """Rewards minus the reward of the greedy response to the same prompt.

    Formula: r - r_greedy.

    Source: ReMax, arXiv 2310.10505. No group is needed: one sampled response per prompt is enough.

    `greedy_rewards`, [n], has the one for the prompt of each sample. The advantage is 0 where either reward failed.
    """
    difference = rewards.double() - greedy_rewards.double()
    return torch.where(is_valid & is_greedy_valid, difference, 0.0).float()


def distillation_advantages(log_probs: Tensor, teacher_log_probs: Tensor) -> Tensor:
    """How much more likely each token is under a teacher than under the student that sampled it.

    Formula: A_t = log p_teacher - log p. With the plain policy gradient this is the gradient of the reverse divergence
    from student to teacher, token by token; rewards are not used.

    Source: on-policy distillation: MiniLLM, arXiv 2306.08543; GKD, arXiv 2306.13649, with the student's samples only.
    One deviation from both: the effect of a token on later tokens is left out (a discount of 0).

    All tensors are [total], one value per token; those of the student are from before this step's updates, and the
    advantages have no gradient.
    """
    return (teacher_log_probs.detach().double() - log_probs.detach().double()).float()


def rejection_advantages(is_correct: Tensor, is_valid: Tensor, *, correct_share: float) -> Tensor:
    """1 for correct responses and 0 for others, scaled so that a mean over all is a mean over the correct ones.

    Formula: A = [correct] / correct_share. With the plain policy gradient, the aggregation `token_mean` and a share of
    tokens, this is fine-tuning on the model's own correct responses.

    Source: rejection-sampling fine-tuning, arXiv 2308.01825; RAFT, arXiv 2304.06767.

    `correct_share` is tokens of correct responses over tokens of all responses that count, on all ranks.
    """
    return (is_correct & is_valid).float() / max(correct_share, 1e-12)


def count_groups_without_signal(advantages: Tensor, group_ids: Tensor) -> tuple[int, int]:
    """Number of groups whose advantages, [n], are all 0, and number of all groups."""
    groups, group = torch.unique(group_ids, return_inverse=True)
    size = torch.zeros(len(groups), dtype=torch.float64, device=advantages.device).index_add(
        0, group, advantages.double().abs()
    )
    return int((size == 0).sum()), len(groups)
