"""OpenVLA and OpenVLA-OFT: names and shapes of published checkpoints, features as in transformers, what they decide."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.small_vla import write_small_vla
from torch import Tensor, nn
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, SiglipVisionConfig, SiglipVisionModel

from leaderless.config import RecipeError
from leaderless.config.environment import PolicyConfig
from leaderless.embodied.policies.actions import ActionLimits
from leaderless.embodied.policies.loading import make_model
from leaderless.embodied.policies.observations import padded
from leaderless.embodied.policies.openvla import NUM_BINS, OpenVla, OpenVlaOft, TokenBins
from leaderless.embodied.policies.prismatic import Prismatic, VlaConfig
from leaderless.embodied.policies.protocol import BodyPolicy, BodyValue, Observed
from leaderless.embodied.policies.vision_towers import TOWERS, Tower, sized
from leaderless.embodied.simulators.protocol import Continuous, Spaces

ARM = Spaces({"top": (28, 28), "hand": (20, 30)}, 3, Continuous((-1.0, 0.0), (1.0, 1.0)), 10, has_instructions=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_vla(tmp_path_factory.mktemp("vla") / "small")


def policy_of(kind: str, folder: Path, **options: object) -> BodyPolicy:
    sizes = {"chunk": 3} if kind == "openvla_oft" else {}
    config = PolicyConfig(type=kind, options={"path": str(folder), "statistics": "small_arm", **sizes, **options})  # type: ignore[dict-item]
    model = make_model(config, "models.policy", ARM, is_critic=False)
    assert isinstance(model, BodyPolicy)
    return model


def observed(policy: BodyPolicy, num: int) -> Observed:
    rng = np.random.default_rng(0)
    images = {
        camera: torch.from_numpy(rng.integers(0, 256, (num, *size, 3), dtype=np.uint8))
        for camera, size in ARM.images.items()
    }
    texts = ["reach the red block", "push it", "Open", "lift the lid"]
    ids = [policy.instruction_ids(texts[row % len(texts)]) for row in range(num)]
    return Observed(images, torch.zeros(num, 3), padded(ids, torch.device("cpu")))


def noise(policy: BodyPolicy, num: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(num, policy.noise_size, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_scores_are_the_log_probs_of_what_was_drawn(kind: str, folder: Path) -> None:
    policy = policy_of(kind, folder)
    seen = observed(policy, 4)
    acted = policy.act(seen, noise(policy, 4), 1.6)
    scores = policy.score(seen, acted.choices, 1.6)
    assert acted.actions.shape == (4, policy.chunk, 2)
    assert acted.log_probs.shape == scores.entropies.shape == (4, policy.chunk, 2)
    torch.testing.assert_close(acted.log_probs, scores.log_probs, rtol=0, atol=2e-6)
    assert scores.entropies.min().item() > 0
    scores.log_probs.sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.isfinite().all()), name
    torch.testing.assert_close(
        policy.score(seen, policy.act(seen, None).choices).log_probs, policy.act(seen, None).log_probs
    )


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_rows_do_not_depend_on_one_another_or_on_padding(kind: str, folder: Path) -> None:
    policy = policy_of(kind, folder)
    seen, drawn = observed(policy, 4), noise(policy, 4)
    whole = policy.act(seen, drawn)
    assert len({*seen.instructions[1].tolist()}) > 1
    for row in range(4):
        length = int(seen.instructions[1][row])
        one = seen.select(torch.tensor([row]))
        alone = Observed(one.images, one.state, (one.instructions[0][:, :length], one.instructions[1]))
        acted = policy.act(alone, drawn[row : row + 1])
        assert torch.equal(acted.choices[0], whole.choices[row])
        torch.testing.assert_close(acted.log_probs[0], whole.log_probs[row], rtol=0, atol=2e-6)


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_it_depends_on_images_and_instructions(kind: str, folder: Path) -> None:
    policy = policy_of(kind, folder)
    seen, choices = observed(policy, 1), torch.zeros(1, policy.choice_size)
    base = policy.score(seen, choices).log_probs
    for camera in ARM.images:
        other = Observed({**seen.images, camera: 255 - seen.images[camera]}, seen.state, seen.instructions)
        assert not torch.allclose(policy.score(other, choices).log_probs, base)
    ids, lengths = seen.instructions
    other = Observed(seen.images, seen.state, (ids.flip(1), lengths))
    assert not torch.allclose(policy.score(other, choices).log_probs, base)


def test_numbers_follow_one_another_or_see_one_another(folder: Path) -> None:
    written, at_once = policy_of("openvla", folder), policy_of("openvla_oft", folder)
    seen = observed(written, 1)
    first, other = torch.tensor([[3.0, 9.0]]), torch.tensor([[200.0, 9.0]])
    one, two = written.score(seen, first).entropies, written.score(seen, other).entropies
    torch.testing.assert_close(one[..., 0], two[..., 0])
    assert not torch.allclose(one[..., 1], two[..., 1])
    # All numbers of a chunk are decided at once: their distributions do not depend on what is chosen.
    choices = torch.randint(256, (2, 6)).float()
    many = seen.select(torch.zeros(2, dtype=torch.int64))
    entropies = at_once.score(many, choices).entropies
    torch.testing.assert_close(entropies[0], entropies[1])


def test_bins_are_those_of_the_tokens() -> None:
    spaces = Spaces({}, 0, Continuous((-1.0,), (1.0,)), 1)
    bins = TokenBins(ActionLimits.of_environment(spaces))
    values = torch.tensor([-1.0, -0.9999, 0.0, 0.999, 1.0]).view(-1, 1, 1)
    borders = np.linspace(-1, 1, 256)
    expected = np.digitize(values.numpy().ravel(), borders) - 1
    choices = bins.choices_of(values)
    assert choices.ravel().tolist() == expected.tolist()
    middles = (borders[1:] + borders[:-1]) / 2
    found = bins.actions_of(choices, 1).ravel().numpy()
    np.testing.assert_allclose(found, middles[np.clip(expected, 0, 254)], atol=1e-6)


def test_the_first_bin_is_the_last_word(folder: Path) -> None:
    policy = policy_of("openvla_oft", folder)
    assert isinstance(policy, OpenVlaOft)
    lm_head = policy.vla.language_model.lm_head
    hidden = torch.randn(1, 32)
    logits = policy.vla.logits(hidden, policy.config.num_words, NUM_BINS)
    words = lm_head(hidden)
    assert policy.config.num_words == 400
    torch.testing.assert_close(logits[0, 0], words[0, 399])
    torch.testing.assert_close(logits[0, 255], words[0, 144])


def test_statistics_scale_what_the_mask_says(folder: Path) -> None:
    policy = policy_of("openvla_oft", folder)
    actions = policy.actions_of(torch.tensor([[0.0, 0.0, 254.0, 254.0, 127.0, 200.0]]))
    half = 1 / 255
    expected = [[-0.5 + half * 0.625, 0.0], [0.75 - half * 0.625, 1.0 - half], [0.125, 200.5 * 2 / 255 - 1]]
    torch.testing.assert_close(actions[0], torch.tensor(expected), rtol=0, atol=1e-5)
    again = policy.choices_of(actions)
    assert again[0, [0, 2, 3, 4, 5]].tolist() == [0, 254, 254, 127, 200]


GRIP = Spaces(ARM.images, 3, Continuous((-1.0, -1.0), (1.0, 1.0)), 10, has_instructions=True)


def gripper_policy(kind: str, folder: Path, gripper: str, spaces: Spaces = GRIP) -> BodyPolicy:
    options = {"path": str(folder), "statistics": "small_arm", "gripper": gripper}
    model = make_model(PolicyConfig(type=kind, options=options), "models.policy", spaces, is_critic=False)  # type: ignore[arg-type]
    assert isinstance(model, BodyPolicy)
    return model


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_an_inverted_gripper_closes_at_1_and_opens_at_minus_1(kind: str, folder: Path) -> None:
    policy = gripper_policy(kind, folder, "inverted")
    # Middle of bin b: (2 b + 1) / 255 - 1. That of 127 is 0, closed; 190: 0.494; 191: 0.502, the bin of 0.5; 254: 1.
    gripper = {0: 1.0, 127: 1.0, 190: 1.0, 191: -1.0, 254: -1.0, 255: -1.0}
    choices = torch.zeros(len(gripper), policy.choice_size)
    choices[:, 1] = torch.tensor(list(gripper), dtype=torch.float32)
    actions = policy.actions_of(choices)
    assert actions[:, 0, 1].tolist() == list(gripper.values())
    assert not (actions[:, 0, 1] == 0).any()
    unchanged = gripper_policy(kind, folder, "unchanged").actions_of(choices)
    torch.testing.assert_close(unchanged[:, 0, 1], (2 * choices[:, 1].clamp(max=254) + 1) / 255 - 1)
    assert torch.equal(actions[..., 0], unchanged[..., 0])


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_demonstrations_of_an_inverted_gripper_have_the_bins_of_its_data(kind: str, folder: Path) -> None:
    policy = gripper_policy(kind, folder, "inverted")
    actions = torch.full((2, policy.chunk, 2), 0.125)
    actions[:, :, 1] = torch.tensor([-1.0, 1.0])[:, None]
    choices = policy.choices_of(actions).view(2, policy.chunk, 2)
    # Open is 1, the last border; closed is 0, in the middle of bin 127.
    assert choices[:, :, 1].tolist() == [[255.0] * policy.chunk, [127.0] * policy.chunk]
    assert torch.equal(policy.actions_of(choices.flatten(1))[..., 1], actions[..., 1])


def test_an_inverted_gripper_changes_no_likelihood(folder: Path) -> None:
    one, other = (gripper_policy("openvla_oft", folder, gripper) for gripper in ("inverted", "unchanged"))
    seen, drawn = observed(one, 3), noise(one, 3)
    acted, plain = one.act(seen, drawn), other.act(seen, drawn)
    assert torch.equal(acted.choices, plain.choices)
    assert torch.equal(acted.log_probs, plain.log_probs)
    assert set(acted.actions[..., 1].flatten().tolist()) <= {-1.0, 1.0}


@pytest.mark.parametrize(
    ("gripper", "spaces", "mask", "message"),
    [
        ("reversed", GRIP, [True, False], "gripper='reversed': must be unchanged or inverted"),
        ("inverted", ARM, [True, False], "takes its number 1 from 0 to 1"),
        ("inverted", GRIP, [True, True], "none is known to be a gripper"),
    ],
)
def test_a_gripper_that_cannot_be_inverted_is_refused(
    gripper: str, spaces: Spaces, mask: list[bool], message: str
) -> None:
    statistics = {"arm": {"action": {"q01": [-0.5, 0.0], "q99": [0.5, 1.0], "mask": mask}}}
    with pytest.raises(ValueError, match=message):
        ActionLimits.of_dataset(statistics, "arm", spaces, gripper)  # type: ignore[arg-type]


def test_the_prompt_is_that_of_training(folder: Path) -> None:
    policy = policy_of("openvla", folder)
    assert isinstance(policy, OpenVla)
    ids = policy.instruction_ids("Push It")
    assert ids[0] == 1
    assert ids[-1] == 3
    text = policy._tokenizer.decode(ids[1:-1])  # type: ignore[attr-defined]
    assert text == "In: What action should the robot take to push it?\nOut:"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"statistics": "small_amr"}, "did you mean 'small_arm'"),
        ({"statistics": "other_arm"}, "another robot: its actions have 1 numbers, those of the environment 2"),
        ({"cameras": ["front"]}, "front"),
        ({"cameras": []}, "sees by cameras"),
        ({"crop_share": 0}, "above 0"),
        ({"path": "/nothing"}, "cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, object], message: str, folder: Path) -> None:
    options = {"path": str(folder), "statistics": "small_arm", **change}
    with pytest.raises(RecipeError, match=message):
        make_model(PolicyConfig(type="openvla", options=options), "models.policy", ARM, is_critic=False)  # type: ignore[arg-type]


def test_damaged_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "small")
    file = tmp_path / "small/model-00001-of-00002.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("q_proj.weight"))
    save_file({**weights, name: torch.zeros(3, 3)}, file)
    with pytest.raises(RecipeError, match=r"has the shape \(3, 3\), but its config.json says \(32, 32\)"):
        policy_of("openvla", tmp_path / "small")
    save_file({**weights, "adapter": torch.zeros(1)}, file)
    with pytest.raises(RecipeError, match="a weight 'adapter' that OpenVLA does not have"):
        policy_of("openvla", tmp_path / "small")
    del weights[name]
    save_file(weights, file)
    with pytest.raises(RecipeError, match=f"lacks 1 weights, such as '{name}'"):
        policy_of("openvla", tmp_path / "small")


def test_critics_begin_at_zero_and_learn_from_all(folder: Path) -> None:
    config = PolicyConfig(type="openvla_oft", options={"path": str(folder)})
    critic = make_model(config, "models.critic", ARM, is_critic=True)
    assert isinstance(critic, BodyValue)
    seen = observed(policy_of("openvla", folder), 3)
    assert critic.values(seen).tolist() == [0.0, 0.0, 0.0]
    nn.init.ones_(critic.head.weight)  # type: ignore[arg-type]
    critic.values(seen).sum().backward()
    assert all(p.grad is not None for n, p in critic.named_parameters() if "lm_head" not in n)


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of openvla/openvla-7b, as its index of weights and its architecture say."""
    shapes: dict[str, tuple[int, ...]] = {}
    for tower, width, mlp, depth, has_scales in (
        ("featurizer", 1024, 4096, 24, True),
        ("fused_featurizer", 1152, 4304, 27, False),
    ):
        at = f"vision_backbone.{tower}"
        shapes[f"{at}.patch_embed.proj.weight"] = (width, 3, 14, 14)
        shapes[f"{at}.patch_embed.proj.bias"] = (width,)
        shapes[f"{at}.pos_embed"] = (1, 256, width)
        if has_scales:
            shapes[f"{at}.cls_token"], shapes[f"{at}.reg_token"] = (1, 1, width), (1, 4, width)
        for block in range(depth - 1):
            for layer, size in {
                "norm1": (width,),
                "norm2": (width,),
                "attn.qkv": (3 * width, width),
                "attn.proj": (width, width),
                "mlp.fc1": (mlp, width),
                "mlp.fc2": (width, mlp),
            }.items():
                shapes[f"{at}.blocks.{block}.{layer}.weight"] = size
                shapes[f"{at}.blocks.{block}.{layer}.bias"] = size[:1]
            for scale in ("ls1", "ls2") if has_scales else ():
                shapes[f"{at}.blocks.{block}.{scale}.scale_factor"] = (width,)
    for layer, size in {"fc1": (8704, 2176), "fc2": (4096, 8704), "fc3": (4096, 4096)}.items():
        shapes[f"projector.{layer}.weight"], shapes[f"projector.{layer}.bias"] = size, size[:1]
    llama = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (4096, 4096),
        "self_attn.v_proj": (4096, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (11008, 4096),
        "mlp.up_proj": (11008, 4096),
        "mlp.down_proj": (4096, 11008),
        "input_layernorm": (4096,),
        "post_attention_layernorm": (4096,),
    }
    at = "language_model.model"
    for number in range(32):
        shapes |= {f"{at}.layers.{number}.{layer}.weight": size for layer, size in llama.items()}
    shapes |= {f"{at}.embed_tokens.weight": (32064, 4096), f"{at}.norm.weight": (4096,)}
    return shapes | {"language_model.lm_head.weight": (32064, 4096)}


