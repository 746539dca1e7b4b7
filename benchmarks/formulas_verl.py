"""Compares advantages, losses and penalties with those of verl on the same random numbers.

Run it in an environment that has `verl` next to this package's dependencies:

    PYTHONPATH=src:. python benchmarks/formulas_verl.py

It writes `docs/performance/verl.json`. A test computes this package's numbers again, and compares them with what is
stored there.
"""

# ruff: noqa: ANN401 - where types are checked, verl is not installed
from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from leaderless.algorithms import (
    AdvantageInputs,
    Aggregation,
    Denominators,
    KlEstimator,
    LossInputs,
    clipped_value_loss,
    kl_penalty,
    token_weights,
)
from leaderless.algorithms.advantage import compute
from leaderless.algorithms.packed import repeat_per_token
from leaderless.algorithms.settings import AlgorithmConfig

STORED = Path(__file__).parents[1] / "docs/performance/verl.json"
NUM_GROUPS, GROUP_SIZE, LONGEST = 6, 4, 12
LOSSES: Mapping[str, tuple[str, Aggregation, Mapping[str, object], Mapping[str, float]]] = {
    "PPO (`vanilla`)": (
        "vanilla",
        "token_mean",
        {"type": "ppo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 3.0},
    ),
    "GSPO (`gspo`)": (
        "gspo",
        "sequence_mean_token_mean",
        {"type": "gspo", "clip_low": 0.03, "clip_high": 0.04},
        {"clip_ratio_low": 0.03, "clip_ratio_high": 0.04},
    ),
    "GMPO (`geo_mean`)": (
        "geo_mean",
        "sequence_mean_token_mean",
        {"type": "gmpo", "clip_low": 0.2, "clip_high": 0.3},
        {"clip_ratio_low": 0.2, "clip_ratio_high": 0.3},
    ),
    "CISPO (`cispo`)": (
        "cispo",
        "token_mean",
        {"type": "cispo", "clip_low": 0.3, "clip_high": 0.4},
        {"clip_ratio_low": 0.3, "clip_ratio_high": 0.4},
    ),
    "SAPO (`sapo`)": (
        "sapo",
        "sequence_mean_token_mean",
        {"type": "sapo", "temperature_positive": 1.0, "temperature_negative": 1.05},
        {"tau_pos": 1.0, "tau_neg": 1.05},
    ),
    "policy gradient (`gpg`)": ("gpg", "token_mean", {"type": "reinforce"}, {}),
}
"""Losses by name: verl's function, the aggregation, and the settings here and there."""
AGGREGATIONS: Mapping[Aggregation, str] = {
    "token_mean": "token-mean",
    "sequence_mean_token_mean": "seq-mean-token-mean",
    "sequence_mean_token_sum": "seq-mean-token-sum",
    "sequence_mean_token_sum_norm": "seq-mean-token-sum-norm",
}
PENALTIES: Mapping[KlEstimator, str] = {"k1": "kl", "k2": "mse", "k3": "low_var_kl", "absolute": "abs"}
ADVANTAGES: Mapping[str, tuple[Mapping[str, object], str, Mapping[str, object]]] = {
    "GRPO (`grpo`)": ({"type": "grpo"}, "grpo", {}),
    "GRPO without deviation (`grpo`)": (
        {"type": "grpo", "normalize_by_std": False},
        "grpo",
        {"norm_adv_by_std_in_grpo": False},
    ),
    "RLOO (`rloo`)": ({"type": "rloo"}, "rloo", {}),
    "OPO (`opo`)": ({"type": "opo"}, "opo", {}),
    "REINFORCE++ (`reinforce_plus_plus`)": ({"type": "reinforce_pp", "discount": 0.9}, "reinforce_plus_plus", {}),
    "REINFORCE++ with a baseline (`reinforce_plus_plus_baseline`)": (
        {"type": "reinforce_pp", "group_baseline": True},
        "reinforce_plus_plus_baseline",
        {},
    ),
    "GAE (`gae`)": ({"type": "gae", "discount": 0.95, "decay": 0.9}, "gae", {"gamma": 0.95, "lam": 0.9}),
}
"""Advantages by name: the settings here, verl's name, and its arguments."""


@dataclass(frozen=True)
class Rows:
    """Responses of different lengths, padded: all are [n, longest], but for `lengths`, `rewards` and `groups`, [n]."""

    lengths: Tensor
    mask: Tensor
    log_probs: Tensor
    old_log_probs: Tensor
    reference: Tensor
    advantages: Tensor
    values: Tensor
    rewards: Tensor
    groups: Tensor

    @classmethod
    def make(cls) -> Rows:
        """The same ones whenever it is called."""
        generator = torch.Generator().manual_seed(7)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=generator)

        count = NUM_GROUPS * GROUP_SIZE
        lengths = torch.randint(1, LONGEST + 1, (count,), generator=generator)
        mask = (torch.arange(LONGEST) < lengths[:, None]).float()
        old = -normal(count, LONGEST).abs() * mask
        return cls(
            lengths=lengths,
            mask=mask,
            log_probs=(old + 0.6 * normal(count, LONGEST)) * mask,
            old_log_probs=old,
            reference=(old + 0.4 * normal(count, LONGEST)) * mask,
            advantages=normal(count, 1) * mask,  # GMPO has one for each response
            values=normal(count, LONGEST) * mask,
            rewards=normal(count),
            groups=torch.arange(NUM_GROUPS).repeat_interleave(GROUP_SIZE),
        )

    def packed(self, padded: Tensor) -> Tensor:
        """[total] the tokens of a padded tensor."""
        return padded[self.mask.bool()]

    @property
    def token_rewards(self) -> Tensor:
        """[n, longest] the reward at the last token."""
        return torch.zeros_like(self.mask).scatter(1, self.lengths[:, None] - 1, self.rewards[:, None])


