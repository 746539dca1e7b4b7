"""Every setting of an advantage or a loss changes what it computes, and what does not fit is refused."""

from __future__ import annotations

import pytest
import torch
from tests.unit.recipes import make_recipe, only_problem

from leaderless.algorithms import ChoiceInputs, LossInputs, PolicyLoss
from leaderless.algorithms.advantages import ADVANTAGES
from leaderless.algorithms.losses import POLICY_LOSSES
from leaderless.algorithms.losses.kl_cov import KlCovLoss
from leaderless.algorithms.policy_loss import compute
from leaderless.algorithms.settings import AlgorithmConfig, CorrectionConfig, KlConfig, refusals
from leaderless.config import RecipeError
from leaderless.planner.workflow import builtin_workflows, load_recipe, resolve_workflow
from leaderless.stages.mini_batches import correction_weights

LENGTHS = torch.tensor([40, 0, 1, 50, 30, 30, 40])
OTHERS = {
    "clip_low": 0.01,
    "clip_high": 0.01,
    "dual_clip": 1.01,
    "drift_coefficient": 0.7,
    "drift_clip": 0.01,
    "temperature_positive": 2.0,
    "temperature_negative": 2.0,
    "fraction": 0.8,
    "lowest": 1e-3,
    "highest": 0.2,
    "coefficient": 3.0,
    "divergence": "kl",
    "threshold": 0.01,
    "max_ratio": 1.0,
    "level": "token",
    "power_positive": 1.0,
    "rate_positive": 1.0,
    "power_negative": 1.0,
    "rate_negative": 1.0,
}
"""Another value of each setting of a loss."""


def losses_of(loss: PolicyLoss) -> torch.Tensor:
    """Values and gradients of a loss on some tokens."""
    generator = torch.Generator().manual_seed(1)
    total = int(LENGTHS.sum())
    old = torch.randn(total, generator=generator) - 2
    new = (old + 0.8 * torch.randn(total, generator=generator)).requires_grad_()
    gain = torch.randn(total, generator=generator) * 3
    is_chosen, columns = torch.zeros(total, dtype=torch.bool), dict.fromkeys(loss.reads, old)
    if loss.chooses_tokens:
        noise = torch.rand(total, generator=generator)
        is_chosen = loss.choose(ChoiceInputs(new.detach(), gain, noise, lambda values: values, columns))
    values = compute(loss, LossInputs(new, old, gain, LENGTHS, new > -torch.inf, is_chosen, columns, 1)).loss
    (gradient,) = torch.autograd.grad(values.sum(), new)
    return torch.cat([values.detach(), gradient])


CASES = [(kind, name) for kind, section in POLICY_LOSSES.items() for name in section.model_fields if name != "type"]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_every_setting_of_a_loss_changes_it(kind, name):
    section = POLICY_LOSSES[kind]
    base = {"fraction": 0.3, "lowest": 0.1} if kind == "clip_cov" else {"fraction": 0.3} if kind == "kl_cov" else {}
    other = OTHERS[name]
    assert not torch.equal(losses_of(section(**base)), losses_of(section(**base | {name: other})))


@pytest.mark.parametrize("num_tokens", [1, 100, 499, 1000])
def test_kl_cov_penalizes_at_least_one_token_at_its_default_share(num_tokens):
    noise = torch.Generator().manual_seed(1)
    columns = torch.randn(2, num_tokens, generator=noise)
    is_chosen = KlCovLoss().choose(ChoiceInputs(*columns, torch.rand(num_tokens), lambda values: values))
    assert int(is_chosen.sum()) == max(1, num_tokens // 500)


@pytest.mark.parametrize("changes", [{"level": "sequence"}, {"lowest": 0.95}, {"highest": 1.02}, {"type": "reject"}])
def test_every_setting_of_the_correction_changes_it(changes):
    old, rollout = torch.linspace(-3, -1, 191), torch.linspace(-2.9, -1.05, 191)
    base = {"type": "mask", "lowest": 0.92, "highest": 1.04}
    plain = correction_weights(CorrectionConfig(**base), old, rollout, LENGTHS)
    assert not torch.equal(plain, correction_weights(CorrectionConfig(**base | changes), old, rollout, LENGTHS))


REFUSED = [
    ({"policy_loss": {"type": "gspo"}, "aggregation": "token_mean"}, "algorithm.aggregation"),
    ({"policy_loss": {"type": "gmpo"}, "aggregation": "sequence_mean_token_sum"}, "algorithm.aggregation"),
    ({"policy_loss": {"type": "gmpo"}, "advantage": {"type": "gae"}}, "algorithm.policy_loss.type"),
    ({"policy_loss": {"type": "gmpo"}, "advantage": {"type": "reinforce_pp"}}, "algorithm.policy_loss.type"),
    ({"advantage": {"type": "pass_at_k"}, "kl": {"coefficient": 0.1, "place": "reward"}}, "algorithm.kl.place"),
    ({"advantage": {"type": "rejection"}, "kl": {"coefficient": 0.1, "place": "reward"}}, "algorithm.kl.place"),
    ({"advantage": {"type": "distillation"}, "kl": {"coefficient": 0.1, "place": "reward"}}, "algorithm.kl.place"),
    ({"advantage": {"type": "pass_at_k"}, "overlong": {"buffer_tokens": 4}}, "algorithm.overlong.buffer_tokens"),
    ({"advantage": {"type": "rejection"}, "overlong": {"buffer_tokens": 4}}, "algorithm.overlong.buffer_tokens"),
    ({"advantage": {"type": "distillation"}, "overlong": {"buffer_tokens": 4}}, "algorithm.overlong.buffer_tokens"),
    ({"kl": {"coefficient": 0.1, "place": "reward", "unbiased_gradient": True}}, "algorithm.kl.unbiased_gradient"),
    ({"kl": {"coefficient": 0.1, "place": "reward", "estimator": "k3"}}, "algorithm.kl.estimator=k3"),
    ({"kl": {"coefficient": 0.1, "place": "reward", "estimator": "absolute"}}, "algorithm.kl.estimator=absolute"),
    ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "algorithm.kl.estimator=k1"),
    ({"kl": {"coefficient": 0.1, "place": "reward"}, "proximal": "interpolated"}, "algorithm.proximal"),
    *(
        ({"policy_loss": {"type": kind}, **other}, key)
        for kind in ("dppo", "m2po", "topr", "vespo")
        for other, key in (
            ({"correction": {"type": "mask"}}, "algorithm.correction.type"),
            ({"proximal": "interpolated"}, "algorithm.proximal"),
        )
    ),
    ({"advantage": {"type": "maxrl"}, "kl": {"coefficient": 0.1, "place": "reward"}}, "algorithm.kl.place"),
    ({"advantage": {"type": "gae", "length_alpha": 0.05, "decay": 0.9}}, "algorithm.advantage.decay"),
    ({"kl": {"target": 0.1}}, "algorithm.kl.target"),
    ({"correction": {"lowest": 3.0}}, "algorithm.correction.lowest"),
    ({"policy_loss": {"type": "clip_cov", "lowest": 9.0}}, "algorithm.policy_loss.lowest"),
]


