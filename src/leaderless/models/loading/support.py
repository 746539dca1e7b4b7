"""Supported models: those that would be computed incorrectly are refused, and classifiers that are lacking are made."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
    MODEL_MAPPING,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from leaderless.config import RecipeError
from leaderless.models.attention.packed import ATTENTION_NAME, Attention, PackedAttention
from leaderless.models.attention.shared_prompts import Family, PrefixAttention
from leaderless.models.logit_form import LogitForm
from leaderless.planner.checks.model_files import BOTH_WAYS, SEEING

LLAVA_TEXT = ("llama", "qwen2", "qwen3")
"""Types of the layers for text that such a model of type llava may have."""
PALIGEMMA_TEXT = ("gemma",)
"""The same of type paligemma; models of PaliGemma 2 have windows and soft-capped attention scores."""
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_LENGTHS = (5, 9)
"""Lengths of the two sequences with which a model is tried."""
_TOLERANCE = 1e-2
"""Largest error of a logit, in standard deviations of all logits; rounding stays far below it."""
_LOUD = 30.0
"""Standard deviation of the head's logits with which a model is tried: a soft cap hardly changes small ones."""


class NotFiniteError(Exception):
    """A tensor of a file has values that are NaN or infinite."""


def check_finite(values: Tensor, name: str, file: Path) -> None:
    """Refuse values of a tensor, of a type with fractions, that are not finite; no memory is taken for it.

    Raises:
        NotFiniteError: Some are NaN or infinite.
    """
    if (
        values.is_floating_point()
        and values.numel()
        and not bool(torch.isfinite(torch.stack(values.detach().aminmax())).all())
    ):
        raise NotFiniteError(
            f"{name} in {file} has values that are NaN or infinite, as after a training that diverged or a download "
            "that was damaged: take another copy or an earlier checkpoint of the model"
        )


def check_supported(model: PreTrainedModel, key: str) -> None:
    """Refuse a model that needs something this package does not support.

    It is in float32 and has this package's attention; the key of its setting is for errors. The model is tried on two
    short sequences: packed into one pass, with this package's attention, it has to give the logits of each sequence
    alone with its own attention.
    """
    was_training = model.training
    model.eval()
    try:
        problem = _try_packed(model)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"a forward pass fails: {error}"
    finally:
        model.set_attn_implementation(attention_names(model.config))
        model.train(was_training)
    if problem:
        raise RecipeError.at(key, f"models of type {model.config.model_type} are not supported: {problem}")


def sees_images(described: PreTrainedConfig) -> bool:
    """Whether a model sees images and is supported, by its description."""
    return described.model_type in SEEING


def image_tokens(described: PreTrainedConfig) -> frozenset[int]:
    """Tokens that stand for images and videos, or for their ends; none if the model reads text alone."""
    ids = (getattr(described, name, None) for name in _IMAGE_TOKENS)
    return frozenset(one for one in ids if one is not None) if sees_images(described) else frozenset()


def check_family(described: PreTrainedConfig, key: str) -> None:
    """Refuse a model of images and text, unless its parts are supported or it has a language model."""
    kind = type(described)
    is_of_text = kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING or kind in MODEL_FOR_CAUSAL_LM_MAPPING
    if not (is_of_text or sees_images(described)):
        raise RecipeError.at(
            key,
            f"models of type {described.model_type} read images and text, which is supported for {', '.join(SEEING)}: "
            "give one of these, or a model of text alone",
        )
    # Layers for text of other types were not compared.
    text, family = described.get_text_config().model_type, described.model_type
    known = {"llava": LLAVA_TEXT, "paligemma": PALIGEMMA_TEXT}.get(family, (text,))
    if text not in known:
        raise RecipeError.at(key, f"models of type {family} with {text} are not supported, only {', '.join(known)}")


def reads_both_ways(described: PreTrainedConfig) -> bool:
    """Whether the tokens of a prompt attend to all of it; see `PrefixAttention`."""
    return described.model_type in BOTH_WAYS


def attention_names(described: PreTrainedConfig) -> str | dict[str, str]:
    """Names of the attention of a model and of its parts; a vision tower keeps torch's."""
    if not sees_images(described):
        return ATTENTION_NAME
    return {"": ATTENTION_NAME, "text_config": ATTENTION_NAME, "vision_config": "sdpa"}


