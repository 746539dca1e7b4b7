"""Decoders of `transformers` over packed sequences, whatever head they have."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.models.attention import ATTENTION_NAME, Attention


class Decoder(nn.Module):
    """A model of `transformers`, of which the layers and the head are used apart."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model that was loaded with this package's attention.

        Args:
            model: Its weights keep their names.
        """
        super().__init__()
        self.model = model

    def hidden_states(self, tokens: Tensor, positions: Tensor, attention: Attention, select: Tensor) -> Tensor:
        """What the layers make of some tokens.

        Args:
            tokens: [T] int64, sequences one behind the other.
            positions: [T] int64, place of each token in its sequence.
            attention: How they attend.
            select: [R] int64, the tokens that are meant.

        Returns:
            [R, hidden_size], in the type that the layers compute in.
        """
        output = self.model.base_model(
            input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, attention=attention
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0).index_select(0, select)
        return hidden

    def float32_modules(self) -> list[nn.Module]:
        """Modules that compute in float32 whatever the rest does."""
        return []


def load_decoder(
    auto_class: type[AutoModel], config: ModelConfig, role: str, *, scalar_head: Collection[str] = ()
) -> PreTrainedModel:
    """Load a model's weights in float32 into host memory.

    Args:
        auto_class: Of `transformers`; says which head the model has.
        config: Where it is.
        role: That it plays, for errors.
        scalar_head: Names of the weights of a head with one output. What the folder lacks of them is 0.

    Raises:
        RecipeError: It cannot be found or read, weights are missing, or it does something in its attention or logits
            that this package does not do.
    """
    key = f"models.{role}"
    try:
        model, info = auto_class.from_pretrained(
            config.path,
            revision=config.revision,
            dtype=torch.float32,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
            **({"num_labels": 1} if scalar_head else {}),
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RecipeError.at(key, f"'{config.path}' cannot be loaded: {error}") from error
    missing = set(map(str, info["missing_keys"]))
    wrong = sorted((missing - {*scalar_head}) | set(map(str, info["mismatched_keys"])))
    if wrong:
        raise RecipeError.at(key, f"'{config.path}' lacks {len(wrong)} of its weights, as {wrong[0]}")
    for name, parameter in model.named_parameters():
        if name in missing:
            nn.init.zeros_(parameter)
    _check_supported(model, key)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


class _TextConfig(Protocol):
    layer_types: list[str] | None


def _check_supported(model: PreTrainedModel, key: str) -> None:
    """Refuse what would be computed wrongly in silence."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in {None, 1}:
            raise RecipeError.at(key, f"models with {name} are not supported")
    kinds = set(getattr(cast("_TextConfig", config), "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise RecipeError.at(key, f"layers of type {sorted(kinds)[0]} are not supported, only full_attention")
