"""GR00T as a policy, with a stand-in of its package: what is called, and what follows from its flow head."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tests.small_groot import HORIZON, NUMBERS, install, write_small_groot
from tests.unit.embodied.looking import ARM, check_rows_are_alone, check_scores, noise, observed
from torch import Tensor

from leaderless.config import RecipeError
from leaderless.config.environment import PolicyConfig
from leaderless.embodied.policies.groot_n15 import Groot, GrootValue
from leaderless.embodied.policies.loading import make_model
from leaderless.embodied.policies.observations import padded
from leaderless.embodied.policies.protocol import Observed

ROBOT: dict[str, object] = {"embodiment": "new_embodiment", "state": ["arm", "hand"], "action": ["arm", "hand"]}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(lambda name, module: monkeypatch.setitem(sys.modules, name, module))
    return write_small_groot(tmp_path / "groot")


def policy_of(folder: Path, **options: object) -> Groot:
    own = {"path": str(folder), "robot": ROBOT, "chunk": 3, **options}
    model = make_model(PolicyConfig(type="groot", options=own), "models.policy", ARM, is_critic=False)  # type: ignore[arg-type]
    assert isinstance(model, Groot)
    return model


@torch.no_grad()
def test_without_noise_it_acts_as_its_own_steps_do(folder: Path) -> None:
    policy = policy_of(folder, num_steps=4)
    seen = observed(policy)
    actions = policy.act(seen, None).actions
    for row in range(3):  # each alone, as its own steps do not hide what is padded
        one = seen.select(torch.tensor([row]))
        _, given, state = policy._seen(one)
        assert state[0, 0] == pytest.approx(float(one.state[0, 0]) / 2)
        assert state[0, 2] == pytest.approx(2 * float(one.state[0, 2]) - 1)
        # `process_backbone_output` is applied once, here by the head's own steps.
        inputs = policy.groot.prepare_input({**given, **_eagle(policy, one)})
        features = policy.groot.backbone(inputs[0])
        expected = policy.groot.action_head.get_action(features, given, torch.zeros(1, HORIZON, NUMBERS))
        wanted = torch.stack([expected[0, :3, 0], expected[0, :3, 1] + 1], dim=1)  # arm -1 to 1, hand 0 to 2
        torch.testing.assert_close(actions[row], wanted, rtol=0, atol=1e-5)


def _eagle(policy: Groot, seen: Observed) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    prepare = policy.groot.prepare_input
    policy.groot.prepare_input = lambda given: inputs.update(given) or prepare(given)
    policy._seen(seen)
    policy.groot.prepare_input = prepare
    return {name: one for name, one in inputs.items() if name.startswith("eagle_")}


@pytest.mark.parametrize("method", ["sde", "noise"])
@pytest.mark.parametrize("num_steps", [3, 7])
def test_scores_are_the_log_probs_of_what_was_drawn(method: str, num_steps: int, folder: Path) -> None:
    policy = policy_of(folder, method=method, num_steps=num_steps)
    check_scores(policy, {"groot.action_head.action_decoder.W"}, "backbone.sight")


def test_rows_do_not_depend_on_one_another(folder: Path) -> None:
    check_rows_are_alone(policy_of(folder))


def test_padding_is_hidden_where_as_much_was_seen_as_is_computed(folder: Path) -> None:
    """Attention among the actions, and to what was seen, then has the same length."""
    policy = policy_of(folder)
    seen, drawn = observed(policy), noise(policy)
    text = "abcdef"  # with one place for images as long as the state, two more places and the actions
    assert 1 + len(text) == 1 + 2 + HORIZON
    words = padded([policy.instruction_ids(one) for one in (text, "ab", text)], torch.device("cpu"))
    seen = Observed(seen.images, seen.state, words)
    whole = policy.act(seen, drawn)
    alone = policy.act(seen.select(torch.tensor([1])), drawn[1:2])
    torch.testing.assert_close(alone.choices[0], whole.choices[1], rtol=0, atol=1e-5)


def test_critics_begin_at_zero_and_learn(folder: Path) -> None:
    options = {"path": str(folder), "robot": ROBOT, "chunk": 3, "per_step": True}
    kind = PolicyConfig(type="groot", options=options)  # type: ignore[arg-type]
    critic = make_model(kind, "models.critic", ARM, is_critic=True)
    assert isinstance(critic, GrootValue)
    seen = observed(policy_of(folder))
    assert critic.values(seen).tolist() == [[0.0] * 3] * 3
    torch.nn.init.ones_(critic.head.weight)
    critic.values(seen).sum().backward()
    assert critic.groot.backbone.sight.weight.grad is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"robot": {**ROBOT, "embodiment": "gr1"}}, "the checkpoint knows new_embodiment"),
        ({"robot": {**ROBOT, "state": ["arm", "leg"]}}, "there is no part 'leg'; the checkpoint has arm, hand"),
        ({"robot": {"embodiment": "gr1"}}, "lacks action, state"),
        ({"robot": {**ROBOT, "state": ["arm"]}}, "have 2 numbers, but the environment has 3"),
        ({"chunk": 5}, "the network plans 4 steps of 5 numbers"),
        ({"path": "/nothing"}, "give the folder of a GR00T N1.5"),
        ({"cameras": ["front"]}, "front"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        policy_of(folder, **change)


def test_a_missing_package_is_named_with_its_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "gr00t"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(RecipeError, match="install NVIDIA/Isaac-GR00T"):
        policy_of(folder)