@pytest.mark.parametrize(("settings", "key"), REFUSED)
def test_what_does_not_go_together_is_refused_with_the_remedy(settings, key):
    with pytest.raises(ValueError, match=key.replace(".", r"\.")):
        AlgorithmConfig.model_validate(settings)


def test_the_estimator_that_holds_the_policy_is_the_default_in_either_place():
    for place, estimator in (("loss", "k3"), ("reward", "k1")):
        assert KlConfig.model_validate({"place": place}).estimator == estimator
    assert KlConfig.model_validate({"estimator": "k1", "coefficient": 1.0, "unbiased_gradient": True}).place == "loss"


@pytest.mark.parametrize("advantage", ADVANTAGES)
@pytest.mark.parametrize("loss", POLICY_LOSSES)
def test_all_other_combinations_are_accepted(advantage, loss):
    settings = {
        "advantage": {"type": advantage},
        "policy_loss": {"type": loss},
    }
    if loss == "gmpo" and ADVANTAGES[advantage].is_per_token:
        return
    assert refusals(AlgorithmConfig.model_validate(settings)) == []


def write(folder, text):
    path = folder / "recipe.yaml"
    rest = "name: r\nmodels: {policy: p}\ndata: {train: {path: rows.jsonl}}\nreward: {math: 1}\nsteps: 1\n"
    path.write_text(rest + text)
    return path


def test_a_workflow_brings_settings_that_the_recipe_may_change(tmp_path):
    algorithm = load_recipe(write(tmp_path, "workflow: gspo\n")).recipe.algorithm
    assert (algorithm.policy_loss.type, algorithm.policy_loss.clip_high) == ("gspo", 4e-4)
    text = "workflow: gspo\nalgorithm: {policy_loss: {clip_high: 0.5}}\n"
    algorithm = load_recipe(write(tmp_path, text)).recipe.algorithm
    assert (algorithm.policy_loss.type, algorithm.policy_loss.clip_low, algorithm.policy_loss.clip_high) == (
        "gspo",
        3e-4,
        0.5,
    )


def test_a_section_of_another_type_inherits_nothing(tmp_path):
    text = "workflow: dr_grpo\nalgorithm: {advantage: {type: rloo}}\n"
    assert load_recipe(write(tmp_path, text)).recipe.algorithm.advantage.model_dump() == {"type": "rloo"}


def test_an_error_in_a_typed_section_names_its_line_and_the_nearest_key(tmp_path):
    text = "workflow: grpo\nalgorithm:\n  policy_loss:\n    type: gspo\n    clip_hihg: 1\n"
    with pytest.raises(RecipeError) as caught:
        load_recipe(write(tmp_path, text))
    problem = only_problem(caught.value)
    assert problem.key == "algorithm.policy_loss.clip_hihg"
    assert problem.place.endswith("recipe.yaml:10")
    assert "did you mean 'clip_high'" in problem.message


def test_an_unknown_type_names_the_nearest(tmp_path):
    with pytest.raises(RecipeError, match=r"unknown type \(did you mean 'gspo'"):
        load_recipe(write(tmp_path, "workflow: grpo\nalgorithm: {policy_loss: {type: gsop}}\n"))


def test_every_built_in_workflow_has_settings_that_are_accepted():
    for name in builtin_workflows():
        AlgorithmConfig.model_validate(resolve_workflow(name).algorithm)


def test_default_settings_are_those_of_grpo():
    assert make_recipe().algorithm == AlgorithmConfig()
