"""A stand-in of the package gr00t (release N1.5) with small random weights, which checks what it is given."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import torch
from torch import Tensor, nn

HORIZON, NUMBERS, MOST, WIDTH, NUM_TAGS = 4, 5, 6, 16, 3
BUCKETS = 1000


class EmbodimentTag(Enum):
    NEW_EMBODIMENT = "new_embodiment"
    GR1 = "gr1"


class GR00TTransform:
    """Words as numbers, padded on the left, and images as their mean colors."""

    def __init__(self, **settings: object) -> None:
        assert settings.pop("training") is False
        self.tag = settings.pop("embodiment_tag")
        sizes = {"state_horizon": 1, "action_horizon": HORIZON, "max_state_dim": MOST, "max_action_dim": NUMBERS}
        assert settings == sizes
        assert isinstance(self.tag, EmbodimentTag)

    def __call__(self, data: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        assert set(data) == {"video", "state", "annotation.human.action.task_description"}
        video, state, words = data["video"], data["state"], data["annotation.human.action.task_description"]
        n, length, _, height, width, colors = video.shape
        assert (video.dtype, length, height, width, colors) == (np.uint8, 1, 224, 224, 3)
        assert state.shape[:2] == (n, 1)
        longest = max(map(len, words))
        ids = [[0] * (longest - len(one)) + [ord(c) % 64 for c in one] for one in words.tolist()]
        padded = np.pad(state, ((0, 0), (0, 0), (0, MOST - state.shape[2])))
        return {
            "eagle_input_ids": torch.tensor(ids, dtype=torch.int64),
            "eagle_mask": torch.tensor([[False] * (longest - len(one)) + [True] * len(one) for one in words.tolist()]),
            "eagle_pixels": torch.from_numpy(video).float().mean((1, 3, 4)).flatten(1) / 255,
            "state": torch.from_numpy(padded),
            "embodiment_id": torch.full((n,), list(EmbodimentTag).index(self.tag) + 1),
        }


class _Linear(nn.Module):
    """A layer for each kind of robot."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.W = nn.Parameter(0.3 * torch.randn(NUM_TAGS, inputs, outputs))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        assert (x.ndim, tags.shape) == (3, (len(x),))
        return torch.tanh(torch.bmm(x, self.W[tags]))


class _Actions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = _Linear(NUMBERS + 1, WIDTH)

    def forward(self, actions: Tensor, timesteps: Tensor, tags: Tensor) -> Tensor:
        assert timesteps.dtype == torch.int64
        assert timesteps.shape == (len(actions),)
        assert bool(((timesteps >= 0) & (timesteps < BUCKETS)).all()), "time goes from noise, 0, to the action, 1"
        times = (timesteps / BUCKETS)[:, None, None].expand(-1, actions.shape[1], 1)
        return self.layer(torch.cat([actions, times], dim=2), tags)


class BasicTransformerBlock(nn.Module):
    """Attention to others, or to itself, without any mask."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, others: Tensor | None = None) -> Tensor:
        others = hidden if others is None else others
        query, key = (one[:, None] for one in (hidden, self.other(others)))
        mixed = nn.functional.scaled_dot_product_attention(query, key, others[:, None])[:, 0]
        return torch.tanh(self.own(hidden) + mixed)


class SiglipEncoderLayer(nn.Module):
    """A layer that sees."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tanh(self.layer(hidden))


class Qwen3DecoderLayer(SiglipEncoderLayer):
    """A layer that reads."""


class _Dit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([BasicTransformerBlock(), BasicTransformerBlock()])

    def forward(
        self, *, hidden_states: Tensor, encoder_hidden_states: Tensor, encoder_attention_mask: Tensor, timestep: Tensor
    ) -> Tensor:
        assert encoder_attention_mask.shape == encoder_hidden_states.shape[:2]
        assert timestep.shape == (len(hidden_states),)
        seeing, mixing = self.blocks
        return mixing(seeing(hidden_states, encoder_hidden_states) + (timestep / BUCKETS)[:, None, None])


