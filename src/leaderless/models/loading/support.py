"""Supported models: those that would be computed incorrectly are refused, and classifiers that are lacking are made."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
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
from leaderless.models.attention.form import AttentionForm, LayerPass, passing
from leaderless.models.attention.in_passes import compute_in_passes
from leaderless.models.attention.joined import JoinedAttention
from leaderless.models.attention.packed import ATTENTION_NAME, Attention
from leaderless.models.attention.recurrence import Mixer, states_problem
from leaderless.models.attention.shared_prompts import Family, PrefixAttention, blocks_of, sequences_of
from leaderless.models.logit_form import LogitForm
from leaderless.planner.checks.model_files import BOTH_WAYS, SEEING
from leaderless.planner.memory.attention_kinds import SETTINGS, AttentionKind, attention_kinds

LLAVA_TEXT = ("llama", "qwen2", "qwen3")
"""Types of the layers for text that such a model of type llava may have."""
PALIGEMMA_TEXT = ("gemma",)
"""The same of type paligemma; models of PaliGemma 2 have windows and soft-capped attention scores."""
_IMAGE_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_FAMILIES = (Family(5, ()), Family(4, (1, 3, 2, 5), (-1, -1, 1, 1)))
"""Sequences with which a model is tried: one alone, and three that share a prompt, two of them also what follows it."""
_WINDOW = 4
"""Tokens of the windows and chunks of a model while it is tried, and chosen keys, which sequences exceed."""
_NARROW = dict.fromkeys(("sliding_window", "attention_chunk_size", "index_topk", "token_budget"), _WINDOW)
_NARROW |= {"compress_ratio": 2, "block_topk": 2, "floor_scale": 2}
"""Sizes of windows, chunks, choices of keys and steps of temperatures while a model is tried, by their names."""
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

    It is in float32 and has this package's attention; the key of its setting is for errors. The model is tried on three
    short sequences: packed into one pass, with this package's attention, it has to give the logits of each sequence
    alone with its own attention. Two of them share a prompt, and all exceed the windows of the trial.
    """
    was_training = model.training
    model.eval()
    compute_in_passes(model)
    try:
        with _narrow_windows(model):
            hidden_size = model.config.get_text_config().hidden_size
            problem = states_problem(model, hidden_size) or _try_packed(model)
    except (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"a forward pass fails: {type(error).__name__}: {error}"
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
        kinds_of(described)
    except ValueError as error:
        raise RecipeError.at(key, f"{error} {family}") from error
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in {"dynamic", "longrope"}:
        raise RecipeError.at(
            key,
            f"rotary embeddings of type {rope['rope_type']} are not supported: they depend on the longest sequence of "
            f"a pass, so that how samples are packed would change the numbers {family}",
        )


def kinds_of(described: PreTrainedConfig) -> tuple[AttentionKind, ...]:
    """How the tokens of each layer for text attend; see `attention_kinds`."""
    config = described.get_text_config()
    return attention_kinds({name: getattr(config, name, None) for name in SETTINGS})


@contextmanager
def _narrow_windows(model: PreTrainedModel) -> Iterator[None]:
    """Give all windows, chunks and choices of keys of a model a size that the sequences of the trial exceed."""
    described = model.config.get_text_config()
    owners: list[object] = [*{id(one): one for one in (model.config, described)}.values(), *model.modules()]
    before = [
        (owner, name, size)
        for owner in owners
        for name, most in _NARROW.items()
        if isinstance(size := getattr(owner, name, None), int) and size > most
    ]
    try:
        for owner, name, _ in before:
            setattr(owner, name, _NARROW[name])
        yield
    finally:
        for owner, name, size in before:
            setattr(owner, name, size)


@torch.no_grad()
def _try_packed(model: PreTrainedModel) -> str:
    """Describe what is wrong with a model; empty if nothing is."""
    vocabulary, is_prefix = model.get_input_embeddings().weight.shape[0], reads_both_ways(model.config)
    families = [Family(family.longest, ()) for family in _FAMILIES] if is_prefix else _FAMILIES
    tokens = torch.arange(sum(family.num_tokens for family in families)) * 7919 % vocabulary
    device, sequences = torch.device("cpu"), [*sequences_of(families)]
    positions = torch.zeros_like(tokens)
    for places in sequences:
        positions[places] = torch.arange(len(places))
    attention = PrefixAttention(families, device) if is_prefix else JoinedAttention([*blocks_of(families)], device)
    watched, kinds = _Watched(attention), kinds_of(model.config)
    with passing(LayerPass(watched, kinds, positions)):
        hidden = model.base_model(
            input_ids=tokens[None], position_ids=positions[None], attention=watched, use_cache=False
        ).last_hidden_state[0]
    num_layers, calls = model.config.get_text_config().num_hidden_layers, watched.calls
    missing = {*range(num_layers)} - {*calls}
    if max(calls.values(), default=1) > 1 or any(kinds[layer].has_attention for layer in missing):
        return f"their attention runs {calls.total()} times in a pass through {num_layers} layers"
    model.set_attn_implementation("eager")
    # A language model may change its logits after the head, so these are compared; else the inputs of the head.
    head = model.get_output_embeddings()
    errors, spread = list[Tensor](), list[Tensor]()
    with _loud(head, hidden):
        packed = hidden if head is None else LogitForm.of(model.config).apply(head(hidden))
        for places in sequences:
            kind = {"token_type_ids": torch.zeros_like(places)[None]} if is_prefix else {}
            inputs = {"input_ids": tokens[places][None], "use_cache": False, **kind}
            alone = model.base_model(**inputs).last_hidden_state[0] if head is None else model(**inputs).logits[0]
            errors.append((packed[places] - alone).abs().max())
            spread.append(alone.flatten())
    error = float(torch.stack(errors).max() / torch.cat(spread).std().clamp(min=1e-6))
    if not error < _TOLERANCE:
        return f"packed sequences give other logits than each alone, by {error:.2g} standard deviations"
    return ""


@contextmanager
def _loud(head: nn.Module | None, hidden: Tensor) -> Iterator[None]:
    """Amplify what enters a head, if there is one."""
    if head is None:
        yield
        return
    louder = _LOUD / head(hidden).std().clamp(min=1e-6)
    hook = head.register_forward_pre_hook(lambda _, given: (given[0] * louder,))
    try:
        yield
    finally:
        hook.remove()


class _Watched:
    """Attention that counts its calls by layer."""

    def __init__(self, attention: Attention) -> None:
        self.attention = attention
        self.calls: Counter[int] = Counter()

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, form: AttentionForm) -> Tensor:
        """Count the call of this layer, and attend."""
        self.calls[layer] += 1
        return self.attention.attend(layer, query, key, value, form)

    def recur(self, layer: int, mixer: Mixer, hidden: Tensor) -> Tensor:
        """Read by recurrence."""
        return self.attention.recur(layer, mixer, hidden)


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
