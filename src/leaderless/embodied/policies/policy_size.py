"""Sizes of a model of a body, without its weights: it is made, and runs, on a device that holds no numbers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Self

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as symbolic
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from leaderless.algorithms.settings import SacConfig
from leaderless.config import RecipeError
from leaderless.config.environment import BodyConfig
from leaderless.config.models import ModelConfig
from leaderless.embodied.planning.memory import BodySize, LearnerSize
from leaderless.embodied.policies.loading import model_for
from leaderless.embodied.policies.observations import TYPICAL_INSTRUCTION
from leaderless.embodied.policies.protocol import BodyPolicy, Observed
from leaderless.embodied.policies.squashed import Critics, check_policy
from leaderless.embodied.rollout.vector_envs import spaces_of
from leaderless.embodied.simulators.protocol import Spaces
from leaderless.planner.memory.optimizer_states import is_in_blocks

FEW, MORE = 128, 512
"""Decisions whose passes are compared: enough that gradients of weights matter little."""
META = torch.device("meta")


def measure_learner(model: ModelConfig, key: str, body: BodyConfig, sac: SacConfig) -> LearnerSize:
    """Measure the critics of a policy; errors as in `measure_body`."""
    return _measured_learner(model.model_dump_json(), key, body.model_dump_json(), sac)


def measure_body(model: ModelConfig, key: str, body: BodyConfig, *, is_critic: bool) -> BodySize:
    """Measure a model for an environment, which is opened once.

    Raises:
        RecipeError: One of them cannot be made.
        NotImplementedError: What the model computes depends on numbers that are not there.
    """
    model = model.model_copy(update={"gradient_checkpointing": False})  # it does not change what is measured
    return _measured(model.model_dump_json(), key, body.model_dump_json(), is_critic)


@cache
def _measured(model_text: str, key: str, body_text: str, is_critic: bool) -> BodySize:
    config, body = ModelConfig.model_validate_json(model_text), BodyConfig.model_validate_json(body_text)
    spaces = spaces_of(body)
    with META:
        model = model_for(config, key, spaces, is_critic=is_critic)
    model = model.to(META, getattr(torch, config.compute_dtype))  # buffers may have been computed elsewhere
    ids = model.instruction_ids(TYPICAL_INSTRUCTION)
    units, size = (model.chunk * model.score_dim, model.choice_size) if isinstance(model, BodyPolicy) else (0, 0)

    def compute(num: int) -> Tensor:
        observed = _blank(spaces, ids, num)
        if isinstance(model, BodyPolicy):
            scores = model.score(observed, torch.zeros(num, size, device=META))
            return scores.log_probs.sum() + scores.entropies.sum()
        found: Tensor = model(observed)
        return found.sum()

    parameters = list(model.parameters())
    kinds = set(model._no_split_modules)  # noqa: SLF001 - as sharding reads it
    layers = [sum(x.numel() for x in one.parameters()) for one in model.modules() if type(one).__name__ in kinds]
    frame = sum(3 * height * width for height, width in spaces.images.values()) + 4 * spaces.state_size
    return BodySize(
        num_parameters=sum(one.numel() for one in parameters),
        num_trained=sum(one.numel() for one in parameters if one.requires_grad),
        num_root=sum(one.numel() for one in parameters) - sum(layers),
        num_layer=max(layers, default=0),
        trained_bytes=_bytes_of_one(compute, model),
        scored_bytes=_bytes_of_one(compute),
        chunk=model.chunk,
        num_units=units,
        frame_bytes=frame,
        choice_bytes=4 * size,
        num_in_blocks=_num_in_blocks(parameters),
    )


def _num_in_blocks(parameters: Iterable[nn.Parameter]) -> int:
    """Trained weights of which `adamw_8bit` quantizes the moments."""
    return sum(one.numel() for one in parameters if one.requires_grad and is_in_blocks(one.shape, one.shape))


@cache
def _measured_learner(model_text: str, key: str, body_text: str, sac: SacConfig) -> LearnerSize:
    config, body = ModelConfig.model_validate_json(model_text), BodyConfig.model_validate_json(body_text)
    spaces = spaces_of(body)
    with META:
        try:
            policy = check_policy(model_for(config, key, spaces, is_critic=False), spaces)
        except ValueError as error:
            raise RecipeError.at(f"{key}.body", str(error)) from error
        critics = Critics(policy, sac)

    def critics_loss(num: int) -> Tensor:
        values: Tensor = critics(_blank(spaces, [0], num), torch.zeros(num, policy.choice_size, device=META))
        return values.square().sum()

    def policy_loss(num: int) -> Tensor:
        actions, log_probs = policy.draw(_blank(spaces, [0], num), torch.zeros(num, policy.choice_size, device=META))
        values: Tensor = critics(_blank(spaces, [0], num), actions)
        return log_probs.sum() - values.mean(0).sum()

    most = max(_bytes_of_one(critics_loss, critics), _bytes_of_one(policy_loss, policy))
    num_critics = sum(one.numel() for one in critics.parameters())
    return LearnerSize(num_critics, most, _num_in_blocks(critics.parameters()))


def _bytes_of_one(compute: Callable[[int], Tensor], trained: nn.Module | None = None) -> int:
    """Bytes of a decision at the fullest moment of a pass; there is a backward pass if a model is trained."""
    peaks: list[int] = []
    # Where rows are chosen by what they hold, all of them are taken to be.
    with symbolic.patch(meta_nonzero_assume_all_nonzero=True), _Fused():  # type: ignore[attr-defined]
        for num in (FEW, MORE):
            for parameter in trained.parameters() if trained is not None else ():
                parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
            with torch.set_grad_enabled(trained is not None), _Live() as live:
                found = compute(num)
                if trained is not None:
                    found.backward()  # type: ignore[no-untyped-call]
            peaks.append(live.peak)
            del found
    return max(0, -(-(peaks[1] - peaks[0]) // (MORE - FEW)))


def _blank(spaces: Spaces, ids: Sequence[int], num: int) -> Observed:
    images = {
        camera: torch.zeros(num, *side, 3, dtype=torch.uint8, device=META) for camera, side in spaces.images.items()
    }
    words = torch.tensor(ids, device=META).expand(num, len(ids))
    lengths = torch.full((num,), len(ids), device=META)
    return Observed(images, torch.zeros(num, spaces.state_size, device=META), (words, lengths))


class _Fused(TorchFunctionMode):
    """Attention that keeps no probabilities, as devices compute it; without a device, torch would keep them."""

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        is_attention = func is scaled_dot_product_attention and isinstance(args[0], Tensor) and args[0].is_meta
        chosen: Callable[..., object] = _attention if is_attention else func
        return chosen(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)  # as torch does, in each layer
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001
    found: Tensor = fused(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]
    return found


class _Live(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that operations make, as long as somebody holds them.

    Attributes:
        peak: Most bytes at any time.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = self._now = 0
        self._known: dict[int, weakref.finalize[[int, int], object]] = {}

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        given = {id(one.untyped_storage()) for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)}
        found = func(*args, **(kwargs or {}))
        for one in tree_leaves(found):
            if isinstance(one, Tensor):
                storage = one.untyped_storage()
                if (key := id(storage)) not in self._known and key not in given:
                    self._now += storage.nbytes()
                    self._known[key] = weakref.finalize(storage, self._free, key, storage.nbytes())
        self.peak = max(self.peak, self._now)
        return found

    def _free(self, key: int, size: int) -> None:
        self._now -= size
        self._known.pop(key, None)
