"""Saved policies that began with a checkpoint: their folder is enough, also where the checkpoint is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.small_vla import write_small_pi0, write_small_pi05, write_small_vla

from leaderless.config import RecipeError
from leaderless.config.environment import PolicyConfig
from leaderless.config.models import ModelConfig
from leaderless.embodied.policies.loading import empty_model, open_model
from leaderless.embodied.policies.observations import padded
from leaderless.embodied.policies.protocol import BodyPolicy, BodyValue, Observed
from leaderless.embodied.simulators.protocol import Continuous, Spaces

ARM = Spaces({"top": (28, 28), "hand": (20, 30)}, 3, Continuous((-9.0, -9.0), (9.0, 9.0)), 10, has_instructions=True)
KINDS = {
    "openvla": (write_small_vla, {"statistics": "small_arm"}),
    "openvla_oft": (write_small_vla, {"statistics": "small_arm", "chunk": 3}),
    "pi0": (write_small_pi0, {"chunk": 3}),
    "pi05": (write_small_pi05, {"chunk": 3, "pads_state": False}),
}


def opened(config: ModelConfig, folder: Path, *, is_critic: bool = False) -> BodyPolicy | BodyValue:
    """Open a model, change its weights, and save it."""
    found = open_model(config, "models.policy", ARM, is_critic=is_critic)
    folder.mkdir()
    found.describe(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in found.model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape))
    save_file({name: one.detach() for name, one in found.model.named_parameters()}, folder / "model.safetensors")
    return found.model


def acted(policy: BodyPolicy) -> torch.Tensor:
    rng = np.random.default_rng(0)
    images = {
        camera: torch.from_numpy(rng.integers(0, 256, (2, *size, 3), dtype=np.uint8))
        for camera, size in ARM.images.items()
    }
    ids = [policy.instruction_ids(text) for text in ("reach the red block", "push it")]
    seen = Observed(images, torch.ones(2, 3), padded(ids, torch.device("cpu")))
    with torch.no_grad():
        return policy.act(seen, None).choices


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_folder_is_enough(kind: str, tmp_path: Path) -> None:
    write, options = KINDS[kind]
    checkpoint = write(tmp_path / "checkpoint")
    of = PolicyConfig(type=kind, options={"path": str(checkpoint), **options})  # type: ignore[dict-item]
    policy = opened(ModelConfig(body=of), tmp_path / "saved")
    assert isinstance(policy, BodyPolicy)
    expected = acted(policy)
    shutil.rmtree(checkpoint)
    (tmp_path / "saved").rename(tmp_path / "moved")
    assert not list((tmp_path / "moved/base").glob("model*.safetensors"))
    config = ModelConfig(path=str(tmp_path / "moved"))
    again = open_model(config, "models.policy", ARM, is_critic=False)
    assert isinstance(again.model, BodyPolicy)
    assert torch.equal(acted(again.model), expected)
    shapes = {name: one.shape for name, one in policy.named_parameters()}
    assert {name: one.shape for name, one in empty_model(tmp_path / "moved").named_parameters()} == shapes
    (tmp_path / "twice").mkdir()
    again.describe(tmp_path / "twice")
    kept = [sorted(path.name for path in (tmp_path / at / "base").iterdir()) for at in ("moved", "twice")]
    assert kept[0] == kept[1]
    assert str(tmp_path) not in (tmp_path / "twice/config.json").read_text()


@pytest.mark.parametrize("kind", KINDS)
def test_a_critic_begins_with_the_weights_of_a_saved_policy(kind: str, tmp_path: Path) -> None:
    write, options = KINDS[kind]
    checkpoint = write(tmp_path / "checkpoint")
    of = PolicyConfig(type=kind, options={"path": str(checkpoint), **options})  # type: ignore[dict-item]
    policy = opened(ModelConfig(body=of), tmp_path / "policy")
    shutil.rmtree(checkpoint)
    begun = open_model(ModelConfig(path=str(tmp_path / "policy")), "models.critic", ARM, is_critic=True).model
    assert isinstance(begun, BodyValue)
    theirs, num_new = dict(policy.named_parameters()), 0
    for name, one in begun.named_parameters():
        known = begun.name_in_policy(name)
        num_new += known is None
        assert torch.equal(one, torch.zeros_like(one) if known is None else theirs[known])
    assert num_new == 2, "the head alone is new"
    critic = opened(ModelConfig(path=str(tmp_path / "policy")), tmp_path / "critic", is_critic=True)
    again = open_model(ModelConfig(path=str(tmp_path / "critic")), "models.critic", ARM, is_critic=True).model
    assert all(torch.equal(*pair) for pair in zip(critic.parameters(), again.parameters(), strict=True))
    with pytest.raises(RecipeError, match="is a critic, which does not act: give the folder of a policy"):
        open_model(ModelConfig(path=str(tmp_path / "critic")), "models.policy", ARM, is_critic=False)
