"""Packed values, the tokens of one sample after another's, and ratios of probabilities.

Values of tokens are [total], with `lengths` [n] int64 summing to `total`; values of samples are [n]. Half-precision
values are summed, and sums returned, in float32: in bfloat16, 256 + 1 is 256.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from typing import TYPE_CHECKING, Literal

from leaderless.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor


MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before they are exponentiated, far outside any clipping range."""


def widen(values: Tensor) -> Tensor:
    """Half-precision numbers as float32, others unchanged.

    With its three digits, bfloat16 can express neither sums over a response nor ratios within 1e-4 of 1.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio_of(log_probs: Tensor, others: Tensor) -> Tensor:
    """The logarithm of the ratio of two probabilities, at least in float32."""
    return widen(log_probs) - widen(others)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The ratio of two probabilities; constant and without gradient beyond the bound."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def with_gradient_of(value: Tensor, source: Tensor) -> Tensor:
    """A tensor with the value of one and the gradient of another, which has the same shape and is finite."""
    return value.detach() + (source - source.detach())


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sample's tokens; 0 for a sample without tokens."""
    # With the size of the result, an accelerator need not wait to compute it.
    places = torch.arange(len(lengths), device=values.device)
    sample = torch.repeat_interleave(places, lengths, output_size=len(values))
    values = widen(values)
    return values.new_zeros(len(lengths)).index_add(0, sample, values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each sample's tokens; 0 for a sample without tokens."""
    return segment_sum(values, lengths) / lengths.clamp(min=1)


def repeat_per_token(values: Tensor, lengths: Tensor, num_tokens: int | None = None) -> Tensor:
    """Each sample's value, once for each of its tokens; an accelerator need not wait if the number of all is known."""
    return torch.repeat_interleave(values, lengths, output_size=num_tokens)


def add_to_last(values: Tensor, per_sample: Tensor, lengths: Tensor) -> Tensor:
    """Add each sample's value to its last token; values of samples without tokens are dropped."""
    has_tokens = lengths > 0
    last = lengths.cumsum(0)[has_tokens] - 1
    values = widen(values)
    return values.index_add(0, last, per_sample[has_tokens].to(values.dtype))


def decayed_sum(values: Tensor, lengths: Tensor, decay: float | Tensor) -> Tensor:
    """For each token, the decayed sum over itself and later tokens of its sample: `s_t = v_t + decay s_{t+1}`.

    The decay is one number, or one for each token, [total], that holds from this token to the next.
    """
    values = widen(values)
    result = values.clone()
    last = lengths.cumsum(0) - 1
    # All samples step back from their ends together, in as many steps as the longest sample has tokens.
    for back in range(1, int(lengths.max()) if len(lengths) else 0):
        place = last[lengths > back] - back
        step = decay if isinstance(decay, float) else decay[place]
        result[place] = values[place] + step * result[place + 1]
    return result


def pack(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The masked values of padded rows `[B, T]`, as other frameworks use them, one row after the other.

    The mask is [B, T] bool, or numbers that are 0 outside; values outside may be anything. Returns [total] values and
    [B] int64 lengths.
    """
    is_counted = mask.bool()
    return values[is_counted], is_counted.sum(dim=1)


def unpack(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Packed values in their padded places, [B, T], and `fill` elsewhere.

    Raises:
        ValueError: The number of values differs from the number of places.
    """
    places = int(mask.bool().sum())
    if places != len(values):
        raise ValueError(f"values: {len(values)} of them for the {places} places of the mask; pack with the same mask")
    return torch.full(mask.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(mask.bool(), values)


@dataclass(frozen=True)
class Groups:
    """Statistics of groups of samples, in double precision, without failed rewards.

    Attributes:
        index: [n] int64, the group of each sample, from 0.
        values: [n], each sample's reward; 0 where it failed.
        is_valid: [n] bool, false where the reward failed.
        count: [g], number of samples with a reward.
        mean: [g], mean of their rewards.
        has_signal: [g] bool: at least two rewards, and not all the same.
    """

    index: Tensor
    values: Tensor
    is_valid: Tensor
    count: Tensor
    mean: Tensor
    has_signal: Tensor

    @classmethod
    def of(cls, rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Groups:
        """Sort samples into groups.

        Args:
            rewards: [n] float; failed ones may have any value, including NaN.
            is_valid: [n] bool, false where the reward failed.
            group_ids: [n] int64, the prompt of each sample; whole groups, in any order.
        """
        names, index = torch.unique(group_ids, return_inverse=True)
        values = torch.where(is_valid, rewards.double(), 0.0)
        zeros = torch.zeros(len(names), dtype=torch.float64, device=rewards.device)
        count = zeros.index_add(0, index, is_valid.double())
        mean = zeros.index_add(0, index, values) / count.clamp(min=1)
        lowest = (zeros + torch.inf).scatter_reduce(0, index, torch.where(is_valid, values, torch.inf), "amin")
        highest = (zeros - torch.inf).scatter_reduce(0, index, torch.where(is_valid, values, -torch.inf), "amax")
        return cls(index, values, is_valid, count, mean, (count >= 2) & (highest > lowest))

    def sum(self, values: Tensor) -> Tensor:
        """[g] float64: sum of [n] values over the samples of each group that have a reward."""
        counted = torch.where(self.is_valid, values.double(), 0.0)
        return torch.zeros_like(self.mean).index_add(0, self.index, counted)

    def centered(self) -> Tensor:
        """[n] float64: each reward minus its group's mean."""
        return self.values - self.mean[self.index]

    def std(self) -> Tensor:
        """[g] float64: sample standard deviation (n - 1)."""
        return (self.sum(self.centered().square()) / (self.count - 1).clamp(min=1)).sqrt()

    def keep_signal(self, advantages: Tensor) -> Tensor:
        """[n] float32: advantages with 0 for failed rewards and for groups without a signal."""
        return torch.where(self.is_valid & self.has_signal[self.index], advantages, 0.0).float()


def count_groups(rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Tensor:
    """[2] float64: groups with a signal, and all groups; summed over ranks they give the share."""
    has_signal = Groups.of(rewards, is_valid, group_ids).has_signal
    return torch.tensor([int(has_signal.sum()), len(has_signal)], dtype=torch.float64)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Unbiased estimate, from n >= k responses, of the chance that at least one of k responses is correct.

    Source: Chen et al., arXiv 2107.03374, equation 1: 1 - C(n - c, k) / C(n, k), with c the number of correct ones.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(f"k={k}: must be between 1 and the {num_samples} responses there are")
    return 1.0 - comb(num_samples - num_correct, k) / comb(num_samples, k)


def majority_is_correct(answers: Sequence[str | None], is_correct: Sequence[bool]) -> bool:
    """Whether the most frequent answer is correct; of equally frequent answers, the first counts.

    A response without an answer, None, has no vote.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return False
    winner, _ = votes.most_common(1)[0]
    return is_correct[answers.index(winner)]


Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


@dataclass(frozen=True)
class EpisodeParts:
    """Facts about the episodes of samples, whose other samples may be on other ranks.

    Attributes:
        lengths: [n] int64, response tokens of the whole episode that each sample is a part of.
        is_first: [n] bool, true for exactly one sample of each episode, which stands for it in counts.
    """

    lengths: Tensor
    is_first: Tensor

    @classmethod
    def whole(cls, lengths: Tensor) -> EpisodeParts:
        """Each sample is an episode; `lengths`, [n] int64, are its response tokens."""
        return cls(lengths, torch.ones_like(lengths, dtype=torch.bool))


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole mini-batch, on all ranks.

    Attributes:
        num_episodes: Episodes that count and have at least one token.
        num_tokens: Tokens of samples that count.
    """

    num_episodes: float
    num_tokens: float

    @staticmethod
    def count(lengths: Tensor, is_valid: Tensor, episodes: EpisodeParts | None = None) -> Tensor:
        """One rank's contribution, [2] float64 episodes and tokens; its sum over ranks makes the denominators."""
        episodes = episodes or EpisodeParts.whole(lengths)
        stands_for_one = is_valid & episodes.is_first & (episodes.lengths > 0)
        return torch.stack([stands_for_one.sum(), (lengths * is_valid).sum()]).double()


def token_weights(
    aggregation: Aggregation,
    lengths: Tensor,
    is_valid: Tensor,
    totals: Denominators,
    episodes: EpisodeParts | None = None,
    *,
    norm_tokens: int = 1,
) -> Tensor:
    """The weight of each token, [total] float32, such that the loss is the weighted sum over all tokens of all ranks.

    Because the weights contain the global denominators, the loss and its gradient do not depend on micro-batches, ranks
    or packing. The weights do not depend on how an episode's tokens are divided into samples. With N episodes that have
    tokens, o_i the tokens of one of them, and T tokens in all:

    - `token_mean`: 1 / T; DAPO, arXiv 2503.14476, equation 8.
    - `sequence_mean_token_mean`: 1 / (N |o_i|); GRPO, arXiv 2402.03300, equation 3.
    - `sequence_mean_token_sum`: 1 / N; the policy gradient itself.
    - `sequence_mean_token_sum_norm`: 1 / (N norm_tokens); Dr. GRPO, arXiv 2503.20783, section 3.2.

    Source: as named; each paper states its mean for the responses to one prompt. Here, as in their code, it is over the
    whole mini-batch, which makes a difference for `token_mean`: prompts with longer responses weigh more. The papers
    know only episodes of one response.

    `lengths`, [n] int64, are response tokens; samples that are not valid, [n] bool and the same for all samples of an
    episode, have weight 0. Without `episodes` each sample is one. `norm_tokens` is a constant, such as the longest
    response allowed.
    """
    episodes = episodes or EpisodeParts.whole(lengths)
    num_episodes, num_tokens = max(totals.num_episodes, 1.0), max(totals.num_tokens, 1.0)
    match aggregation:
        case "token_mean":
            denominator: float | Tensor = num_tokens
        case "sequence_mean_token_mean":
            denominator = episodes.lengths.clamp(min=1) * num_episodes
        case "sequence_mean_token_sum":
            denominator = num_episodes
        case "sequence_mean_token_sum_norm":
            denominator = norm_tokens * num_episodes
    return repeat_per_token((is_valid.double() / denominator).float(), lengths)
