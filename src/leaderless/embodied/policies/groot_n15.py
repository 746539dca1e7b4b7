"""GR00T N1.5 as a policy: its own package reads and sees, and its flow head moves, by the steps of `flow_policy`.

Its time begins at noise and its velocity goes from noise to the action, so both are turned around here. Its head takes
a mask of what it has seen, and does not use it; here padding is hidden, so that a row is computed as if it were alone.

Source: GR00T N1, arXiv 2503.14734; the package `gr00t` (NVIDIA/Isaac-GR00T, release N1.5). It has not been run with
that package: a stand-in of the same interface checks what is called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from leaderless.embodied.policies.actions import ActionLimits
from leaderless.embodied.policies.flow_policy import DeviationNet, FlowOptions, FlowPolicy
from leaderless.embodied.policies.pretrained import Pretrained, needs_weights
from leaderless.embodied.policies.protocol import BodyValue, Observed, instructions_of
from leaderless.embodied.policies.vision_towers import fitted
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.models.uploads import constants

METADATA = "experiment_cfg/metadata.json"
"""File of a checkpoint that has the least and largest numbers of each robot's state and actions."""
LANGUAGE = "annotation.human.action.task_description"
"""Name of an instruction in what the package takes."""
IMAGE_SIZE = 224
"""Side of the images that it is given."""
REMEDY = "install NVIDIA/Isaac-GR00T of the release N1.5 from its repository"
Robot = Mapping[str, str | Sequence[str]]
_Package = Any


@dataclass(frozen=True)
class _Looked:
    """Features of n observations, as the flow head takes them."""

    features: Tensor
    mask: Tensor
    state_features: Tensor
    embodiment: Tensor
    state: Tensor


class Hidden(TorchFunctionMode):
    """Hides padding from attention to what was seen, where no other mask is given."""

    def __init__(self, is_real: Tensor) -> None:
        """Take which places are real, [n, length] bool."""
        super().__init__()
        self._is_real = is_real.bool()

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = dict(kwargs or {})
        if func is scaled_dot_product_attention and len(args) < 4 and given.get("attn_mask") is None:
            key = args[1] if len(args) > 1 else given["key"]
            assert isinstance(key, Tensor)
            if key.shape[-2] == self._is_real.shape[1]:
                given["attn_mask"] = self._is_real[:, None, None]
        return func(*args, **given)


