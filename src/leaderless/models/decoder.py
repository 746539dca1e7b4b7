"""Decoders of `transformers` for packed sequences, with any head, and the base class of all models that are sharded."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self, cast

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging
from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.config.models import ModelConfig
from leaderless.data.prompts.images import PromptImage
from leaderless.data.sources.hub import explained, unreachable_hub
from leaderless.models.attention.blocks import Repeats
from leaderless.models.attention.form import LayerPass, passing
from leaderless.models.attention.in_passes import compute_in_passes
from leaderless.models.attention.packed import ATTENTION_NAME, Attention
from leaderless.models.attention.shared_prompts import Family, PrefixAttention, attention_over
from leaderless.models.gradient_checkpointing import recompute_layers
from leaderless.models.identity_experts import give_weights_gradients
from leaderless.models.loading.saved_buffers import saved_buffers, write_buffers
from leaderless.models.loading.support import (
    NotFiniteError,
    attention_names,
    check_family,
    check_finite,
    check_settings,
    check_supported,
    image_tokens,
    kinds_of,
    register_classifiers,
    sees_images,
)
from leaderless.models.lora.linear import add_adapters, give_adapters_values, trained_weights
from leaderless.models.parallel.reductions import VocabularyPart
from leaderless.planner.memory.attention_kinds import FULL

if TYPE_CHECKING:
    from leaderless.models.parallel.expert import ExpertParallel
    from leaderless.models.parallel.pipeline import PipelineParallel
    from leaderless.models.parallel.tensor import TensorParallel
    from leaderless.models.routers import Routers
    from leaderless.models.vision.image_readers import Pixels

ALIGNMENT_BYTES = 64
"""Addresses of tensors that torch allocates on the CPU are multiples of it."""
WHOLE = "description_of_all_parts"
"""Attribute of the text part of a model, of which `transformers` knows only the whole as a language model."""
SCALAR_HEAD = ("score.weight", "score.bias")
"""Name in `transformers` of the head of a token or sequence classifier."""


Completion = Callable[[Callable[[str, Tensor], Tensor], torch.device], None]
"""Function of a device, and of a function that shows a weight, given by its name and what a rank has of it, as a part
of the whole one."""


class Shardable(nn.Module):
    """A model around a module whose weights it names, to be sharded and trained by `ShardedModel`."""

    def __init__(self, model: nn.Module, vocab_size: int) -> None:
        """Wrap a module; weights keep their names."""
        super().__init__()
        self.model = model
        self.vocab_size = vocab_size
        """Number of tokens with an embedding, whatever part of them is here."""
        self.tensor_parallel: TensorParallel | None = None
        """How ranks divide the layers, if they do."""
        self.pipeline: PipelineParallel | None = None
        """Stages into which ranks divide the layers, if they do."""
        self.expert_parallel: ExpertParallel | None = None
        """How ranks divide the experts of each layer, and send tokens to them, if they do."""
        self.routers: Routers | None = None
        """Routers of all layers, if they were looked for before ranks divided these."""
        self.complete: Completion = lambda whole, device: None  # noqa: ARG005
        """Function that gives weights their values once ranks have divided them."""

    def train(self, mode: bool = True) -> Self:  # noqa: ARG002
        """Stay in evaluation mode: a policy that is trained must be the one that sampled.

        In the training mode of `transformers`, dropout, noise on routers and skipped layers would make every pass
        another model.
        """
        return super().train(False)

    @property
    def shared_words(self) -> nn.Parameter | None:
        """The embeddings that both this stage of a pipeline and another one train, if the head is the embedding."""
        return None

    def float32_modules(self) -> list[nn.Module]:
        """List modules that always compute in float32."""
        return []

    def is_frozen(self, name: str) -> bool:  # noqa: ARG002
        """Whether training leaves one of `trained_weights` as it is."""
        return False

    @abstractmethod
    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that training changes, by name."""

    @abstractmethod
    def write_description(self, folder: Path) -> None:
        """Write the files that describe the model next to its weights."""


