"""pi0.5 as a policy: names of published checkpoints, a network as loops compute it, and scores of what was drawn."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.small_vla import write_small_pi05
from tests.unit.embodied.looking import ARM, check_rows_are_alone, check_scores, noise, observed
from torch import Tensor
from torch.nn import functional

from leaderless.config import RecipeError
from leaderless.config.environment import PolicyConfig
from leaderless.embodied.policies.loading import make_model
from leaderless.embodied.policies.pi05 import Pi05, Pi05Value, state_words
from leaderless.embodied.policies.pi05_network import Pi05Config, Pi05Network, own_name
from leaderless.embodied.policies.vision_towers import fitted
from leaderless.embodied.simulators.protocol import Continuous, Discrete, Spaces


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_pi05(tmp_path_factory.mktemp("vla") / "pi05")


def policy_of(folder: Path, **options: str | int) -> Pi05:
    kind = PolicyConfig(type="pi05", options={"path": str(folder), "chunk": 3, **options})
    model = make_model(kind, "models.policy", ARM, is_critic=False)
    assert isinstance(model, Pi05)
    return model


def published_shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of lerobot/pi05_base, as its 812 weights and its architecture say."""
    at, shapes = "model.paligemma_with_expert", dict[str, tuple[int, ...]]()
    tower = f"{at}.paligemma.model.vision_tower.vision_model"
    shapes[f"{tower}.embeddings.patch_embedding.weight"] = (1152, 3, 14, 14)
    shapes[f"{tower}.embeddings.patch_embedding.bias"] = (1152,)
    shapes[f"{tower}.embeddings.position_embedding.weight"] = (256, 1152)
    square, plain = (1152, 1152), (1152,)
    seeing = {f"self_attn.{one}_proj": square for one in ("q", "k", "v", "out")}
    seeing |= {"mlp.fc1": (4304, 1152), "mlp.fc2": (1152, 4304)}
    for number in range(27):
        for layer, size in {**seeing, "layer_norm1": plain, "layer_norm2": plain}.items():
            shapes[f"{tower}.encoder.layers.{number}.{layer}.weight"] = size
            shapes[f"{tower}.encoder.layers.{number}.{layer}.bias"] = size[:1]
    shapes[f"{tower}.post_layernorm.weight"] = shapes[f"{tower}.post_layernorm.bias"] = plain
    projector = f"{at}.paligemma.model.multi_modal_projector.linear"
    shapes[f"{projector}.weight"], shapes[f"{projector}.bias"] = (2048, 1152), (2048,)
    for model, width, mlp in (
        (f"{at}.paligemma.model.language_model", 2048, 16384),
        (f"{at}.gemma_expert.model", 1024, 4096),
    ):
        gemma = {"self_attn.q_proj": (2048, width), "self_attn.o_proj": (width, 2048)}
        gemma |= {"self_attn.k_proj": (256, width), "self_attn.v_proj": (256, width)}
        gemma |= {"mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp)}
        norms = [f"layers.{n}.{kind}_layernorm" for n in range(18) for kind in ("input", "post_attention")]
        for number in range(18):
            shapes |= {f"{model}.layers.{number}.{layer}.weight": size for layer, size in gemma.items()}
        for norm in [*norms, "norm"]:
            if width == 2048:
                shapes[f"{model}.{norm}.weight"] = (width,)
            else:
                shapes[f"{model}.{norm}.dense.weight"] = (3 * width, width)
                shapes[f"{model}.{norm}.dense.bias"] = (3 * width,)
    shapes[f"{at}.paligemma.lm_head.weight"] = (257152, 2048)
    shapes[f"{at}.gemma_expert.lm_head.weight"] = (257152, 1024)
    for layer, size in {
        "action_in_proj": (1024, 32),
        "action_out_proj": (32, 1024),
        "time_mlp_in": (1024, 1024),
        "time_mlp_out": (1024, 1024),
    }.items():
        shapes[f"model.{layer}.weight"], shapes[f"model.{layer}.bias"] = size, size[:1]
    return shapes


def test_names_and_shapes_are_those_of_the_published_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"type": "pi05"}')
    with torch.device("meta"):
        network = Pi05Network(Pi05Config.read(tmp_path))
    shapes = published_shapes()
    assert len(shapes) == 812
    named = {own_name(name): size for name, size in shapes.items()}
    assert named.pop(None) == (257152, 1024)
    assert {name: tuple(one.shape) for name, one in network.named_parameters()} == named


