"""Causal language models for packed tokens, with log-probabilities or logits as results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from leaderless.config.models import ModelConfig
from leaderless.data.prompts.images import PromptImage
from leaderless.models.attention.blocks import Repeats
from leaderless.models.attention.packed import Attention
from leaderless.models.decoder import Decoder, check_freezing, empty_decoder, load_decoder
from leaderless.models.divergence_scores import Lesson, TeacherHead, likeliest_words, score_divergences
from leaderless.models.fused_scores import FusedScores
from leaderless.models.loading.support import sees_images
from leaderless.models.logit_form import LogitForm
from leaderless.models.parallel.reductions import copied
from leaderless.models.sampling_support import Support
from leaderless.models.scoring import Entropy, Scoring, linear_in_float32, score_tokens

if TYPE_CHECKING:
    from leaderless.models.vision.image_readers import Pixels
    from leaderless.models.vision.mrope import ImagePositions


NO_DIVERGENCES = torch.empty(0)


class TokenOutputs(NamedTuple):
    """Scores of the tokens that were sampled; a tuple, in which sharding finds the tensors with a gradient.

    Attributes:
        log_probs: [R] float32, with gradient.
        entropies: [R] float32, entropies of the distributions from which the tokens were drawn, with gradient on
            request; [0] if they were not requested.
        divergences: [R] float32, divergences from a teacher's distributions, with gradient; then log-probabilities have
            none. [0] without a teacher.
    """

    log_probs: Tensor
    entropies: Tensor
    divergences: Tensor = NO_DIVERGENCES


class HeadInputs(NamedTuple):
    """Hidden states of a teacher, [R, hidden_size], and the weight and the bias of its head; the latter [0] if none."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor


class Question(NamedTuple):
    """A question to a teacher in place of scores: its hidden states, or its likeliest words.

    Attributes:
        how_many: Number of likeliest words; None for hidden states.
        temperature: Number that divides logits.
    """

    how_many: int | None
    temperature: float


class CausalLM(Decoder):
    """A language model of `transformers` for packed sequences.

    Attributes:
        max_logits: Most logits that are computed at a time for scores; None for what any device can hold.
        fused_scores: Compiled functions for scores; None to compute them as they are.
    """

    max_logits: int | None = None
    fused_scores: FusedScores | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self.logit_form = LogitForm.of(model.config)
        """Change of logits after the head."""

    def forward(  # noqa: PLR0913
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention,
        select: Tensor | Repeats,
        targets: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        entropy: Entropy = "value",
        images: Pixels | ImagePositions | None = None,
        *,
        support: Support | None = None,
        lesson: Lesson | None = None,
        question: Question | None = None,
    ) -> Tensor | TokenOutputs | HeadInputs:
        """Compute logits [R, vocabulary] float32 at selected tokens, or scores of the targets, [R] int64, that follow.

        The first arguments are as for `Decoder.hidden_states`; the temperature, one for all or [R], divides the
        logits. A model that sees images gets them, or what it has seen of them. Only words of the support of a target
        have probabilities, if it is given. With a lesson there are divergences, too. The answer to a question comes in
        place of scores: the words of `likeliest_words`, or what the head gets.
        """
        seen = () if images is None else (images,)
        hidden = self.hidden_states(tokens, positions, attention, select, *seen)
        if not self.has_head:
            return hidden
        part = self.vocabulary_part
        if targets is None:
            assert part is None, "engines that generate have all words"
            return self.logits(hidden)
        if question is not None:
            return self._answer(hidden, targets, question)
        offsets = self.offsets
        if part is not None:
            hidden, offsets = copied(hidden, part.peers), part.of(offsets)
        scoring = Scoring(self.max_logits, self.fused_scores, support, self.logit_form)
        how = temperature, entropy, part, offsets, scoring
        if lesson is None:
            return TokenOutputs(*score_tokens(hidden, self.head, targets, *how))
        with torch.no_grad():
            scores = score_tokens(hidden, self.head, targets, *how)
        own = self.logit_form, part, offsets, self.max_logits
        return TokenOutputs(*scores, score_divergences(hidden, self.head, lesson, *own))

    def _answer(self, hidden: Tensor, targets: Tensor, question: Question) -> Tensor | HeadInputs:
        """The answer to a question, without a gradient."""
        part, weight = self.vocabulary_part, self.head.weight.detach()
        bias: Tensor | None = self.head.bias
        if self.offsets is not None:
            bias = self.offsets if part is None else part.of(self.offsets)
        if question.how_many is None:
            return HeadInputs(hidden.detach(), weight, weight.new_empty(0) if bias is None else bias.detach())
        head = TeacherHead(hidden.detach(), weight, bias, self.logit_form)
        return likeliest_words(head, targets, question.how_many, question.temperature, part, self.max_logits)

    @property
    def head(self) -> nn.Linear:
        """The layer that computes logits."""
        return cast("nn.Linear", self.model.get_output_embeddings())

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute [R, vocabulary] float32 logits from [R, hidden_size]; without a gradient if they are capped."""
        bias = self.head.bias if self.offsets is None else self.offsets
        return self.logit_form.apply(linear_in_float32(hidden, self.head.weight, bias))

    def check_images(self, tokens: Sequence[int], images: Sequence[PromptImage]) -> None:  # noqa: ARG002
        """Refuse a prompt whose tokens that stand for images do not match its images.

        Raises:
            ValueError: There are more, fewer, or others.
        """
        if images:
            raise ValueError(f"a prompt has {len(images)} images, but the model reads text alone")

    def seen(self, images: Sequence[PromptImage], device: torch.device) -> ImagePositions:  # noqa: ARG002
        """Compute what is seen of images, each whole, at the tokens that stand for their parts."""
        raise RuntimeError(f"{len(images)} images are given, but the model reads text alone")

    @property
    def offsets(self) -> Tensor | None:
        """Term that is added to logits of the head, [vocabulary], which makes words impossible; None for none."""
        return None


def load_causal_lm(config: ModelConfig, role: str) -> CausalLM:
    """Load a language model; see `load_decoder`."""
    return language_model(load_decoder(AutoModelForCausalLM, config, role), config, role)


def empty_causal_lm(config: ModelConfig, role: str, *, has_adapters: bool = False) -> CausalLM:
    """Make a language model whose weights have only names and shapes; see `empty_decoder`."""
    return language_model(empty_decoder(AutoModelForCausalLM, config, role, has_adapters=has_adapters), config, role)


def language_model(model: PreTrainedModel, config: ModelConfig, role: str) -> CausalLM:
    """The language model around one of `transformers`: one that sees images, if it does."""
    if sees_images(model.config):
        from leaderless.models.vision.image_readers import open_reader
        from leaderless.models.vision.vision_models import VisionLM

        return VisionLM(model, open_reader(config, role), freezes_vision=config.freeze_vision)
    check_freezing(model, config, role)
    return CausalLM(model)


def parameters_with_memory(model: CausalLM) -> dict[str, nn.Parameter]:
    """The parameters by name, where they have none of the device `meta`; those that modules share stay shared."""
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                own = replaced.setdefault(parameter, nn.Parameter(torch.empty(0), requires_grad=False))
                setattr(module, name, own)
    return dict(model.model.named_parameters())