class Decoder(Shardable):
    """A model of `transformers` whose layers and head are called separately."""

    model: PreTrainedModel

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model that was loaded with this package's attention; weights keep their names."""
        super().__init__(model, model.get_input_embeddings().weight.shape[0])
        compute_in_passes(model)
        give_weights_gradients(model)
        self.vocabulary_part: VocabularyPart | None = None
        """Words of which this rank has the embeddings for logits; all without it."""
        self.ignores_images = False
        """Whether a pass may have images that a model of text does not see."""
        self.attention_kinds = kinds_of(model.config)
        """How the tokens of each layer attend to those before them."""
        self.saved_buffers = saved_buffers(model)
        """What all layers have besides weights, also the layers that other ranks have."""

    @property
    def is_plain(self) -> bool:
        """Whether attention in all layers is full, without bounded scores or sinks."""
        has_sinks = any("sink" in name.rpartition(".")[2] for name, _ in self.model.named_parameters())
        return not has_sinks and all(kind == FULL for kind in self.attention_kinds)

    @property
    def text_model(self) -> nn.Module:
        """The layers, with the embeddings of tokens and the last norm."""
        return cast("nn.Module", self.model.base_model)

    def hidden_states(
        self, tokens: Tensor, positions: Tensor, attention: Attention, select: Tensor | Repeats
    ) -> Tensor:
        """Compute hidden states [R, hidden_size] of selected tokens, in the type in which the layers compute.

        Tokens are [T] int64, sequences one after the other, positions [T] int64 their places in the sequence, and
        `select` [R] int64 the indices of the selected ones, or `Repeats` if some are selected again. A later stage of a
        pipeline takes hidden states [T, hidden_size] in the place of tokens, and one that is not the last computes
        hidden states of all tokens.
        """
        kind = "inputs_embeds" if tokens.is_floating_point() else "input_ids"
        return self.pass_layers({kind: tokens.unsqueeze(0)}, positions, attention, select)

    def pass_layers(
        self, inputs: Mapping[str, object], positions: Tensor, attention: Attention, select: Tensor | Repeats
    ) -> Tensor:
        """Pass inputs through the layers; see `hidden_states`."""
        how = {"position_ids": positions.unsqueeze(-2), "use_cache": False, "attention": attention}
        with passing(LayerPass(attention, self.attention_kinds, positions)):
            output = self.text_model(**inputs, **how)
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        if self.has_head:
            return select.take(hidden) if isinstance(select, Repeats) else hidden.index_select(0, select)
        return hidden.clone()  # a back end may hook onto what is returned, and a view could lose the hook

    @property
    def has_head(self) -> bool:
        """Whether the last norm and the head are here."""
        return self.pipeline is None or self.pipeline.is_last

    @property
    @override
    def shared_words(self) -> nn.Parameter | None:
        if self.pipeline is None or not self.pipeline.is_tied or not (self.pipeline.is_first or self.pipeline.is_last):
            return None
        is_first = self.pipeline.is_first
        module = self.model.get_input_embeddings() if is_first else self.model.get_output_embeddings()
        return cast("nn.Parameter", module.weight)

    def positions(
        self,
        positions: Tensor,
        families: Sequence[Family],  # noqa: ARG002
        images: Sequence[PromptImage],  # noqa: ARG002
    ) -> Tensor:
        """Positions of tokens as the layers take them, from [T] int64 places in their samples."""
        return positions

    @property
    def has_grid(self) -> bool:
        """Whether the positions of an image's tokens have a row and a column."""
        return False

    def pixels(
        self,
        images: Sequence[PromptImage],
        tokens: Tensor,  # noqa: ARG002
        origin_of: Callable[[int], tuple[str, range]] | None = None,  # noqa: ARG002
    ) -> Pixels | None:
        """Values that the model needs of the images of a pass; None for a model of text.

        Args:
            images: Images in the order of their tokens.
            tokens: [T] int64 tokens of the pass.
            origin_of: Function that names, for errors, what a token of the pass belongs to, and gives the places of all
                of it; the whole pass without it.

        Raises:
            RuntimeError: There are images, but the model reads text alone; or the tokens that stand for images do not
                match the images.
        """
        if images and not self.ignores_images:
            raise RuntimeError(f"a pass has {len(images)} images, but the model reads text alone")
        return None

    @property
    def reads_both_ways(self) -> bool:
        """Whether the tokens of a prompt attend to all of it, and not only to those before them."""
        return False

    def attention(self, families: Sequence[Family], device: torch.device, compute_dtype: torch.dtype) -> Attention:
        """The attention of a pass over consecutive families."""
        if self.reads_both_ways:
            return PrefixAttention(families, device)
        return attention_over(families, device, compute_dtype)

    @override
    def trained_weights(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The weights that training changes, by their names in `transformers`; see `lora.trained_weights`."""
        yield from trained_weights(self.model)

    @override
    def write_description(self, folder: Path) -> None:
        save_description(self.model, folder)
        if getattr(self.model, "generation_config", None) is not None:  # classifiers do not generate
            self.model.generation_config.save_pretrained(folder)
        write_buffers(folder, self.saved_buffers)


def load_decoder(
    auto_class: type[AutoModel], config: ModelConfig, role: str, *, has_scalar_head: bool = False
) -> PreTrainedModel:
    """Load a model's weights in float32 into host memory.

    The class of `transformers` determines the head. A scalar head that the weights lack is set to 0.

    Raises:
        RecipeError: The model cannot be found or read, weights are missing, or its attention or logits need something
            that this package does not support.
    """
    key = f"models.{role}"
    unreachable = unreachable_hub(config.path)
    try:
        with quiet_loading():
            described = load_model_config(config, role)
            check_settings(described, key)
            model, info = class_for(described, auto_class, key).from_pretrained(
                config.path,
                revision=config.revision,
                dtype=torch.float32,
                attn_implementation=attention_names(described),
                trust_remote_code=config.trust_remote_code,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **({"num_labels": 1} if has_scalar_head else {}),
            )
    except RecipeError:
        raise
    except Exception as error:
        # `transformers` raises errors of every kind for damaged folders.
        is_fixed = isinstance(error, KeyError) and error.args == (ATTENTION_NAME,)
        reason = (
            "its family is not supported, since its attention is fixed" if is_fixed else explained(error, unreachable)
        )
        raise RecipeError.at(key, f"'{config.path}' cannot be loaded: {reason}") from error
    if info["mismatched_keys"]:
        name, saved, expected = sorted(info["mismatched_keys"])[0]
        sizes = f"its {name} is {tuple(saved)}, but its config.json asks for {tuple(expected)}"
        raise RecipeError.at(key, f"'{config.path}' has weights of another size than it says: {sizes}")
    missing = set(map(str, info["missing_keys"]))
    lacking = sorted(missing - {*SCALAR_HEAD} if has_scalar_head else missing)
    if lacking:
        raise RecipeError.at(key, f"'{config.path}' lacks {len(lacking)} of its weights, as {lacking[0]}")
    keep_description(model, described, auto_class)
    for name, parameter in model.named_parameters():
        if name in missing:
            nn.init.zeros_(parameter)
    try:
        for name, parameter in model.named_parameters():
            check_finite(parameter, name, Path(config.path))
    except NotFiniteError as error:
        raise RecipeError.at(key, str(error)) from error
    check_supported(model, key)
    add_adapters(model, config, key)
    _prepare(model, key, gradient_checkpointing=config.gradient_checkpointing)
    return model


def class_for(described: PreTrainedConfig, auto_class: type[AutoModel], key: str) -> type[AutoModel]:
    """The class of `transformers` that loads a model: another one if it sees images."""
    check_family(described, key)
    if not sees_images(described):
        return auto_class
    if auto_class is not AutoModelForCausalLM:
        register_classifiers(described)
        return auto_class
    return cast("type[AutoModel]", AutoModelForImageTextToText)


def check_freezing(model: PreTrainedModel, config: ModelConfig, role: str) -> None:
    """Refuse to leave what sees as it is in a model of text."""
    if config.freeze_vision:
        reason = f"models of type {model.config.model_type} read text alone, so that there is nothing to freeze"
        raise RecipeError.at(f"models.{role}.freeze_vision", reason)


def load_model_config(config: ModelConfig, role: str) -> PreTrainedConfig:
    """Read the description of a model.

    Raises:
        RecipeError: It cannot be found or read.
    """
    unreachable = unreachable_hub(config.path)
    try:
        described: PreTrainedConfig = AutoConfig.from_pretrained(
            config.path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except Exception as error:
        # `transformers` raises errors of every kind for damaged folders.
        raise RecipeError.at(
            f"models.{role}", f"'{config.path}' cannot be loaded: {explained(error, unreachable)}"
        ) from error
    return described


def reserved_tokens(config: ModelConfig, role: str) -> frozenset[int]:
    """Tokens that stand for images, which no response has; none for a model of text."""
    return image_tokens(load_model_config(config, role))


def empty_decoder(
    auto_class: type[AutoModel],
    config: ModelConfig,
    role: str,
    *,
    has_adapters: bool = False,
    has_scalar_head: bool = False,
) -> PreTrainedModel:
    """Make a model like `load_decoder`, but with weights that have only names and shapes, on torch's device `meta`.

    What it computes from its description, such as the frequencies of positions, has values, and so have adapters if
    they are asked for: the other weights are to come from another model.
    """
    described, key = load_model_config(config, role), f"models.{role}"
    if has_scalar_head:
        described.num_labels = 1
    with _without_weights():
        model: PreTrainedModel = class_for(described, auto_class, key).from_config(
            described,
            dtype=torch.float32,
            attn_implementation=attention_names(described),
            trust_remote_code=config.trust_remote_code,
        )
        add_adapters(model, config, key)
    keep_description(model, described, auto_class)
    model.requires_grad_(False)
    if has_adapters:
        give_adapters_values(model, config, key)
    _prepare(model.eval(), key, gradient_checkpointing=has_adapters and config.gradient_checkpointing)
    return model


def keep_description(model: PreTrainedModel, described: PreTrainedConfig, auto_class: type[AutoModel]) -> None:
    """Describe a model, such as Emu3, as it was described, if `transformers` could not load its text part as such."""
    is_part = auto_class is AutoModelForCausalLM and type(model.config) is not type(described)
    if is_part and type(model.config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        setattr(model, WHOLE, described)


def save_description(model: PreTrainedModel, folder: Path) -> None:
    """Write the `config.json` with which `transformers` loads a model."""
    getattr(model, WHOLE, model.config).save_pretrained(folder)


@contextmanager
def _without_weights() -> Iterator[None]:
    """Move each parameter to the device `meta` as its module gets it, before it is given values."""
    register = nn.Module.register_parameter

    def without_values(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that two modules share stays the same object
            param = nn.Parameter(param.to("meta"))
            # Else `transformers` draws numbers for it, which takes a millisecond, and throws them away.
            param._is_hf_initialized = True  # type: ignore[attr-defined]  # noqa: SLF001
        register(self, name, param)

    nn.Module.register_parameter = without_values  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Silence `transformers`, as this package reports problems with weights itself, in one line.

    Also have it read weights one by one: a mapped file would stay in memory next to the converted model.
    """
    verbosity, mapped = transformers_logging.get_verbosity(), modeling_utils.safe_open
    transformers_logging.set_verbosity_error()
    modeling_utils.safe_open = lambda *args, **options: mapped(*args, **{**options, "backend": "pread"})
    try:
        yield
    finally:
        modeling_utils.safe_open = mapped
        transformers_logging.set_verbosity(verbosity)


def _prepare(model: PreTrainedModel, key: str, *, gradient_checkpointing: bool) -> None:
    """Make a model compute the same in every process, and in training, sampling and scoring."""
    for tensor in (*model.parameters(), *model.buffers()):
        # Kernels may add up in another order at addresses that depend on the heap: put weights where torch would.
        if not tensor.is_meta and tensor.data_ptr() % ALIGNMENT_BYTES:
            tensor.data = tensor.data.clone()
    if gradient_checkpointing:
        recompute_layers(model, key)