def rotated(x: Tensor, places: Tensor) -> Tensor:
    """[length, heads, dim] turned by their places."""
    half = x.shape[-1] // 2
    angles = places[:, None] / 10000 ** (torch.arange(half) / half)
    cos, sin = (torch.cat([one, one], dim=1)[:, None] for one in (angles.cos(), angles.sin()))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def in_one_pass(policy: Pi05, prefix: Tensor, x: Tensor, time: float) -> Tensor:
    """The velocity at a point [steps, numbers], with both experts in one pass without a cache, layer by layer."""
    net, words, width = policy.pi05, len(prefix), 24
    periods = [4e-3 * (4.0 / 4e-3) ** (i / (width // 2 - 1)) for i in range(width // 2)]
    waves = [f(2 * math.pi * time / p) for f in (math.sin, math.cos) for p in periods]
    condition = functional.silu(net.time_mlp_in(torch.tensor(waves)))
    condition = functional.silu(net.time_mlp_out(condition))
    hidden = [prefix, net.action_in_proj(x)]
    places = torch.arange(words + len(x))
    # Words see words; actions see all.
    is_seen = torch.ones(len(places), len(places), dtype=torch.bool)
    is_seen[:words, words:] = False

    def norm(layer: torch.nn.Module, kind: int, value: Tensor) -> tuple[Tensor, Tensor | float]:
        if kind == 0:
            return normed(value) * (1 + layer.weight), 1.0  # type: ignore[operator]
        scale, shift, gate = layer.dense(condition).chunk(3)  # type: ignore[operator]
        return normed(value) * (1 + scale) + shift, gate

    for number in range(2):
        layers = [net.vlm.language_model.layers[number], net.expert.layers[number]]
        inner, gates = zip(*(norm(layers[k].input_layernorm, k, hidden[k]) for k in range(2)), strict=True)
        joined = []
        for name, heads in (("q", 2), ("k", 1), ("v", 1)):
            parts = [getattr(layers[k].self_attn, f"{name}_proj")(inner[k]) for k in range(2)]
            joined.append(torch.cat(parts).view(len(places), heads, 16))
        query, key, value = rotated(joined[0], places), rotated(joined[1], places), joined[2]
        weights = torch.einsum("qhd,kd->hqk", query, key[:, 0]) / 4
        weights = weights.masked_fill(~is_seen, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,kd->qhd", weights, value[:, 0]).flatten(1)
        for k, part in enumerate((mixed[:words], mixed[words:])):
            after = hidden[k] + gates[k] * layers[k].self_attn.o_proj(part)
            inside, gate = norm(layers[k].post_attention_layernorm, k, after)
            hidden[k] = after + gate * layers[k].mlp(inside)
    found: Tensor = net.action_out_proj(norm(net.expert.norm, 1, hidden[1])[0])
    return found


@torch.no_grad()
def test_the_network_is_that_of_both_experts_in_one_pass(folder: Path) -> None:
    policy = policy_of(folder)
    seen, vlm = observed(policy), policy.pi05.vlm
    x, times = torch.randn(3, 4, 5), torch.tensor([1.0, 0.5, 0.25])
    found = policy.velocity(policy.look(seen), torch.arange(3), x, times)[0]
    for row, prompt in enumerate(policy.prompts(seen)):
        ids = policy._tokenizer(f"<s>{prompt}", add_special_tokens=False).input_ids
        one = seen.select(torch.tensor([row]))
        pixels = [fitted(one.images[camera], 28, mode="bilinear") * 2 - 1 for camera in ("top", "hand")]
        images = [vlm.get_image_features(image).pooler_output[0] for image in pixels]
        prefix = torch.cat([*images, vlm.language_model.embed_tokens.weight[ids] * 32**0.5])
        expected = in_one_pass(policy, prefix, x[row], float(times[row]))
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-5)


def test_prompts_have_the_state_in_words(folder: Path) -> None:
    state = torch.tensor([[-1.0, 0.0, 1.0, -1.5, 0.9999], [0.0078125, -0.001, 3.0, 0.5, -0.5]])
    edges = np.linspace(-1, 1, 257)[:-1]
    assert state_words(state) == [" ".join(map(str, np.digitize(row, edges) - 1)) for row in state.double().numpy()]
    policy = policy_of(folder)
    seen = observed(policy)
    scaled = (seen.state[1] + 2.0) / 4.5 * 2 - 1
    words = state_words(torch.cat([scaled, torch.zeros(3)])[None])[0]
    assert words.endswith("128 128 128")
    assert policy.prompts(seen)[1] == f"Task: push it, State: {words};\nAction: "
    short = policy_of(folder, pads_state=False).prompts(seen)[1]
    assert short == f"Task: push it, State: {state_words(scaled[None])[0]};\nAction: "


@pytest.mark.parametrize("method", ["sde", "noise"])
def test_scores_are_the_log_probs_of_what_was_drawn(method: str, folder: Path) -> None:
    weights = {"pi05.time_mlp_in.weight", "pi05.expert.layers.0.input_layernorm.dense.weight"}
    check_scores(policy_of(folder, method=method), weights, "vision_tower")


def test_rows_do_not_depend_on_one_another_or_on_padding(folder: Path) -> None:
    check_rows_are_alone(policy_of(folder))


def test_critics_begin_at_zero_and_learn(folder: Path) -> None:
    options = {"path": str(folder), "chunk": 3, "per_step": True}
    critic = make_model(PolicyConfig(type="pi05", options=options), "models.critic", ARM, is_critic=True)
    assert isinstance(critic, Pi05Value)
    seen = observed(policy_of(folder))
    assert critic.values(seen).tolist() == [[0.0] * 3] * 3
    torch.nn.init.ones_(critic.head.weight)
    critic.values(seen).sum().backward()
    assert all(one.grad is not None for one in critic.parameters())


@pytest.mark.parametrize(
    ("change", "spaces", "message"),
    [
        ({"chunk": 5}, ARM, "the network plans 4 steps of 5 numbers"),
        ({"cameras": ["front"]}, ARM, "front"),
        ({"path": "/nothing"}, ARM, "no pi0.5 can be read"),
        ({}, Spaces(ARM.images, 2, ARM.actions, 10), r"another robot: observation.state.q01 has 3 numbers, the env"),
        ({}, Spaces(ARM.images, 3, Continuous((0.0,), (1.0,)), 10), r"another robot: action.q01 has 2"),
        ({}, Spaces(ARM.images, 3, Discrete(3), 10), "use mlp or cnn"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(change: dict[str, object], spaces: Spaces, message: str, folder: Path) -> None:
    options = {"path": str(folder), "chunk": 2, **change}
    with pytest.raises(RecipeError, match=message):
        make_model(PolicyConfig(type="pi05", options=options), "models.policy", spaces, is_critic=False)  # type: ignore[arg-type]


def test_damaged_checkpoints_are_refused(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "pi05"
    shutil.copytree(folder, copy)
    about, weights = json.loads((copy / "config.json").read_text()), load_file(copy / "model.safetensors")

    def refused(message: str, changed: dict[str, Tensor] = weights, **change: object) -> None:
        (copy / "config.json").write_text(json.dumps({**about, **change}))
        save_file(changed, copy / "model.safetensors")
        with pytest.raises(RecipeError, match=message):
            policy_of(copy)

    refused("it lacks the weight 'action_in_proj.weight'", {k: v for k, v in weights.items() if "in_proj.w" not in k})
    refused("weights that are unknown, such as 'state_proj.weight'", {**weights, "state_proj.weight": torch.ones(2)})
    refused("has the type pi0, not pi05", type="pi0")
    refused("unknown sizes 'gemma_9b'", paligemma_variant="gemma_9b")
    refused("use_visual_memory is not supported", use_visual_memory=True)
    refused(r"has \(24, 5\) numbers of the weight", max_action_dim=7)
    (copy / "policy_preprocessor_step_2_normalizer_processor.safetensors").unlink()
    refused("add the one of the dataset of this robot")


@pytest.mark.parametrize("method", ["sde", "noise"])
def test_it_acts_in_half_precision(method: str, folder: Path) -> None:
    policy = policy_of(folder, method=method).bfloat16()
    seen = observed(policy)
    acted = policy.act(seen, noise(policy, 3))
    assert policy.score(seen, acted.choices).log_probs.dtype == acted.log_probs.dtype == torch.float32