def check_settings(described: PreTrainedConfig, key: str) -> None:
    """Refuse a model whose description names something that is not supported; see `check_supported`."""
    config = described.get_text_config()
    family = f"(type {described.model_type})"
    try:
        LogitForm.of(described)
    except ValueError as error:
        raise RecipeError.at(key, f"{error} {family}") from error
    if getattr(config, "attn_logit_softcapping", None) is not None:
        raise RecipeError.at(key, f"models with attn_logit_softcapping are not supported {family}")
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        raise RecipeError.at(key, f"layers of type {sorted(kinds)[0]} are not supported, only full_attention {family}")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        raise RecipeError.at(
            key,
            f"rotary embeddings of type {rope['rope_type']} are not supported: they depend on the longest sequence of "
            f"a pass, so that how samples are packed would change the numbers {family}",
        )


@torch.no_grad()
def _try_packed(model: PreTrainedModel) -> str:
    """Describe what is wrong with a model; empty if nothing is."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [torch.arange(length) * 7919 % vocabulary for length in _LENGTHS]
    device, is_prefix = torch.device("cpu"), reads_both_ways(model.config)
    rows = [Family(length, ()) for length in _LENGTHS]
    watched = _Watched(PrefixAttention(rows, device) if is_prefix else PackedAttention(_LENGTHS, device))
    hidden = model.base_model(
        input_ids=torch.cat(sequences)[None],
        position_ids=torch.cat([torch.arange(length) for length in _LENGTHS])[None],
        use_cache=False,
        attention=watched,
    ).last_hidden_state[0]
    num_layers = model.config.get_text_config().num_hidden_layers
    if watched.calls != Counter(range(num_layers)):
        return f"their attention runs {sum(watched.calls.values())} times in a pass through {num_layers} layers"
    model.set_attn_implementation("eager")
    # A language model may change its logits after the head, so these are compared; else the inputs of the head.
    head = model.get_output_embeddings()
    kinds = [{"token_type_ids": torch.zeros_like(s)[None]} if is_prefix else {} for s in sequences]
    inputs = [{"input_ids": s[None], "use_cache": False, **one} for s, one in zip(sequences, kinds, strict=True)]
    if head is None:
        packed, outputs = hidden, [model.base_model(**one).last_hidden_state[0] for one in inputs]
    else:
        louder = _LOUD / head(hidden).std().clamp(min=1e-6)
        hook = head.register_forward_pre_hook(lambda _, given: (given[0] * louder,))
        try:
            packed = LogitForm.of(model.config).apply(head(hidden))
            outputs = [model(**one).logits[0] for one in inputs]
        finally:
            hook.remove()
    alone = torch.cat(outputs)
    error = float((packed - alone).abs().max() / alone.std().clamp(min=1e-6))
    if not error < _TOLERANCE:
        return f"packed sequences give other logits than each alone, by {error:.2g} standard deviations"
    return ""


class _Watched:
    """Attention that counts its calls."""

    def __init__(self, attention: Attention) -> None:
        self.attention, self.longest = attention, attention.longest
        self.calls: Counter[int] = Counter()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Count the call of this layer, and attend."""
        self.calls[layer] += 1
        return self.attention.attend(layer, query, key, value, scale)


_KINDS = {
    "ForTokenClassification": (AutoModelForTokenClassification, GenericForTokenClassification),
    "ForSequenceClassification": (AutoModelForSequenceClassification, GenericForSequenceClassification),
}
"""Endings of the names of classifiers, with the classes that find them and those from which they are made."""


def register_classifiers(described: PreTrainedConfig) -> None:
    """Let the classes `AutoModelFor...Classification` of `transformers` make and load models of a family.

    `transformers` has no classifiers of families that see images. They are made like those of families of text: the
    layers without a head, and a linear one behind them.

    Args:
        described: Description of a model that sees images. Nothing happens if its family has classifiers already.
    """
    if MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING.get(type(described), None) is not None:
        return
    whole = MODEL_MAPPING[type(described)]
    family = next(one for one in whole.__mro__[1:] if issubclass(one, PreTrainedModel))
    # Files name weights as the language model's files do.
    language_model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(described)].__name__
    names = next(filter(None, map(get_checkpoint_conversion_mapping, (language_model, described.model_type))), None)
    for ending, (auto_class, generic) in _KINDS.items():
        name = whole.__name__.removesuffix("Model") + ending
        made = type(name, (generic, family), {"__doc__": f"Made like `{generic.__name__}`.", "__module__": __name__})
        if names is not None:
            register_checkpoint_conversion_mapping(name, names, overwrite=True)
        auto_class.register(type(described), made, exist_ok=True)  # else it skips families of its own