def test_names_and_shapes_are_those_of_the_published_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"timm_model_ids": ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"],'
        '"image_sizes": [224, 224], "text_config": {"model_type": "llama", "vocab_size": 32064}}'
    )
    config = VlaConfig.read(tmp_path)
    with torch.device("meta"):
        model = Prismatic(config)
    assert {name: tuple(one.shape) for name, one in model.named_parameters()} == published_shapes()
    assert config.num_words == 32000


def copy_linear(target: nn.Module, source: nn.Module) -> None:
    target.load_state_dict(source.state_dict())


@torch.no_grad()
def test_dinov2_sees_as_in_transformers() -> None:
    torch.manual_seed(0)
    tower = Tower(TOWERS["tiny_dinov2"], 28)
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.3)
    config = Dinov2WithRegistersConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
        image_size=28,
        patch_size=14,
        num_register_tokens=4,
    )
    other = Dinov2WithRegistersModel(config).eval()
    weights = {
        "embeddings.cls_token": tower.cls_token,
        "embeddings.register_tokens": tower.reg_token,
        "embeddings.position_embeddings": torch.cat([torch.zeros(1, 1, 16), tower.pos_embed], dim=1),
    }
    other.load_state_dict(weights, strict=False)
    copy_linear(other.embeddings.patch_embeddings.projection, tower.patch_embed.proj)
    for mine, theirs in zip(tower.blocks, other.encoder.layer, strict=True):
        for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
            copy_linear(theirs.get_submodule(name), mine.get_submodule(name))
        copy_attention(theirs.attention, mine, "o_proj")
        theirs.layer_scale1.lambda1.copy_(mine.ls1.scale_factor)
        theirs.layer_scale2.lambda1.copy_(mine.ls2.scale_factor)
    images = torch.rand(2, 3, 28, 28)
    shape = tower.shape
    mean, deviation = (torch.tensor(one)[:, None, None] for one in (shape.means, shape.deviations))
    seen = other((images - mean) / deviation, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(tower(images), seen[:, 5:], rtol=0, atol=1e-5)


def copy_attention(theirs: nn.Module, mine: nn.Module, out: str) -> None:
    for place, name in enumerate(("q_proj", "k_proj", "v_proj")):
        layer = theirs.get_submodule(name)
        layer.weight.copy_(mine.attn.qkv.weight.chunk(3)[place])  # type: ignore[union-attr,operator]
        layer.bias.copy_(mine.attn.qkv.bias.chunk(3)[place])  # type: ignore[union-attr,operator]
    copy_linear(theirs.get_submodule(out), mine.attn.proj)  # type: ignore[union-attr,arg-type]


@torch.no_grad()
def test_siglip_sees_as_in_transformers() -> None:
    torch.manual_seed(0)
    tower = Tower(TOWERS["tiny_siglip"], 28)
    for parameter in tower.parameters():
        nn.init.normal_(parameter, std=0.3)
    config = SiglipVisionConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=40, image_size=28, patch_size=14
    )
    config.hidden_act = "gelu"
    other = SiglipVisionModel(config).eval()
    copy_linear(other.embeddings.patch_embedding, tower.patch_embed.proj)
    other.embeddings.position_embedding.weight.copy_(tower.pos_embed[0])
    for mine, theirs in zip(tower.blocks, other.encoder.layers, strict=True):
        copy_linear(theirs.layer_norm1, mine.norm1)
        copy_linear(theirs.layer_norm2, mine.norm2)
        copy_linear(theirs.mlp, mine.mlp)
        copy_attention(theirs.self_attn, mine, "out_proj")
    images = torch.rand(2, 3, 28, 28)
    seen = other(images * 2 - 1, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(tower(images), seen, rtol=0, atol=1e-5)


def test_images_are_cropped_in_the_middle() -> None:
    image = torch.zeros(1, 40, 40, 3, dtype=torch.uint8)
    image[:, 10:30, 10:30] = 255
    assert sized(image, 40).shape == (1, 3, 40, 40)
    assert float(sized(image, 40, crop_share=0.25).min()) > 0.99
    assert float(sized(image, 20).mean()) == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_it_acts_in_half_precision(kind: str, folder: Path) -> None:
    policy = policy_of(kind, folder).bfloat16()
    seen = observed(policy, 3)
    acted = policy.act(seen, noise(policy, 3))
    assert policy.score(seen, acted.choices).log_probs.dtype == acted.log_probs.dtype == torch.float32


@torch.no_grad()
def test_all_places_of_a_chunk_attend_to_one_another(folder: Path) -> None:
    policy = policy_of("openvla_oft", folder)
    assert isinstance(policy, OpenVlaOft)
    seen, choices = observed(policy, 1), torch.zeros(1, 6)
    before = policy.score(seen, choices).entropies
    # The end of the text comes last, and only attention backwards in time takes it to the first number.
    policy.vla.language_model.get_input_embeddings().weight[2] += 1.0
    after = policy.score(seen, choices).entropies
    assert (before - after).abs().min().item() > 1e-6
