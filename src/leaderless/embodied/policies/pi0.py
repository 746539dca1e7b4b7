"""pi0 as a policy: PaliGemma reads and sees, and a smaller expert flows from noise to a chunk of actions.

The model is `PI0ForConditionalGeneration` of transformers, its statistics come from its processor. Source: pi0, arXiv
2410.24164; how its actions get a likelihood: see `flow_policy`.
"""

from __future__ import annotations

import json

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PI0Config, PI0ForConditionalGeneration
from typing_extensions import override

from leaderless.embodied.policies.actions import ActionLimits
from leaderless.embodied.policies.flow_policy import DeviationNet, FlowOptions, FlowPolicy
from leaderless.embodied.policies.pretrained import (
    PaliGemmaPrefix,
    Pretrained,
    embedded,
    mean_features,
    needs_weights,
    read_prefix,
    with_cache,
)
from leaderless.embodied.policies.protocol import BodyValue, Observed
from leaderless.embodied.policies.vision_towers import fitted
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.models.uploads import constants

STATISTICS = "processor_config.json"
"""File of a checkpoint that has the means and deviations of the robot's state and actions."""


class _Pi0(Pretrained):
    """Common part of policy and critic: a model that was read from a folder."""

    _no_split_modules = ("GemmaDecoderLayer", "SiglipEncoderLayer")

    def _read(self, spaces: Spaces, path: str, cameras: list[str] | None) -> PI0ForConditionalGeneration:
        folder = self.open(spaces, path, cameras)
        missing: list[str] = []
        try:
            if needs_weights(folder):
                model, about = PI0ForConditionalGeneration.from_pretrained(
                    path, dtype=torch.float32, local_files_only=True, output_loading_info=True
                )
                missing = sorted(about["missing_keys"])
            else:
                model = PI0ForConditionalGeneration(PI0Config.from_pretrained(path, local_files_only=True)).float()
        except (OSError, ValueError) as error:
            raise ValueError(f"path='{path}': no pi0 can be read: {error}") from error
        if missing:
            raise ValueError(f"path='{path}': it lacks {len(missing)} weights, such as '{missing[0]}'")
        self._most = int(model.config.max_state_dim)
        self._state = self._statistics("state", spaces.state_size, self._most)
        return model.eval()

    def _statistics(self, kind: str, size: int, most: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Means and deviations of the state or of actions, of `size` numbers."""
        try:
            about = json.loads((self._folder / STATISTICS).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"path='{self._folder}': {STATISTICS} cannot be read: {error}") from error
        return self.numbers_of_robot(STATISTICS, about, (f"{kind}_mean", f"{kind}_std"), size, most)

    @override
    def instruction_ids(self, text: str) -> list[int]:
        """Token ids of the prompt with which pi0 was trained."""
        tokenizer = self._tokenizer
        ids: list[int] = list(tokenizer(f"{tokenizer.bos_token}{text}\n", add_special_tokens=False).input_ids)
        return ids

    def _normal_state(self, observed: Observed) -> Tensor:
        """[n, max_state_dim] float32: the state, as in training."""
        means, deviations = constants(observed.state, *self._state)
        scaled = (observed.state - means) / (deviations + 1e-8)
        return functional.pad(scaled, (0, self._most - scaled.shape[1]))

    def _prefix(self, observed: Observed, vlm: nn.Module) -> tuple[Tensor, Tensor]:
        """Embeddings [n, length, hidden_size] of images and words, and whether each is real."""
        size = int(vlm.config.vision_config.image_size)  # type: ignore[union-attr,arg-type]
        images = [fitted(observed.images[camera], size) * 2 - 1 for camera in self._cameras]
        return embedded(vlm, images, *observed.instructions)


class Pi0(_Pi0, FlowPolicy):
    """A chunk of actions, by a flow."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        chunk: int = 10,
        cameras: list[str] | None = None,
        method: str = "sde",
        num_steps: int = 4,
        noise_level: float = 0.5,
    ) -> None:
        """Read a policy.

        Args:
            spaces: Observations and actions of the environment.
            path: Folder of a checkpoint in the form of transformers, with the statistics of the robot.
            chunk: Steps of a decision, at most those that the model plans.
            cameras: Cameras that it sees by; all by default.
            method: Whether one step of a decision is drawn (`sde`), or all with a learnt deviation (`noise`).
            num_steps: Steps from noise to an action.
            noise_level: Factor of the noise of `sde`.
        """
        super().__init__()
        around = ActionLimits.of_environment(spaces)
        flow = FlowOptions(method, num_steps, noise_level)
        self.pi0 = self._read(spaces, path, cameras)
        config = self.pi0.config
        means, deviations = self._statistics("actions", len(around.least), int(config.max_action_dim))
        limits = ActionLimits(
            tuple(mean - one for mean, one in zip(means, deviations, strict=True)),
            tuple(mean + one for mean, one in zip(means, deviations, strict=True)),
            around.least,
            around.most,
        )
        sizes = chunk, int(config.chunk_size), int(config.max_action_dim)
        self.begin(spaces, limits=limits, sizes=sizes, flow=flow)
        self.deviations = DeviationNet(self._most, self.numbers) if method == "noise" else None

    @override
    def look(self, observed: Observed) -> PaliGemmaPrefix:
        vlm = self.pi0.model.vlm
        embeddings, is_real = self._prefix(observed, vlm)
        return read_prefix(vlm, embeddings, is_real, self._normal_state(observed))

    @override
    def velocity(self, looked: object, rows: Tensor, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(looked, PaliGemmaPrefix)
        here = looked.select(rows)
        # The model adds to a cache that it is given, so each call has its own.
        cache = DynamicCache(here.layers)
        found: Tensor = self.pi0(
            state=here.state.to(self.pi0.action_out_proj.weight.dtype),
            noise=x.to(self.pi0.action_out_proj.weight.dtype),
            timestep=times,
            attention_mask=here.is_real.long(),
            **with_cache(cache),
        ).logits
        return self.with_deviations(found.float(), here.state, times)


class Pi0Value(_Pi0, BodyValue):
    """A critic of what PaliGemma makes of images and instruction, and of the state; its first values are 0."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        chunk: int = 10,
        cameras: list[str] | None = None,
        per_step: bool = False,
    ) -> None:
        """Read a model, and add a head; see `Pi0` and `BodyValue`."""
        super().__init__()
        pi0 = self._read(spaces, path, cameras)
        self.spaces, self.chunk, self.per_step, self.vlm = spaces, chunk, per_step, pi0.model.vlm
        self.head = self.new_head(int(self.vlm.config.text_config.hidden_size) + self._most)

    @override
    def name_in_policy(self, name: str) -> str | None:
        return f"pi0.model.{name}" if name.startswith("vlm.") else None

    @override
    def values(self, observed: Observed) -> Tensor:
        mean = mean_features(self.vlm, *self._prefix(observed, self.vlm))
        features = torch.cat([mean, self._normal_state(observed)], dim=1)
        return self.shaped(self.head(features.to(self.head.weight.dtype)))