def _package(module: str) -> ModuleType:
    try:
        return import_module(f"gr00t.{module}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"there is no package '{error.name}': {REMEDY}", name=error.name) from error


class _Groot(Pretrained):
    """Common part of policy and critic: a model that its package has read from a folder."""

    # Layers of SigLIP and Qwen3 in the backbone, and both transformers' in the head.
    _no_split_modules = ("BasicTransformerBlock", "Qwen3DecoderLayer", "SiglipEncoderLayer")

    def _read(self, spaces: Spaces, path: str, robot: Robot, cameras: list[str] | None) -> None:
        if not needs_weights(Path(path)):
            raise NotImplementedError("the size of a GR00T is not known before its package has read it")
        kinds, transforms = _package("model.gr00t_n1"), _package("model.transforms")
        if not hasattr(kinds, "GR00T_N1_5"):
            raise ValueError(f"the package gr00t has no GR00T_N1_5: {REMEDY}")
        if not (Path(path) / METADATA).exists():
            raise ValueError(f"path='{path}': it has no {METADATA}: give the folder of a GR00T N1.5")
        self.open(spaces, path, cameras)
        self.checkpoint = None  # its package reads more than what saved models keep of a folder
        if missing := {"embodiment", "state", "action"} - robot.keys():
            raise ValueError(f"robot={dict(robot)} lacks {', '.join(sorted(missing))}")
        self._robot, self._embodiment = robot, str(robot["embodiment"])
        self._state_limits = self._limits("state", spaces.state_size)
        self.groot: _Package = kinds.GR00T_N1_5.from_pretrained(path, torch_dtype=torch.float32).eval()
        head = self.groot.action_head
        self._most = int(head.config.max_state_dim)
        if spaces.state_size > self._most:
            raise ValueError(f"the state has {spaces.state_size} numbers, but GR00T takes at most {self._most}")
        # It turns images, words and states into what its model takes; without this copy, it would be a submodule.
        self._prepare: list[_Package] = [
            transforms.GR00TTransform(
                state_horizon=1,
                action_horizon=int(head.config.action_horizon),
                max_state_dim=self._most,
                max_action_dim=int(head.config.action_dim),
                training=False,
                embodiment_tag=_package("data.embodiment_tags").EmbodimentTag(self._embodiment),
            )
        ]

    def _limits(self, kind: str, size: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Least and largest numbers of the parts of the state or of actions, one part after the other.

        Raises:
            ValueError: There are none, or they belong to another robot.
        """
        about = json.loads((self._folder / METADATA).read_text(encoding="utf-8"))
        if self._embodiment not in about:
            raise ValueError(f"embodiment='{self._embodiment}': the checkpoint knows {', '.join(sorted(about))}")
        known, parts = about[self._embodiment]["statistics"][kind], self._robot[kind]
        if unknown := [part for part in parts if part not in known]:
            raise ValueError(f"{kind}: there is no part '{unknown[0]}'; the checkpoint has {', '.join(known)}")
        low, high = (tuple(float(x) for part in parts for x in known[part][end]) for end in ("min", "max"))
        if len(low) != size:
            raise ValueError(
                f"{kind}={list(parts)} have {len(low)} numbers, but the environment has {size}: name the parts of this "
                "robot in its order"
            )
        return low, high

    def _normal_state(self, observed: Observed) -> Tensor:
        """[n, numbers] float32: the state, from -1 to 1 where it was in training."""
        low, high = constants(observed.state, *self._state_limits)
        scaled = (observed.state - low) / (high - low).clamp(min=1e-8) * 2 - 1
        return torch.where(high > low, scaled, torch.zeros_like(scaled))

    def _seen(self, observed: Observed) -> tuple[Any, Any, Tensor]:
        """Backbone's features of images and words, the head's inputs, and the state."""
        images = [fitted(observed.images[camera], IMAGE_SIZE, mode="bilinear") for camera in self._cameras]
        pixels = (torch.stack(images, dim=1) * 255).round().to(torch.uint8)  # [n, views, 3, height, width]
        state = self._normal_state(observed)
        inputs = self._prepare[0](
            {
                "video": pixels.permute(0, 1, 3, 4, 2)[:, None].cpu().numpy(),  # [n, 1, views, height, width, 3]
                "state": state[:, None].cpu().numpy(),
                LANGUAGE: np.array(instructions_of(observed)),
            }
        )
        for_backbone, for_head = self.groot.prepare_input(inputs)
        seen = self.groot.backbone(for_backbone)
        with Hidden(seen["backbone_attention_mask"]):
            return self.groot.action_head.process_backbone_output(seen), for_head, state


class Groot(_Groot, FlowPolicy):
    """A chunk of actions, by a flow."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        robot: Robot,
        chunk: int = 16,
        cameras: list[str] | None = None,
        method: str = "sde",
        num_steps: int = 4,
        noise_level: float = 0.5,
    ) -> None:
        """Read a policy.

        Args:
            spaces: Observations and actions of the environment.
            path: Folder of a checkpoint of GR00T N1.5.
            robot: Tag of the robot (`embodiment`), such as `new_embodiment`, and names of the parts of `state` and
                `action` in its metadata, in the order of the environment.
            chunk: Steps of a decision, at most those that the model plans.
            cameras: Cameras that it sees by; all by default.
            method: Whether one step of a decision is drawn (`sde`), or all with a learnt deviation (`noise`).
            num_steps: Steps from noise to an action.
            noise_level: Factor of the noise of `sde`.
        """
        super().__init__()
        around = ActionLimits.of_environment(spaces)
        flow = FlowOptions(method, num_steps, noise_level)
        self._read(spaces, path, robot, cameras)
        low, high = self._limits("action", len(around.least))
        config = self.groot.action_head.config
        sizes = chunk, int(config.action_horizon), int(config.action_dim)
        self.begin(spaces, limits=ActionLimits(low, high, around.least, around.most), sizes=sizes, flow=flow)
        self.deviations = DeviationNet(spaces.state_size, self.numbers) if method == "noise" else None

    @override
    def look(self, observed: Observed) -> _Looked:
        seen, given, state = self._seen(observed)
        state_features = self.groot.action_head.state_encoder(given["state"], given["embodiment_id"])
        return _Looked(
            seen["backbone_features"], seen["backbone_attention_mask"], state_features, given["embodiment_id"], state
        )

    @override
    def velocity(self, looked: object, rows: Tensor, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(looked, _Looked)
        head, embodiment, features = self.groot.action_head, looked.embodiment[rows], looked.features[rows]
        # The time is rounded down to one of its buckets; a share of one is added against errors of floats.
        buckets = ((1 - times.double()) * head.num_timestep_buckets + 1e-4).long()
        actions = head.action_encoder(x.to(features.dtype), buckets, embodiment)
        if head.config.add_pos_embed:
            actions = actions + head.position_embedding(torch.arange(x.shape[1], device=x.device))[None]
        future = head.future_tokens.weight[None].expand(len(rows), -1, -1)
        inputs = torch.cat([looked.state_features[rows], future, actions], dim=1)
        mask = looked.mask[rows]
        if inputs.shape[1] == features.shape[1]:
            # Attention among the actions is distinguished from attention to what was seen by its length.
            features, mask = (
                nn.functional.pad(one, (0, 0, 1, 0) if one.dim() > 2 else (1, 0)) for one in (features, mask)
            )
        with Hidden(mask):
            found = head.model(
                hidden_states=inputs,
                encoder_hidden_states=features,
                encoder_attention_mask=mask,
                timestep=buckets,
            )
        velocity = -head.action_decoder(found, embodiment)[:, -x.shape[1] :].float()
        return self.with_deviations(velocity, looked.state[rows], times)


class GrootValue(_Groot, BodyValue):
    """A critic of what the backbone makes of images and instruction, and of the state; its first values are 0."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        robot: Robot,
        chunk: int = 16,
        cameras: list[str] | None = None,
        per_step: bool = False,
    ) -> None:
        """Read a model, and add a head; see `Groot` and `BodyValue`."""
        super().__init__()
        self._read(spaces, path, robot, cameras)
        self.spaces, self.chunk, self.per_step = spaces, chunk, per_step
        width = int(self.groot.action_head.config.backbone_embedding_dim)
        self.head = self.new_head(width + spaces.state_size)

    @override
    def values(self, observed: Observed) -> Tensor:
        seen, _, state = self._seen(observed)
        weights = seen["backbone_attention_mask"][..., None].to(seen["backbone_features"].dtype)
        mean = (seen["backbone_features"] * weights).sum(1) / weights.sum(1)
        return self.shaped(self.head(torch.cat([mean.float(), state], dim=1).to(self.head.weight.dtype)))
