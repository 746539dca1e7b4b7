"""Every loss of a token next to its twin in plain Python: one token at a time, in double precision, without tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor

from leaderless.algorithms import (
    Aggregation,
    LossInputs,
    LossOutput,
    PolicyLoss,
    clipped_value_loss,
    covariances,
    kl_penalty,
)
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.losses.clip_cov import ClipCovLoss
from leaderless.algorithms.losses.dppo import Divergence, DppoLoss
from leaderless.algorithms.losses.kl_cov import KlCovLoss
from leaderless.algorithms.losses.m2po import M2poLoss

AGGREGATIONS: tuple[Aggregation, ...] = (
    "token_mean",
    "sequence_mean_token_mean",
    "sequence_mean_token_sum",
    "sequence_mean_token_sum_norm",
)

Token = tuple[float, float, float]
"""Log-probability, old log-probability, advantage."""

Twin = Callable[[Sequence[Token]], list[float]]
"""From the tokens of one response to a number for each."""


@dataclass(frozen=True)
class Case:
    """A loss with settings under which all its branches are reached.

    Attributes:
        loss: Loss as a function of log-probs, old log-probs, advantages and lengths.
        twin: Same loss in plain Python.
        slope: Gradient of the summed loss where stop-gradients make it differ from the derivative of the value.
        is_reinforce_on_policy: Whether its gradient at ratio 1 is that of REINFORCE.
        is_per_response: Whether all tokens of a response must have the same advantage.
    """

    loss: Callable[[Tensor, Tensor, Tensor, Tensor], LossOutput]
    twin: Twin
    slope: Twin | None = None
    is_reinforce_on_policy: bool = True
    is_per_response: bool = False


def loss_of(
    loss: PolicyLoss,
    new: Tensor,
    old: Tensor,
    gain: Tensor,
    lengths: Tensor | None = None,
    *,
    is_chosen: Tensor | None = None,
) -> LossOutput:
    """A loss of log-probs, old log-probs and advantages; without lengths all tokens are of one response."""
    lengths = torch.tensor([len(new)]) if lengths is None else lengths
    none = torch.zeros(len(new), dtype=torch.bool)
    columns = {"rollout_log_probs": old}
    return loss.compute(
        LossInputs(new, old, gain, lengths, ~none, none if is_chosen is None else is_chosen, columns, 1)
    )


def ratio(token: Token) -> float:
    return math.exp(min(20.0, max(-20.0, token[0] - token[1])))


def clip(x: float, low: float, high: float) -> float:
    return min(high, max(low, x))


def clipped(token: Token, low: float, high: float, dual: float = math.inf) -> float:
    r, gain = ratio(token), token[2]
    loss = -min(r * gain, clip(r, 1 - low, 1 + high) * gain)
    return min(loss, -dual * gain) if gain < 0 and dual < math.inf else loss


def sapo(token: Token, positive: float, negative: float) -> float:
    temperature = positive if token[2] > 0 else negative
    return -4 / temperature / (1 + math.exp(-temperature * (ratio(token) - 1))) * token[2]


def cpgd(token: Token, low: float, high: float, coefficient: float) -> float:
    x, gain = token[0] - token[1], token[2]
    bounded = clip(x, math.log(1 - low), math.log(1 + high))
    return -min(x * gain, bounded * gain) + coefficient * (math.exp(x) - 1 - x)


def cpgd_slope(token: Token, low: float, high: float, coefficient: float, drift_clip: float) -> float:
    r, gain = ratio(token), token[2]
    is_cut = (gain > 0 and r > 1 + high) or (gain < 0 and r < 1 - low)
    return (0.0 if is_cut else -gain) + coefficient * min(r - 1, drift_clip)


def dppo_weight(token: Token, divergence: Divergence, threshold: float, largest: float) -> float:
    p, q = math.exp(token[0]), math.exp(token[1])
    distance = abs(p - q)
    if divergence == "kl":
        distance = q * math.log(q / p) + (1 - q) * math.log(max(1e-12, 1 - q) / max(1e-12, 1 - p))
    leads_away = (token[2] > 0 and p > q) or (token[2] < 0 and p < q)
    return 0.0 if distance > threshold and leads_away else min(ratio(token), largest)


def dppo(divergence: Divergence, threshold: float, largest: float) -> Case:
    """A loss that is a weight without gradient times the policy gradient."""
    return Case(
        partial(loss_of, DppoLoss(divergence=divergence, threshold=threshold, max_ratio=largest)),
        each(lambda token: -dppo_weight(token, divergence, threshold, largest) * token[2] * token[0]),
        each(lambda token: -dppo_weight(token, divergence, threshold, largest) * token[2]),
    )


def product(tokens: Sequence[Token]) -> float:
    return math.exp(clip(sum(new - old for new, old, _ in tokens), -20, 20))


def tapered(tokens: Sequence[Token], ratios: Sequence[float]) -> list[float]:
    return [1.0 if token[2] >= 0 else min(r, 1.0) for token, r in zip(tokens, ratios, strict=True)]


def vespo_weights(tokens: Sequence[Token], good: tuple[float, float], bad: tuple[float, float]) -> list[float]:
    w, weights = product(tokens), []
    for token in tokens:
        power, rate = good if token[2] >= 0 else bad
        weights.append(w**power * math.exp(rate * (1 - w)))
    return weights


def weighted(loss: Callable[..., LossOutput], weights: Twin) -> Case:
    """A loss that is a weight without gradient, of each token, times the policy gradient."""

    def slope(tokens: Sequence[Token]) -> list[float]:
        return [-weight * token[2] for weight, token in zip(weights(tokens), tokens, strict=True)]

    def twin(tokens: Sequence[Token]) -> list[float]:
        return [value * token[0] for value, token in zip(slope(tokens), tokens, strict=True)]

    return Case(loss, twin, slope)


def geometric(tokens: Sequence[Token]) -> float:
    return math.exp(sum(new - old for new, old, _ in tokens) / len(tokens))


def gspo(tokens: Sequence[Token], low: float, high: float) -> list[float]:
    return [-min((s := geometric(tokens)) * gain, clip(s, 1 - low, 1 + high) * gain) for _, _, gain in tokens]


def gspo_slope(tokens: Sequence[Token], low: float, high: float) -> list[float]:
    s = geometric(tokens)
    return [0.0 if (g > 0 and s > 1 + high) or (g < 0 and s < 1 - low) else -s * g for _, _, g in tokens]


def gmpo(tokens: Sequence[Token], low: float, high: float) -> list[float]:
    """As in the paper: the root of a product of clipped |ratio A|, with the sign of A restored."""
    product, gain = 1.0, tokens[0][2]
    for token in tokens:
        r = ratio(token)
        product *= abs(min(r * gain, clip(r, math.exp(-low), math.exp(high)) * gain))
    return [-math.copysign(product ** (1 / len(tokens)), gain)] * len(tokens)


def is_chosen(token: Token) -> bool:
    return (token[0] + 1) * token[2] > 0.3


def kl_cov(token: Token, coefficient: float) -> float:
    return -ratio(token) * token[2] + (coefficient * abs(token[0] - token[1]) if is_chosen(token) else 0.0)


def m2po(token: Token) -> float:
    return 0.0 if is_chosen(token) else -ratio(token) * token[2]


def value_loss(token: Token, width: float) -> float:
    value, old, target = token
    return max((value - target) ** 2, (clip(value, old - width, old + width) - target) ** 2) / 2


KL_TWINS: dict[str, Callable[[float], float]] = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
    "absolute": abs,
}


def each(function: Callable[..., float], *settings: float) -> Twin:
    return lambda tokens: [function(token, *settings) for token in tokens]


def chosen(new: Tensor, gain: Tensor) -> Tensor:
    return covariances(new, gain, mean_log_prob=-1.0, mean_advantage=0.0) > 0.3


def clip_cov(new: Tensor, old: Tensor, gain: Tensor, lengths: Tensor) -> LossOutput:
    return loss_of(ClipCovLoss(clip_low=0.2, clip_high=0.3), new, old, gain, lengths, is_chosen=chosen(new, gain))


def clip_cov_slope(tokens: Sequence[Token]) -> list[float]:
    def is_cut(token: Token) -> bool:
        return (token[2] > 0 and ratio(token) > 1.3) or (token[2] < 0 and ratio(token) < 0.8)

    return [0.0 if is_chosen(token) or is_cut(token) else -ratio(token) * token[2] for token in tokens]


def penalty(estimator: str, *, unbiased: bool = False) -> Case:
    def loss(new: Tensor, old: Tensor, gain: Tensor, lengths: Tensor) -> LossOutput:
        value = kl_penalty(new, old, estimator, unbiased_gradient=unbiased)
        return LossOutput(value, torch.zeros_like(value, dtype=torch.bool))

    twin = KL_TWINS[estimator]
    slope = each(lambda token: token[0] - token[1]) if unbiased else None
    return Case(loss, each(lambda token: twin(token[0] - token[1])), slope, is_reinforce_on_policy=False)


def per_token(function: Callable[..., LossOutput], **settings: float) -> Callable[..., LossOutput]:
    return lambda new, old, gain, _: function(new, old, gain, **settings)


def of(name: str, **settings: float | str) -> Callable[..., LossOutput]:
    return partial(loss_of, POLICY_LOSSES[name].model_validate(settings))


SETTINGS_CPGD = {"clip_low": 0.2, "clip_high": 0.3, "drift_coefficient": 0.1, "drift_clip": 0.5}

CASES: dict[str, Case] = {
    "reinforce": Case(of("reinforce"), each(lambda token: -token[2] * token[0])),
    "ppo": Case(of("ppo", clip_low=0.2, clip_high=0.2), each(clipped, 0.2, 0.2)),
    "clip_higher": Case(of("ppo", clip_low=0.2, clip_high=0.4), each(clipped, 0.2, 0.4)),
    "dual_clip": Case(of("ppo", clip_low=0.2, clip_high=0.2, dual_clip=1.5), each(clipped, 0.2, 0.2, 1.5)),
    "cispo": Case(
        of("cispo", clip_low=1.0, clip_high=0.3),
        each(lambda token: -min(ratio(token), 1.3) * token[2] * token[0]),
        each(lambda token: -min(ratio(token), 1.3) * token[2]),
    ),
    "cispo_two_sided": Case(
        of("cispo", clip_low=0.2, clip_high=0.3),
        each(lambda token: -clip(ratio(token), 0.8, 1.3) * token[2] * token[0]),
        each(lambda token: -clip(ratio(token), 0.8, 1.3) * token[2]),
    ),
    "sapo": Case(of("sapo", temperature_positive=1.0, temperature_negative=2.5), each(sapo, 1.0, 2.5)),
    "cpgd": Case(of("cpgd", **SETTINGS_CPGD), each(cpgd, 0.2, 0.3, 0.1), each(cpgd_slope, 0.2, 0.3, 0.1, 0.5)),
    "dppo": dppo("total_variation", 0.02, 1.5),
    "dppo_kl": dppo("kl", 0.002, 10.0),
    "topr": weighted(of("topr"), lambda t: tapered(t, [product(t)] * len(t))),
    "topr_geometric": weighted(of("topr", level="geometric"), lambda t: tapered(t, [geometric(t)] * len(t))),
    "topr_token": weighted(of("topr", level="token"), lambda t: tapered(t, [ratio(token) for token in t])),
    "vespo": weighted(of("vespo"), lambda tokens: vespo_weights(tokens, (2.0, 3.0), (3.0, 2.0))),
    "m2po": Case(
        lambda new, old, gain, _: loss_of(M2poLoss(), new, old, gain, is_chosen=chosen(new, gain)),
        each(m2po),
        is_reinforce_on_policy=False,
    ),
    "gspo": Case(
        of("gspo", clip_low=0.1, clip_high=0.2), lambda t: gspo(t, 0.1, 0.2), lambda t: gspo_slope(t, 0.1, 0.2)
    ),
    "gmpo": Case(of("gmpo", clip_low=0.2, clip_high=0.3), lambda t: gmpo(t, 0.2, 0.3), is_per_response=True),
    "clip_cov": Case(clip_cov, each(clipped, 0.2, 0.3), clip_cov_slope, is_reinforce_on_policy=False),
    "kl_cov": Case(
        lambda new, old, gain, _: loss_of(KlCovLoss(coefficient=0.7), new, old, gain, is_chosen=chosen(new, gain)),
        each(kl_cov, 0.7),
    ),
    "value": Case(per_token(clipped_value_loss, clip=0.3), each(value_loss, 0.3), is_reinforce_on_policy=False),
    "value_unclipped": Case(
        per_token(clipped_value_loss, clip=math.inf), each(value_loss, math.inf), is_reinforce_on_policy=False
    ),
    "k1": penalty("k1"),
    "k2": penalty("k2"),
    "k3": penalty("k3"),
    "absolute": penalty("absolute"),
    "k1_unbiased": penalty("k1", unbiased=True),
    "k3_unbiased": penalty("k3", unbiased=True),
    "absolute_unbiased": penalty("absolute", unbiased=True),
}

tokens = st.tuples(st.floats(-4, 0), st.floats(-1.5, 1.5), st.floats(-3, 3)).map(
    lambda drawn: (drawn[0], drawn[0] + drawn[1], drawn[2])
)
responses = st.lists(st.lists(tokens, max_size=5), min_size=1, max_size=6)
"""Several responses, some of which may be empty."""


def with_one_advantage(response: Sequence[Token]) -> list[Token]:
    return [(new, old, response[0][2]) for new, old, _ in response]


def packed(batch: Sequence[Sequence[Token]]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs, old log-probs and advantages in float64, and lengths."""
    columns = torch.tensor([token for response in batch for token in response], dtype=torch.float64).reshape(-1, 3)
    new, old, gain = columns.unbind(1)
    return new.clone(), old.clone(), gain.clone(), torch.tensor([len(response) for response in batch])


def random_batch(seed: int, lengths: Sequence[int], *, is_per_response: bool) -> list[list[Token]]:
    """Responses whose log-ratios lie on both sides of every bound in `CASES`, and none on a bound."""
    noise = torch.Generator().manual_seed(seed)
    batch = []
    for length in lengths:
        new = -torch.rand(length, dtype=torch.float64, generator=noise) * 3
        old = new + 0.5 * torch.randn(length, dtype=torch.float64, generator=noise)
        gain = torch.randn(length, dtype=torch.float64, generator=noise)
        response = list(zip(new.tolist(), old.tolist(), gain.tolist(), strict=True))
        batch.append(with_one_advantage(response) if is_per_response else response)
    return batch