class Head(nn.Module):
    """The flow head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"action_horizon": HORIZON, "action_dim": NUMBERS, "max_state_dim": MOST}
        self.config = SimpleNamespace(**sizes, add_pos_embed=True, backbone_embedding_dim=WIDTH)
        self.num_timestep_buckets, self.num_inference_timesteps = BUCKETS, 4
        self.state_encoder, self.action_encoder = _Linear(MOST, WIDTH), _Actions()
        self.action_decoder, self.model = _Linear(WIDTH, NUMBERS), _Dit()
        self.future_tokens, self.position_embedding = nn.Embedding(2, WIDTH), nn.Embedding(8, WIDTH)
        self.vlln, self.vl_self_attention = nn.LayerNorm(WIDTH), BasicTransformerBlock()

    def process_backbone_output(self, output: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**output, "backbone_features": self.vl_self_attention(self.vlln(output["backbone_features"]))}

    def get_action(self, output: dict[str, Tensor], given: Mapping[str, Tensor], noise: Tensor) -> Tensor:
        """Actions by the package's own steps, from given noise."""
        output, tags, actions = self.process_backbone_output(output), given["embodiment_id"], noise
        state = self.state_encoder(given["state"], tags)
        for step in range(self.num_inference_timesteps):
            times = torch.full((len(noise),), int(step / self.num_inference_timesteps * BUCKETS))
            features = self.action_encoder(actions, times, tags) + self.position_embedding.weight[:HORIZON]
            future = self.future_tokens.weight.expand(len(noise), -1, -1)
            found = self.model(
                hidden_states=torch.cat([state, future, features], dim=1),
                encoder_hidden_states=output["backbone_features"],
                encoder_attention_mask=output["backbone_attention_mask"],
                timestep=times,
            )
            velocity = self.action_decoder(found, tags)[:, -HORIZON:]
            actions = actions + velocity / self.num_inference_timesteps
        return actions


class _Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.sight = nn.Embedding(64, WIDTH), nn.LazyLinear(WIDTH)
        self.seeing, self.reading = SiglipEncoderLayer(), Qwen3DecoderLayer()

    def forward(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        seen = self.seeing(self.sight(given["eagle_pixels"]))[:, None]
        features = self.reading(torch.cat([seen, self.words(given["eagle_input_ids"])], dim=1))
        is_seen = torch.ones(len(seen), 1, dtype=torch.bool)
        mask = torch.cat([is_seen, given["eagle_mask"]], dim=1)
        return {"backbone_features": features, "backbone_attention_mask": mask}


class GR00T_N1_5(nn.Module):  # noqa: N801 - the package's name
    """The model."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.action_head = _Backbone(), Head()
        self.backbone(GR00TTransform_example())

    @classmethod
    def from_pretrained(cls, path: str, *, torch_dtype: torch.dtype) -> GR00T_N1_5:
        assert Path(path).is_dir()
        assert torch_dtype == torch.float32
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return cls()

    def prepare_input(self, inputs: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return (
            {name: one for name, one in inputs.items() if name.startswith("eagle_")},
            {name: inputs[name] for name in ("state", "embodiment_id")},
        )


def GR00TTransform_example() -> dict[str, Tensor]:  # noqa: N802
    return {
        "eagle_pixels": torch.zeros(1, 6),
        "eagle_input_ids": torch.zeros(1, 1, dtype=torch.int64),
        "eagle_mask": torch.ones(1, 1, dtype=torch.bool),
    }


def install(keep: Callable[[str, ModuleType], None]) -> None:
    """Let the stand-in be imported, by a function that keeps a module under a name."""
    parts = {
        "gr00t": {},
        "gr00t.model": {},
        "gr00t.data": {},
        "gr00t.model.gr00t_n1": {"GR00T_N1_5": GR00T_N1_5},
        "gr00t.model.transforms": {"GR00TTransform": GR00TTransform},
        "gr00t.data.embodiment_tags": {"EmbodimentTag": EmbodimentTag},
    }
    for name, content in parts.items():
        module = ModuleType(name)
        vars(module).update(content)
        keep(name, module)


def write_small_groot(folder: Path) -> Path:
    """Write what this package reads of a checkpoint."""
    (folder / "experiment_cfg").mkdir(parents=True)
    state = {"arm": {"min": [-2.0, -1.0], "max": [2.0, 3.0]}, "hand": {"min": [0.0], "max": [1.0]}}
    statistics = {
        "state": state,
        "action": {"hand": {"min": [0.0], "max": [2.0]}, "arm": {"min": [-1.0], "max": [1.0]}},
    }
    about = {"new_embodiment": {"statistics": statistics}}
    (folder / "experiment_cfg/metadata.json").write_text(json.dumps(about))
    return folder
