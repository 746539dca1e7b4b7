"""pi0 as a policy: it flows as the model in transformers does, and what it draws has the scores that it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from tests.small_vla import write_small_pi0
from tests.unit.embodied.looking import ARM, check_rows_are_alone, check_scores, noise, observed

from leaderless.config import RecipeError
from leaderless.config.environment import PolicyConfig
from leaderless.embodied.policies.loading import make_model
from leaderless.embodied.policies.pi0 import Pi0, Pi0Value
from leaderless.embodied.policies.vision_towers import fitted
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_pi0(tmp_path_factory.mktemp("vla") / "pi0")


def policy_of(folder: Path, **options: str | int) -> Pi0:
    kind = PolicyConfig(type="pi0", options={"path": str(folder), "chunk": 3, **options})
    model = make_model(kind, "models.policy", ARM, is_critic=False)
    assert isinstance(model, Pi0)
    return model


@torch.no_grad()
def test_without_noise_it_acts_as_the_model_itself(folder: Path) -> None:
    policy = policy_of(folder)
    seen = observed(policy)
    ids, lengths = seen.instructions
    num_patches = 2 * 4
    input_ids = torch.cat([torch.full((3, num_patches), 299), ids], dim=1)
    mask = torch.cat(
        [torch.ones(3, num_patches, dtype=torch.int64), (torch.arange(ids.shape[1]) < lengths[:, None]).long()], dim=1
    )
    pixels = torch.stack([fitted(seen.images[camera], 28) * 2 - 1 for camera in ("top", "hand")], dim=1)
    expected = policy.pi0.sample_actions(
        state=torch.nn.functional.pad((seen.state - 0.1) / 2, (0, 3)),
        input_ids=input_ids,
        pixel_values=pixels,
        noise=torch.zeros(3, 4, 5),
        attention_mask=mask,
        pixel_attention_mask=torch.ones(3, 2, dtype=torch.bool),
        num_steps=4,
    )
    found = policy.act(seen, None).actions
    torch.testing.assert_close(found, expected[:, :3, :2] * 0.5 + 0.25, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["sde", "noise"])
def test_scores_are_the_log_probs_of_what_was_drawn(method: str, folder: Path) -> None:
    weights = {"pi0.action_out_proj.weight", "pi0.embed_action_time.state_proj.weight"}
    check_scores(policy_of(folder, method=method), weights, "vision_tower")


def test_rows_do_not_depend_on_one_another_or_on_padding(folder: Path) -> None:
    check_rows_are_alone(policy_of(folder))


def test_critics_begin_at_zero_and_learn(folder: Path) -> None:
    kind = PolicyConfig(type="pi0", options={"path": str(folder)})
    critic = make_model(kind, "models.critic", ARM, is_critic=True)
    assert isinstance(critic, Pi0Value)
    seen = observed(policy_of(folder))
    assert critic.values(seen).tolist() == [0.0, 0.0, 0.0]
    torch.nn.init.ones_(critic.head.weight)
    critic.values(seen).sum().backward()
    assert all(one.grad is not None for one in critic.parameters())


@pytest.mark.parametrize(
    ("change", "spaces", "message"),
    [
        ({"chunk": 5}, ARM, "the network plans 4 steps of 5 numbers"),
        ({"cameras": ["front"]}, ARM, "front"),
        ({"path": "/nothing"}, ARM, "no pi0 can be read"),
        ({}, Spaces(ARM.images, 2, ARM.actions, 10), "another robot: state_mean has 3 numbers, the environment 2"),
        ({}, Spaces(ARM.images, 3, Continuous((0.0,), (1.0,)), 10), "another robot: actions_mean has 2"),
        ({}, Spaces(ARM.images, 3, Discrete(3), 10), "use mlp or cnn"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], spaces: Spaces, message: str, folder: Path) -> None:
    options = {"path": str(folder), "chunk": 2, **change}
    with pytest.raises(RecipeError, match=message):
        make_model(PolicyConfig(type="pi0", options=options), "models.policy", spaces, is_critic=False)  # type: ignore[arg-type]


def test_checkpoints_without_statistics_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "pi0")
    file = tmp_path / "pi0/processor_config.json"
    about = json.loads(file.read_text())
    del about["actions_mean"]
    file.write_text(json.dumps(about))
    with pytest.raises(RecipeError, match="has no actions_mean and actions_std: add those"):
        policy_of(tmp_path / "pi0")


def test_images_are_fitted_whole() -> None:
    image = torch.full((1, 10, 20, 3), 255, dtype=torch.uint8)
    found = fitted(image, 28)
    assert found.shape == (1, 3, 28, 28)
    assert found[0, 0, 7:21].min().item() == pytest.approx(1.0)
    assert found[0, 0, :7].max().item() == found[0, 0, 21:].max().item() == 0.0


@pytest.mark.parametrize("method", ["sde", "noise"])
def test_it_acts_in_half_precision(method: str, folder: Path) -> None:
    policy = policy_of(folder, method=method).bfloat16()
    seen = observed(policy)
    acted = policy.act(seen, noise(policy, 3))
    assert policy.score(seen, acted.choices).log_probs.dtype == acted.log_probs.dtype == torch.float32
