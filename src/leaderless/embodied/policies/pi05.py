"""pi0.5 as a policy: its prompt has the robot's state in words, and its expert flows from noise to a chunk of actions.

A folder is in the form of LeRobot: `config.json`, `model.safetensors`, and the quantiles of the robot's state and
actions in `policy_preprocessor_step_*_normalizer_processor.safetensors`; it also needs PaliGemma's tokenizer.
How its actions get a likelihood: see `flow_policy`. Source of the network: see `pi05_model`.
"""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typing_extensions import override

from leaderless.embodied.policies.actions import ActionLimits
from leaderless.embodied.policies.flow_policy import DeviationNet, FlowOptions, FlowPolicy
from leaderless.embodied.policies.observations import TYPICAL_INSTRUCTION, padded
from leaderless.embodied.policies.pi05_network import Pi05Network, read_network
from leaderless.embodied.policies.pretrained import PaliGemmaPrefix, Pretrained, embedded, mean_features, read_prefix
from leaderless.embodied.policies.protocol import BodyValue, Observed, instructions_of
from leaderless.embodied.policies.vision_towers import fitted
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.models.uploads import constants

STATISTICS = "policy_preprocessor_step_*_normalizer_processor.safetensors"
"""File of a checkpoint that has quantiles of the robot's state and actions."""
NUM_BINS = 256
"""Words for a number of the state, from -1 to 1."""


def state_words(state: Tensor) -> list[str]:
    """States [n, numbers] as in a prompt: the bin of each number, from 0 to 255; numbers below -1 are -1."""
    edges = torch.linspace(-1, 1, NUM_BINS + 1, dtype=torch.float64)[:-1]
    bins = torch.bucketize(state.double().cpu(), edges, right=True) - 1
    return [" ".join(map(str, row)) for row in bins.tolist()]


class _Pi05(Pretrained):
    """Common part of policy and critic: a network that was read from a folder."""

    _no_split_modules = ("ExpertLayer", "GemmaDecoderLayer", "SiglipEncoderLayer")

    def _read(self, spaces: Spaces, path: str, cameras: list[str] | None, *, pads_state: bool) -> Pi05Network:
        self._pads_state = pads_state
        network = read_network(self.open(spaces, path, cameras))
        self._most = network.config.max_state_dim
        self._state = self._statistics("observation.state", spaces.state_size, self._most)
        return network

    def _statistics(self, kind: str, size: int, most: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Quantiles of 1 % and 99 % of the state or of actions, of `size` numbers."""
        files = sorted(self._folder.glob(STATISTICS))
        if not files:
            raise ValueError(f"path='{self._folder}': it has no {STATISTICS}: add the one of the dataset of this robot")
        about = {name: one.flatten().tolist() for name, one in load_file(files[0]).items()}
        return self.numbers_of_robot(files[0].name, about, (f"{kind}.q01", f"{kind}.q99"), size, most)

    def _normal_state(self, observed: Observed) -> Tensor:
        """[n, numbers] float32: the state, as in training, mostly from -1 to 1."""
        low, high = constants(observed.state, *self._state)
        scaled = (observed.state - low) / (high - low).clamp(min=1e-8) * 2 - 1
        return nn.functional.pad(scaled, (0, self._most - scaled.shape[1]))

    def prompts(self, observed: Observed) -> list[str]:
        """Prompt in place of an instruction and a state."""
        state = self._normal_state(observed)
        if state.is_meta:  # only sizes are wanted
            texts, state = [TYPICAL_INSTRUCTION] * len(state), torch.zeros(state.shape, device="cpu")
        else:
            texts = instructions_of(observed)
        words = state_words(state if self._pads_state else state[:, : len(self._state[0])])
        return [
            f"Task: {text.strip().replace('_', ' ').replace(chr(10), ' ')}, State: {words};\nAction: "
            for text, words in zip(texts, words, strict=True)
        ]

    def _prefix(self, observed: Observed, network_vlm: nn.Module, image_size: int) -> tuple[Tensor, Tensor]:
        """Embeddings [n, length, hidden_size] of images and words, and whether each is real."""
        tokenizer = self._tokenizer
        texts = [f"{tokenizer.bos_token}{text}" for text in self.prompts(observed)]
        ids = tokenizer(texts, add_special_tokens=False).input_ids
        images = [fitted(observed.images[camera], image_size, mode="bilinear") * 2 - 1 for camera in self._cameras]
        return embedded(network_vlm, images, *padded(ids, observed.state.device))


class Pi05(_Pi05, FlowPolicy):
    """A chunk of actions, by a flow."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        chunk: int = 10,
        cameras: list[str] | None = None,
        pads_state: bool = True,
        method: str = "sde",
        num_steps: int = 4,
        noise_level: float = 0.5,
    ) -> None:
        """Read a policy.

        Args:
            spaces: Observations and actions of the environment.
            path: Folder of a checkpoint in the form of LeRobot, with the statistics of the robot and a tokenizer.
            chunk: Steps of a decision, at most those that the model plans.
            cameras: Cameras that it sees by; all by default.
            pads_state: Whether the prompt has as many numbers as the model takes, as LeRobot trains it, or those that
                the state has, as openpi does.
            method: Whether one step of a decision is drawn (`sde`), or all with a learnt deviation (`noise`).
            num_steps: Steps from noise to an action.
            noise_level: Factor of the noise of `sde`.
        """
        super().__init__()
        around = ActionLimits.of_environment(spaces)
        flow = FlowOptions(method, num_steps, noise_level)
        self.pi05 = self._read(spaces, path, cameras, pads_state=pads_state)
        config = self.pi05.config
        low, high = self._statistics("action", len(around.least), config.max_action_dim)
        sizes = chunk, config.horizon, config.max_action_dim
        self.begin(spaces, limits=ActionLimits(low, high, around.least, around.most), sizes=sizes, flow=flow)
        self.deviations = DeviationNet(config.max_state_dim, self.numbers) if method == "noise" else None

    @override
    def look(self, observed: Observed) -> PaliGemmaPrefix:
        vlm = self.pi05.vlm
        prefix = self._prefix(observed, vlm, self.pi05.config.image_size)
        return read_prefix(vlm, *prefix, self._normal_state(observed))

    @override
    def velocity(self, looked: object, rows: Tensor, x: Tensor, times: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(looked, PaliGemmaPrefix)
        here = looked.select(rows)
        found = self.pi05.velocity(here, x, times)
        return self.with_deviations(found, here.state, times)


class Pi05Value(_Pi05, BodyValue):
    """A critic of what PaliGemma makes of images, instruction and state; its first values are 0."""

    def __init__(
        self,
        spaces: Spaces,
        *,
        path: str,
        chunk: int = 10,
        cameras: list[str] | None = None,
        pads_state: bool = True,
        per_step: bool = False,
    ) -> None:
        """Read a model, and add a head; see `Pi05` and `BodyValue`."""
        super().__init__()
        network = self._read(spaces, path, cameras, pads_state=pads_state)
        self.spaces, self.chunk, self.per_step = spaces, chunk, per_step
        self.vlm, self._image_size = network.vlm, network.config.image_size
        self.head = self.new_head(network.config.vlm.width)

    @override
    def name_in_policy(self, name: str) -> str | None:
        return f"pi05.{name}" if name.startswith("vlm.") else None

    @override
    def values(self, observed: Observed) -> Tensor:
        mean = mean_features(self.vlm, *self._prefix(observed, self.vlm, self._image_size))
        return self.shaped(self.head(mean.to(self.head.weight.dtype)))