def ours(rows: Rows) -> dict[str, Tensor]:
    """Everything that is compared, as this package computes it: of losses, the value and the gradient of each token."""
    found = {name: _advantage(rows, settings) for name, (settings, _, _) in ADVANTAGES.items()}
    for name, (_, aggregation, settings, _) in LOSSES.items():
        loss = AlgorithmConfig.model_validate({"policy_loss": settings, "aggregation": aggregation}).policy_loss

        def total(log_probs: Tensor, loss: Any = loss, aggregation: Aggregation = aggregation) -> Tensor:
            is_counted = torch.ones_like(log_probs, dtype=torch.bool)
            inputs = LossInputs(
                log_probs,
                rows.packed(rows.old_log_probs),
                rows.packed(rows.advantages),
                rows.lengths,
                is_counted,
                ~is_counted,
                {},
                1,
            )
            return (loss.compute(inputs).loss * _weights(rows, aggregation)).sum()

        found[name] = _with_gradient(total, rows.packed(rows.log_probs))
    for aggregation, theirs in AGGREGATIONS.items():
        found[f"mean of tokens (`{theirs}`)"] = (
            (rows.packed(rows.values) * _weights(rows, aggregation)).sum().reshape(1)
        )
    for estimator, theirs in PENALTIES.items():
        found[f"KL penalty {estimator} (`{theirs}`)"] = _with_gradient(
            lambda log_probs, estimator=estimator: kl_penalty(log_probs, rows.packed(rows.reference), estimator),
            rows.packed(rows.log_probs),
        )

    def value_loss(predicted: Tensor) -> Tensor:
        old, returns = rows.packed(rows.values), rows.packed(rows.advantages)
        loss = clipped_value_loss(predicted, old, returns, clip=0.2).loss
        return (loss * _weights(rows, "token_mean")).sum()

    found["loss of the critic"] = _with_gradient(value_loss, rows.packed(rows.log_probs))
    return found


