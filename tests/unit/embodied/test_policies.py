"""Policies of bodies: what `act` draws, `score` finds again; rows are independent; nothing depends on earlier draws."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.environment import PolicyConfig
from leaderless.config.models import ModelConfig
from leaderless.embodied.policies.loading import empty_model, make_model, open_model
from leaderless.embodied.policies.observations import images_of, padded
from leaderless.embodied.policies.protocol import BodyPolicy, BodyValue, Observed
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces
from leaderless.embodied.simulators.tabletop import TableTask

ARM = Spaces({}, 4, Continuous((-1.0, -2.0), (1.0, 2.0)), 10)
BUTTONS = Spaces({}, 4, Discrete(3), 10)
TABLE = TableTask(1).spaces
CASES: Mapping[str, tuple[PolicyConfig, Spaces]] = {
    "mlp": (PolicyConfig(type="mlp", options={"chunk": 2}), ARM),
    "mlp-discrete": (PolicyConfig(type="mlp", options={"chunk": 2}), BUTTONS),
    "film": (PolicyConfig(type="film", options={"chunk": 3}), TABLE),
    "cnn": (PolicyConfig(type="cnn", options={"chunk": 2}), TABLE),
    "flow": (PolicyConfig(type="flow", options={"chunk": 2, "hidden_size": 32}), ARM),
    "flow-sees": (PolicyConfig(type="flow", options={"chunk": 2, "hidden_size": 32}), TABLE),
    "flow-noise": (PolicyConfig(type="flow", options={"chunk": 2, "hidden_size": 32, "method": "noise"}), ARM),
}


def policy_of(name: str) -> BodyPolicy:
    model = make_model(*CASES[name][:1], "models.policy", CASES[name][1], is_critic=False)
    assert isinstance(model, BodyPolicy)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # away from the even distribution that some begin with
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.requires_grad_(True)


def observed(spaces: Spaces, num: int, seed: int = 0) -> Observed:
    rng = np.random.default_rng(seed)
    num_bytes = sum(height * width * 3 for height, width in spaces.images.values())
    pixels = torch.from_numpy(rng.integers(0, 256, (num, num_bytes), dtype=np.uint8))
    state = torch.from_numpy(rng.normal(size=(num, spaces.state_size)).astype(np.float32))
    words = [list(rng.integers(97, 122, rng.integers(1, 20))) for _ in range(num)]
    return Observed(images_of(pixels, spaces), state, padded(words, torch.device("cpu")))


def noise(policy: BodyPolicy, num: int, seed: int = 0) -> Tensor:
    return torch.rand(num, policy.noise_size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_are_the_log_probs_of_what_was_drawn(name: str, temperature: float) -> None:
    policy, spaces = policy_of(name), CASES[name][1]
    seen = observed(spaces, 16)
    acted = policy.act(seen, noise(policy, 16), temperature)
    scores = policy.score(seen, acted.choices, temperature)
    assert (
        acted.log_probs.shape
        == scores.log_probs.shape
        == scores.entropies.shape
        == (16, policy.chunk, policy.score_dim)
    )
    torch.testing.assert_close(acted.log_probs, scores.log_probs, rtol=0, atol=1e-6)
    torch.testing.assert_close(policy.actions_of(acted.choices), acted.actions)
    scores.log_probs.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in policy.parameters())


@pytest.mark.parametrize("name", CASES)
def test_rows_do_not_depend_on_one_another_or_on_padding(name: str) -> None:
    policy, spaces = policy_of(name), CASES[name][1]
    seen, drawn = observed(spaces, 8), noise(policy, 8)
    whole = policy.act(seen, drawn)
    ids, lengths = seen.instructions
    wide = Observed(seen.images, seen.state, (torch.nn.functional.pad(ids, (0, 7)), lengths))
    torch.testing.assert_close(policy.act(wide, drawn).log_probs, whole.log_probs)
    for row in range(8):
        alone = policy.act(seen.select(torch.tensor([row])), drawn[row : row + 1])
        torch.testing.assert_close(alone.choices[0], whole.choices[row])
        torch.testing.assert_close(alone.log_probs[0], whole.log_probs[row])


@pytest.mark.parametrize("name", CASES)
def test_what_is_drawn_has_the_distribution_that_is_scored(name: str) -> None:
    policy, spaces = policy_of(name), CASES[name][1]
    num = 1_000 if spaces.images else 20_000
    many = observed(spaces, 1).select(torch.zeros(num, dtype=torch.int64))
    acted = policy.act(many, noise(policy, num))
    # The mean of -log p over what was drawn is the entropy.
    with torch.no_grad():
        scores = policy.score(many, acted.choices)
    found, expected = -acted.log_probs.mean(0), scores.entropies.mean(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=5 / num**0.5)
    if name == "mlp":
        mean, deviation = acted.choices.view(num, 2, 2).mean(0), acted.choices.view(num, 2, 2).std(0)
        likeliest = policy.act(observed(spaces, 1), None).choices.view(2, 2)
        torch.testing.assert_close(mean, likeliest, rtol=0, atol=0.05)
        torch.testing.assert_close(deviation, policy.log_deviation.exp(), rtol=0, atol=0.03)  # type: ignore[union-attr,operator]


def test_log_densities_are_those_of_torch() -> None:
    policy = policy_of("mlp")
    seen = observed(ARM, 5)
    acted = policy.act(seen, noise(policy, 5))
    mean = policy.act(seen, None).choices.view(5, 2, 2)
    normal = torch.distributions.Normal(mean, policy.log_deviation.exp())  # type: ignore[union-attr,operator]
    torch.testing.assert_close(acted.log_probs, normal.log_prob(acted.choices.view(5, 2, 2)))
    assert bool((acted.actions[..., 0].abs() <= 1).all())
    assert bool((acted.actions[..., 1].abs() <= 2).all())


def test_actions_of_demonstrations_become_the_nearest_choices() -> None:
    film, mlp = policy_of("film"), policy_of("mlp")
    actions = torch.tensor([[[-1.0, 1.0], [0.06, -0.26], [0.0, 0.7]]])
    expected = torch.tensor([[[-1.0, 1.0], [0.0, -0.25], [0.0, 0.75]]])
    torch.testing.assert_close(film.actions_of(film.choices_of(actions)), expected)
    torch.testing.assert_close(mlp.actions_of(mlp.choices_of(actions[:, :2])), actions[:, :2])
    with pytest.raises(ValueError, match=r"has 1\.5 as its number 0, which must be from -1\.0 to 1\.0"):
        film.choices_of(torch.tensor([[[1.5, 0.0]] * 3]))
    with pytest.raises(ValueError, match="another body"):
        mlp.choices_of(torch.tensor([[[0.0, float("nan")]] * 2]))


@pytest.mark.parametrize("kind", ["cnn", "film", "flow", "mlp"])
def test_new_models_are_the_same_whatever_was_drawn_before(kind: str) -> None:
    spaces = TABLE if kind in {"cnn", "film"} else ARM
    for is_critic in (False, True):
        one = make_model(PolicyConfig(type=kind), "models.policy", spaces, is_critic=is_critic)
        torch.rand(3)
        other = make_model(PolicyConfig(type=kind), "models.policy", spaces, is_critic=is_critic)
        for name, parameter in one.named_parameters():
            assert torch.equal(parameter, dict(other.named_parameters())[name])
        if isinstance(one, BodyValue):
            assert one.values(observed(spaces, 3)).shape == (3,)


def save(folder, model, opened) -> None:  # type: ignore[no-untyped-def]
    from safetensors.torch import save_file

    folder.mkdir()
    opened.describe(folder)
    save_file({name: one.detach() for name, one in model.named_parameters()}, folder / "model.safetensors")


def test_a_saved_policy_is_read_back_and_refused_for_another_body(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = ModelConfig(body=PolicyConfig(type="mlp", options={"hidden_size": 8}))
    opened = open_model(config, "models.policy", ARM, is_critic=False)
    model = opened.model
    model.layers[0].weight.data += 1.0  # type: ignore[index,union-attr,operator]
    save(tmp_path / "saved", model, opened)
    again = open_model(ModelConfig(path=str(tmp_path / "saved")), "models.policy", ARM, is_critic=False).model
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, dict(model.named_parameters())[name])
    assert dict(empty_model(tmp_path / "saved").named_parameters()).keys() == dict(model.named_parameters()).keys()
    critic = open_model(ModelConfig(path=str(tmp_path / "saved")), "models.critic", ARM, is_critic=True).model
    assert isinstance(critic, BodyValue)
    with pytest.raises(RecipeError, match=r"its actions is \{'low': \[-1\.0, -2\.0\].*another body|for another body"):
        open_model(ModelConfig(path=str(tmp_path / "saved")), "models.policy", BUTTONS, is_critic=False)
    with pytest.raises(RecipeError, match="cannot be read"):
        open_model(ModelConfig(path=str(tmp_path / "nothing")), "models.policy", ARM, is_critic=False)
    (tmp_path / "saved/model.safetensors").unlink()
    with pytest.raises(RecipeError, match="lacks the weight"):
        open_model(ModelConfig(path=str(tmp_path / "saved")), "models.policy", ARM, is_critic=False)


@pytest.mark.parametrize(
    ("kind", "options", "spaces", "message"),
    [
        ("flim", {}, TABLE, "unknown policy 'flim' .did you mean 'film'"),
        ("film", {"chunks": 2}, TABLE, "does not take them"),
        ("film", {}, ARM, "it needs images"),
        ("cnn", {}, ARM, "it needs images"),
        ("cnn", {}, Spaces({"top": (28, 4)}, 0, Discrete(2), 3), "8 by 8"),
        ("flow", {}, BUTTONS, "use mlp"),
        ("flow", {"method": "ode"}, ARM, "must be sde or noise"),
        ("flow", {"num_steps": 1}, ARM, "must be at least 2"),
        ("mlp", {}, Spaces({"top": (4, 4)}, 0, Discrete(2), 3), "must be at least 1"),
        ("film", {"num_bins": 1}, TABLE, "at least two"),
        ("tests.small_worlds:Line", {}, TABLE, "derived from"),
    ],
)
def test_models_that_cannot_be_made_are_refused(
    kind: str, options: Mapping[str, int], spaces: Spaces, message: str
) -> None:
    with pytest.raises(RecipeError, match=message):
        make_model(PolicyConfig(type=kind, options=dict(options)), "models.policy", spaces, is_critic=False)


def test_a_critic_begins_with_the_folder_of_a_policy_and_leaves_out_what_only_policies_have(tmp_path) -> None:  # type: ignore[no-untyped-def]
    config = ModelConfig(body=PolicyConfig(type="film", options={"num_bins": 5, "channels": 8}))
    opened = open_model(config, "models.policy", TABLE, is_critic=False)
    save(tmp_path / "saved", opened.model, opened)
    critic = open_model(ModelConfig(path=str(tmp_path / "saved")), "models.critic", TABLE, is_critic=True)
    assert dict(critic.model.named_parameters())["seer.cameras.top.look.weight"].shape[0] == 8
    save(tmp_path / "critic", critic.model, critic)
    again = open_model(ModelConfig(path=str(tmp_path / "critic")), "models.critic", TABLE, is_critic=True)
    assert isinstance(again.model, BodyValue)


@pytest.mark.parametrize("name", CASES)
def test_policies_act_in_half_precision(name: str) -> None:
    policy, spaces = policy_of(name).bfloat16(), CASES[name][1]
    seen = observed(spaces, 4)
    acted = policy.act(seen, noise(policy, 4))
    scores = policy.score(seen, acted.choices)
    assert acted.log_probs.dtype == scores.log_probs.dtype == scores.entropies.dtype == torch.float32
    torch.testing.assert_close(acted.log_probs, scores.log_probs, rtol=0, atol=0.2)
    kind = CASES[name][0].type
    critic = make_model(PolicyConfig(type=kind), "models.critic", spaces, is_critic=True)
    assert isinstance(critic, BodyValue)
    assert critic.bfloat16().values(seen).dtype == torch.float32
