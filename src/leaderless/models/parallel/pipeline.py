"""Pipeline parallelism: ranks divide the layers of a model into stages, and pass hidden states on from stage to stage.

The first stage has the embeddings of tokens and what sees images, the last one the last norm and the head. If the head
is the embedding, both have it and the sum of their gradients, so that it stays the same. A decoder that is cut
computes from tokens, or from the hidden states of the stage before it, up to those for the next one, or to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from leaderless.config import RecipeError
from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import Placement
from leaderless.distributed.weights.tensor_parallel import stage_rows
from leaderless.models.attention.form import LayerPass, passing
from leaderless.models.attention.packed import PackedAttention
from leaderless.models.decoder import Decoder
from leaderless.models.loading.support import kinds_of
from leaderless.models.lora.linear import is_adapter
from leaderless.planner import Layout
from leaderless.planner.memory.layers import check_adapted_stages, check_pipeline, layers_of_stage, sees

_LENGTHS = (4, 7)
"""Lengths of the two sequences with which a model is tried."""
_TOLERANCE = 1e-4
"""Largest error of a hidden state of a model in stages, in standard deviations of all."""


@dataclass(frozen=True)
class PipelineParallel:
    """A rank's stage, and the ranks with the other stages of its rows.

    Attributes:
        layout: All ranks that hold the model.
        forth: Ranks of the stages, for messages to later stages.
        back: Second process group of the same ranks, for messages to earlier stages. In one process group, messages of
            both directions would wait for each other in its queue.
        shapes: Shapes of all weights that are trained, whole, by name.
        base_shapes: Shapes of all weights but the adapters', whole, by name.
        hidden_size: Numbers in the hidden state of a token.
        is_tied: Whether the head is the embedding, which both the first and the last stage have and train.
    """

    layout: Layout
    forth: ProcessGroup
    back: ProcessGroup
    shapes: Mapping[str, torch.Size]
    base_shapes: Mapping[str, torch.Size]
    hidden_size: int
    is_tied: bool = False

    @property
    def size(self) -> int:
        """Number of stages."""
        return self.forth.size

    @property
    def place(self) -> int:
        """The stage of this rank."""
        return self.forth.ranks.index(self.forth.rank)

    @property
    def is_first(self) -> bool:
        """Whether it begins with tokens."""
        return self.place == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the head."""
        return self.place == self.size - 1

    def neighbor(self, step: int) -> int:
        """The rank of the next stage, or of the one before it, with a step of -1."""
        return self.forth.ranks[self.place + step]

    def placement(self) -> Placement:
        """Which block of each weight each rank has."""
        return stage_rows(self.shapes)


def cut_into_stages(decoder: Decoder, stages: PipelineParallel) -> None:
    """Leave a rank only the layers of its stage."""
    text = decoder.text_model
    is_last = stages.is_last
    _keep(text, layers_of_stage(_num_layers(decoder.model), stages.size, stages.place), stages.is_first, is_last)
    if not stages.is_first:
        base = decoder.model.base_model
        for name in [name for name, _ in base.named_children() if sees(name)]:
            setattr(base, name, _Elsewhere())
    if not is_last:
        for name, _ in [*decoder.model.named_children()]:
            if name != decoder.model.base_model_prefix:
                setattr(decoder.model, name, _Elsewhere())
    decoder.pipeline = stages


def check_stages(model: PreTrainedModel, trial: PreTrainedModel | None, pp: int, key: str) -> None:
    """Refuse a model that stages cannot compute.

    Args:
        model: The model, which may be without values.
        trial: A small model of its family, or itself, on the CPU. It is tried on two short sequences: in two stages it
            has to give the hidden states that it gives in one. None if this is known.
        pp: Number of stages.
        key: Setting of the model, for errors.

    Raises:
        RecipeError: The error is at the setting `key`.
    """
    family = f"models of type {model.config.model_type} cannot be divided by pp"
    text, vision = _text(model), getattr(model.config, "vision_config", None)
    num_added = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    check_pipeline(key, pp, _num_layers(model), num_added=num_added)
    known = ("embed_tokens.", "layers.", "norm.")
    strange = sorted(name for name, _ in text.named_parameters() if not name.startswith(known))
    if text is not model.base_model:
        others = (name for name, _ in model.base_model.named_parameters())
        strange += sorted(name for name in others if not (sees(name) or name.startswith("language_model.")))
    if strange or len(getattr(text, "layers", ())) != _num_layers(model):
        what = strange[0] if strange else "layers"
        raise RecipeError.at(key, f"{family}: it is not known which stage has their {what}; leave out pp")
    if adapted := [name for name, _ in model.named_parameters() if is_adapter(name)]:
        check_adapted_stages(f"{key}.lora.targets", pp, _num_layers(model), adapted)
    if trial is None:
        return
    try:
        error = _error_in_stages(trial)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as problem:
        raise RecipeError.at(key, f"{family}: a stage fails: {problem}; leave out pp") from problem
    if not error < _TOLERANCE:
        raise RecipeError.at(key, f"{family}: stages give other hidden states, by {error:.2g}; leave out pp")


def _text(model: PreTrainedModel) -> nn.Module:
    """The part of a model that has the layers for text."""
    return cast("nn.Module", getattr(model.base_model, "language_model", model.base_model))


def _num_layers(model: PreTrainedModel) -> int:
    count: int = model.config.get_text_config().num_hidden_layers
    return count


@torch.no_grad()
def _error_in_stages(model: PreTrainedModel) -> float:
    """The largest difference of hidden states in two stages from those in one, in standard deviations."""
    text, count = _text(model), _num_layers(model)
    tokens = torch.arange(sum(_LENGTHS)) * 7919 % model.get_input_embeddings().weight.shape[0]
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    common = {
        "position_ids": positions[None],
        "attention": (attention := PackedAttention(_LENGTHS, torch.device("cpu"))),
        "use_cache": False,
    }
    middle = (count + 1) // 2
    with passing(LayerPass(attention, kinds_of(model.config), positions)):
        expected = text(input_ids=tokens[None], **common).last_hidden_state
        with _kept(text, range(middle), is_first=True, is_last=False):
            hidden = text(input_ids=tokens[None], **common).last_hidden_state
        with _kept(text, range(middle, count), is_first=False, is_last=True):
            found = text(inputs_embeds=hidden, **common).last_hidden_state
    return float((found - expected).abs().max() / expected.std().clamp(min=1e-6))


@contextmanager
def _kept(text: nn.Module, layers: range, *, is_first: bool, is_last: bool) -> Iterator[None]:
    """Keep one stage of a model for a while."""
    before = text.embed_tokens, text.norm, [*cast("nn.ModuleList", text.layers)]
    _keep(text, layers, is_first, is_last)
    try:
        yield
    finally:
        text.embed_tokens, text.norm, all_layers = before
        for number, layer in enumerate(all_layers):
            cast("nn.ModuleList", text.layers)[number] = layer


def _keep(text: nn.Module, layers: range, is_first: bool, is_last: bool) -> None:
    """Keep one stage of a model, whose weights keep their names."""
    all_layers = cast("nn.ModuleList", text.layers)
    for number in range(len(all_layers)):
        if number not in layers:
            all_layers[number] = _Elsewhere()
    if not is_first:
        text.embed_tokens = _Elsewhere()
    if not is_last:
        text.norm = _Elsewhere()


class _Elsewhere(nn.Module):
    """In the place of a layer that another stage has: hidden states stay as they are."""

    def forward(self, hidden_states: Tensor, *_: object, **__: object) -> Tensor:
        return hidden_states