def verls(rows: Rows) -> dict[str, Tensor]:
    """The same as verl computes it."""
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    found = {}
    indices = rows.groups.numpy()
    for name, (_, theirs, arguments) in ADVANTAGES.items():
        function = core_algos.get_adv_estimator_fn(theirs)
        settings: dict[str, Any] = {"token_level_rewards": rows.token_rewards, "response_mask": rows.mask, **arguments}
        settings |= {"values": rows.values} if theirs == "gae" else {"config": SimpleNamespace(gamma=0.9)}
        settings |= {} if theirs in {"gae", "reinforce_plus_plus"} else {"index": indices}
        found[name] = rows.packed(function(**settings)[0])
    for name, (theirs, aggregation, _, options) in LOSSES.items():
        config = ActorConfig(strategy="fsdp", rollout_n=GROUP_SIZE, use_dynamic_bsz=True, **options)

        def total(log_probs: Tensor, theirs: str = theirs, aggregation: str = aggregation, config: Any = config) -> Any:
            return core_algos.get_policy_loss_fn(theirs)(
                old_log_prob=rows.old_log_probs,
                log_prob=log_probs,
                advantages=rows.advantages,
                response_mask=rows.mask,
                loss_agg_mode=AGGREGATIONS[aggregation],  # type: ignore[index]
                config=config,
            )[0]

        found[name] = _with_gradient(total, rows.log_probs, rows)
    for mode in AGGREGATIONS.values():
        found[f"mean of tokens (`{mode}`)"] = core_algos.agg_loss(rows.values, rows.mask, mode).reshape(1)
    for estimator, theirs in PENALTIES.items():
        found[f"KL penalty {estimator} (`{theirs}`)"] = _with_gradient(
            lambda log_probs, theirs=theirs: core_algos.kl_penalty(log_probs, rows.reference, theirs),
            rows.log_probs,
            rows,
        )
    found["loss of the critic"] = _with_gradient(
        lambda predicted: core_algos.compute_value_loss(predicted, rows.advantages, rows.values, rows.mask, 0.2)[0],
        rows.log_probs,
        rows,
    )
    return found


def _with_gradient(function: Callable[[Tensor], Tensor], at: Tensor, rows: Rows | None = None) -> Tensor:
    """The value of a function, of all tokens or one for all, and its gradient at each token."""
    at = at.clone().requires_grad_()
    value = function(at)
    (gradient,) = torch.autograd.grad(value.sum(), at)
    parts = [value.detach(), gradient]
    if rows is not None:
        parts = [rows.packed(part) if part.dim() == 2 else part for part in parts]
    return torch.cat([part.reshape(-1) for part in parts])


def _weights(rows: Rows, aggregation: Aggregation) -> Tensor:
    is_valid = torch.ones_like(rows.lengths, dtype=torch.bool)
    totals = Denominators(len(rows.lengths), float(rows.lengths.sum()))
    return token_weights(aggregation, rows.lengths, is_valid, totals, norm_tokens=LONGEST)


def _advantage(rows: Rows, settings: Mapping[str, object]) -> Tensor:
    """[total] an advantage of each token."""
    advantage = AlgorithmConfig.model_validate({"advantage": settings}).advantage
    is_valid = torch.ones_like(rows.lengths, dtype=torch.bool)
    output = compute(
        advantage,
        AdvantageInputs(
            rewards=rows.rewards,
            final_rewards=rows.rewards,
            penalties=torch.zeros(int(rows.lengths.sum())),
            is_valid=is_valid,
            is_trained=is_valid,
            lengths=rows.lengths,
            group_ids=rows.groups,
            episode_ids=torch.arange(len(rows.lengths)),
            columns={"values": rows.packed(rows.values)},
            sum_over_ranks=lambda values: values,
            step=1,
        ),
    ).advantages
    return output if advantage.is_per_token else repeat_per_token(output, rows.lengths)


def probe(values: Tensor) -> list[float]:
    """A few numbers that depend on all values: the norm, and products with fixed random directions."""
    generator = torch.Generator().manual_seed(3)
    directions = torch.randn(3, len(values), generator=generator, dtype=torch.float64) / len(values) ** 0.5
    return [float(values.double().norm()), *(directions @ values.double()).tolist()]


def main() -> None:
    """Compare all, and store the result."""
    rows = Rows.make()
    mine, theirs = ours(rows), verls(rows)
    found = {
        name: {
            "difference": float((mine[name].double() - one.double()).abs().max()),
            "largest": float(one.abs().max()),
            "verl": probe(one),
        }
        for name, one in theirs.items()
    }
    for name, one in found.items():
        print(f"{name}: {one['difference']:.1e} of at most {one['largest']:.3g}")
    versions = {package: version(package) for package in ("verl", "torch")}
    STORED.write_text(json.dumps({"versions": versions, "formulas": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
