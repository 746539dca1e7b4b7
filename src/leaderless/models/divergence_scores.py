"""Divergences from a teacher at given tokens, without holding the logits of many tokens at a time.

A teacher is there itself, with the hidden state of each token, or its likeliest words are given. As for
log-probabilities, tokens keep some numbers between the forward and the backward pass, which computes logits again,
chunk by chunk. Nothing of the size of the vocabulary is kept, and chunks with logits of two models have half the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from leaderless.algorithms.divergences import LOG_TAIL_FLOOR, Divergence, log_rest
from leaderless.data.batch import ragged_index
from leaderless.distributed.in_flight import MESSAGES_AHEAD
from leaderless.models.logit_form import LogitForm, damping, squashed
from leaderless.models.parallel.reductions import SUMS, VocabularyPart
from leaderless.models.scoring import add_product, linear_in_float32
from leaderless.models.uploads import placed
from leaderless.planner.memory.limits import CPU_MAX_LOGITS, MAX_LOGITS

NOWHERE = -1e30
"""Logarithm of the probability of no word, with which all products are finite."""
WORDS = "the likeliest words of all ranks"


@dataclass(frozen=True)
class TeacherWords:
    """The likeliest words of each of some tokens under a teacher, in host memory.

    Attributes:
        words: [total] int, one token's after the other's.
        log_probs: [total] float32, their log-probabilities at the temperature of the divergence.
        sizes: [R] int64, number of words of each token; 0 for a token without a teacher, whose divergence is 0.
    """

    words: Tensor
    log_probs: Tensor
    sizes: Tensor

    def __getitem__(self, places: Tensor) -> TeacherWords:
        """The same for some of the tokens."""
        sizes = self.sizes[places]
        index = ragged_index((self.sizes.cumsum(0) - self.sizes)[places], sizes)
        return TeacherWords(self.words[index], self.log_probs[index], sizes)

    def on(self, device: torch.device, dtype: torch.dtype) -> GivenWords:
        """The same as matrices on a device, with as many columns as the token with most words."""
        width = max(1, int(self.sizes.max())) if len(self.sizes) else 1
        is_word = torch.arange(width) < self.sizes.unsqueeze(1)
        words = torch.zeros(is_word.shape, dtype=torch.int64).masked_scatter_(is_word, self.words.long())
        log_probs = torch.full(is_word.shape, NOWHERE, dtype=self.log_probs.dtype).masked_scatter_(
            is_word, self.log_probs
        )
        return GivenWords(*(placed(one, device) for one in (words, log_probs.to(dtype), is_word)))


class GivenWords(NamedTuple):
    """Words and their log-probabilities, [R, k] each, and which of them are there, [R, k] bool."""

    words: Tensor
    log_probs: Tensor
    is_word: Tensor


@dataclass(frozen=True)
class TeacherHead:
    """The head of a teacher, and its hidden states at the tokens of a pass; the head has this rank's words.

    Attributes:
        hidden: [R, hidden_size of the teacher].
        weight: [vocabulary, hidden_size of the teacher].
        bias: [vocabulary], or None.
        form: Change of its logits.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    form: LogitForm

    def logits(self, chunk: slice, temperature: float) -> Tensor:
        """[rows, vocabulary] logits of a chunk of the tokens, divided by a temperature, at least float32."""
        return _scaled(linear_in_float32(self.hidden[chunk], self.weight, self.bias), self.form, temperature)


Teacher = TeacherWords | TeacherHead


@dataclass(frozen=True)
class Lesson:
    """What a student is to learn at the tokens of a pass: a divergence, and the teacher from which it is one."""

    divergence: Divergence
    teacher: Teacher


class _Settings(NamedTuple):
    """How divergences are computed, and from what."""

    divergence: Divergence
    head: TeacherHead | None  # or the words below
    given: GivenWords | None
    form: LogitForm
    part: VocabularyPart | None
    rows: int

    def chunks(self, count: int) -> Iterator[slice]:
        for first in range(0, count, self.rows):
            yield slice(first, min(first + self.rows, count))


def score_divergences(
    hidden: Tensor,
    head: nn.Linear,
    lesson: Lesson,
    form: LogitForm,
    part: VocabularyPart | None = None,
    offsets: Tensor | None = None,
    max_logits: int | None = None,
) -> Tensor:
    """Compute [R] divergences of the distributions at hidden states [R, hidden_size] from those of a teacher.

    Arguments are as for `score_tokens`; the gradient of the hidden states is an addend of each rank, where ranks have
    parts of the words. The distributions are those over all words, also where sampling left some out.
    """
    divergence, teacher = lesson.divergence, lesson.teacher
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    whole, given = (teacher, None) if isinstance(teacher, TeacherHead) else (None, teacher.on(hidden.device, dtype))
    is_small = hidden.device.type == "cpu" and hidden.dtype.itemsize >= 4
    most = CPU_MAX_LOGITS if is_small else (max_logits or MAX_LOGITS)
    # Logits of both models, and what is computed from them, in the memory that log-probabilities take.
    rows = max(1, most // (2 * head.weight.shape[0]))
    bias = head.bias if offsets is None else offsets.to(dtype)
    settings = _Settings(divergence, whole, given, form, part, rows)
    found: Tensor = _Divergences.apply(hidden, head.weight, bias, settings)  # type: ignore[no-untyped-call]
    return found


class _Context(FunctionCtx):
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    bias: Tensor | None
    settings: _Settings


class _Divergences(torch.autograd.Function):
    """Divergences by chunks; each token keeps what `_summaries` finds."""

    @staticmethod
    def forward(ctx: _Context, hidden: Tensor, weight: Tensor, bias: Tensor | None, settings: _Settings) -> Tensor:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        divergences = torch.empty(len(hidden), dtype=dtype, device=hidden.device)
        kept = divergences.new_empty(len(hidden), 3)
        for chunk in settings.chunks(len(hidden)):
            logits = _scaled(
                linear_in_float32(hidden[chunk], weight, bias), settings.form, settings.divergence.temperature
            )
            divergences[chunk], kept[chunk] = _summaries(logits, settings, chunk)
        ctx.save_for_backward(hidden, weight, kept)
        ctx.bias, ctx.settings = bias, settings
        return divergences

    @staticmethod
    def backward(ctx: _Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        hidden, weight, kept = ctx.saved_tensors
        settings, dtype = ctx.settings, kept.dtype
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=dtype) if ctx.needs_input_grad[1] else None
        has_bias = ctx.bias is not None and ctx.needs_input_grad[2]
        grad_bias = torch.zeros_like(ctx.bias, dtype=dtype) if has_bias and ctx.bias is not None else None
        factors = gradient * (settings.form.height / settings.divergence.temperature)
        for chunk in settings.chunks(len(hidden)):
            raw = linear_in_float32(hidden[chunk], weight, ctx.bias)
            steepness = settings.form.steepness
            damped_by = None if steepness is None else damping(squashed(raw, steepness), steepness)
            logits = _scaled(raw, settings.form, settings.divergence.temperature)
            slope = _slopes(logits, kept[chunk], settings, chunk).mul_(factors[chunk].unsqueeze(1))
            slope = (slope if damped_by is None else slope.mul_(damped_by)).to(hidden.dtype)
            torch.mm(slope, weight, out=grad_hidden[chunk])
            if grad_weight is not None:
                add_product(grad_weight, slope.t(), hidden[chunk])
            if grad_bias is not None:
                grad_bias += slope.sum(dim=0, dtype=dtype)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
        )


def _summaries(logits: Tensor, settings: _Settings, chunk: slice) -> tuple[Tensor, Tensor]:
    """[n] divergences of a chunk, and [n, 3] numbers for the backward pass, from logits that are overwritten.

    The numbers are, over all words: two normalizers and the sum of pulls. With a teacher's head the normalizers are of
    the student and of the teacher; with given words, those of all words, and of the others or of the given ones.
    """
    if settings.head is not None:
        teacher = settings.head.logits(chunk, settings.divergence.temperature)
        normalizers = [_normalizer(one, settings.part) for one in (logits, teacher)]
        log_p, log_q = (one.sub_(total.unsqueeze(1)) for one, total in zip((logits, teacher), normalizers, strict=True))
        terms, pulls = settings.divergence.terms(log_p, log_q)
        sums = _summed(torch.stack([terms.sum(dim=1), pulls.sum(dim=1)]), settings.part)
        return sums[0], torch.stack([*normalizers, sums[1]], dim=1)
    given = _given(settings, chunk)
    own = _logits_of(logits, given, settings.part)
    if settings.divergence.tail == "renormalize":
        total = other = own.logsumexp(dim=1)
    else:
        total = _normalizer(logits, settings.part)
        other = _normalizer(_without(logits, given, settings.part), settings.part)
    terms, pulls = _given_terms(own, total, other, given, settings.divergence)
    has_words = given.is_word.any(dim=1)
    return torch.where(has_words, terms.sum(dim=1), 0.0), torch.stack([total, other, pulls.sum(dim=1)], dim=1)


def _slopes(logits: Tensor, kept: Tensor, settings: _Settings, chunk: slice) -> Tensor:
    """[n, vocabulary] derivatives of the divergences of a chunk with respect to logits, which are overwritten."""
    total, other, pull = (one.unsqueeze(1) for one in kept.unbind(dim=1))
    if settings.head is not None:
        log_q = settings.head.logits(chunk, settings.divergence.temperature).sub_(other)
        log_p = logits.sub_(total)
        _, pulls = settings.divergence.terms(log_p, log_q)
        return pulls.addcmul_(log_p.exp_(), pull, value=-1)
    given, is_bucket = _given(settings, chunk), settings.divergence.tail == "bucket"
    own = _logits_of(logits, given, settings.part)
    _, pulls = _given_terms(own, total.squeeze(1), other.squeeze(1), given, settings.divergence)
    at_words = (pulls[:, : own.shape[1]] - (own - total).exp() * pull).masked_fill_(~given.is_word, 0.0)
    if is_bucket:
        # Words of the tail share its pull in proportion to their probabilities.
        slope = _without(logits, given, settings.part)
        shares = (slope - other).exp_().mul_(pulls[:, -1:])
        slope = shares.addcmul_(slope.sub_(total).exp_(), pull, value=-1)
    else:
        slope = logits.zero_()
    words, are_here = (given.words, given.is_word) if settings.part is None else settings.part.locate(given.words)
    slope.scatter_add_(1, words, at_words * (are_here & given.is_word))
    return slope.masked_fill_(~given.is_word.any(dim=1, keepdim=True), 0.0)


def _given_terms(
    own: Tensor, total: Tensor, other: Tensor, given: GivenWords, divergence: Divergence
) -> tuple[Tensor, Tensor]:
    """Terms and pulls of [n, k] given words and, with a bucket, of all others as the last column; 0 without a word."""
    log_p, log_q, is_word = own - total.unsqueeze(1), given.log_probs, given.is_word
    if divergence.tail == "renormalize":
        log_q = log_q - log_q.logsumexp(dim=1, keepdim=True)
    else:
        rest = other - total
        is_floor = (rest < LOG_TAIL_FLOOR).unsqueeze(1)
        log_p = torch.cat([log_p, rest.clamp(min=LOG_TAIL_FLOOR).unsqueeze(1)], dim=1)
        log_q = torch.cat([log_q, log_rest(log_q).unsqueeze(1)], dim=1)
        is_word = torch.cat([is_word, torch.ones_like(is_floor)], dim=1)
    log_p, log_q = (one.masked_fill(~is_word, 0.0) for one in (log_p, log_q))
    terms, pulls = (one.masked_fill(~is_word, 0.0) for one in divergence.terms(log_p, log_q))
    if divergence.tail == "bucket":
        pulls[:, -1:].masked_fill_(is_floor, 0.0)  # what is cut off has no gradient
    return terms, pulls


def _given(settings: _Settings, chunk: slice) -> GivenWords:
    assert settings.given is not None
    return GivenWords(*(one[chunk] for one in settings.given))


def _scaled(logits: Tensor, form: LogitForm, temperature: float) -> Tensor:
    """Logits of a model over a temperature, from those of its head, which may be overwritten."""
    logits = form.apply(logits)
    return logits if temperature == 1 else logits.div_(temperature)


def _normalizer(logits: Tensor, part: VocabularyPart | None) -> Tensor:
    """[n] logarithms of the sums of exponentials, over the words of all ranks."""
    if part is None:
        return logits.logsumexp(dim=1)
    largest = part.peers.max(logits.amax(dim=1), SUMS, most_ahead=MESSAGES_AHEAD)
    powers = (logits - largest.unsqueeze(1)).exp_().sum(dim=1)
    return largest + _summed(powers, part).log()


def _summed(values: Tensor, part: VocabularyPart | None) -> Tensor:
    return values if part is None else part.peers.sum(values, SUMS, most_ahead=MESSAGES_AHEAD)


def _logits_of(logits: Tensor, given: GivenWords, part: VocabularyPart | None) -> Tensor:
    """[n, k] logits of the given words, wherever they are; `NOWHERE` for those that are not there."""
    words, are_here = (given.words, None) if part is None else part.locate(given.words)
    found = logits.gather(1, words)
    if are_here is not None:
        found = _summed(found * are_here, part)
    return found.masked_fill_(~given.is_word, NOWHERE)


def _without(logits: Tensor, given: GivenWords, part: VocabularyPart | None) -> Tensor:
    """The logits without those of the given words, in place."""
    words, are_here = (given.words, given.is_word) if part is None else part.locate(given.words)
    kept = logits.gather(1, words)
    places = are_here & given.is_word
    # Places that are none stand for any word, so they must not be written; the lower of both values is.
    lowered = torch.where(places, torch.full_like(kept, NOWHERE), kept)
    return logits.scatter_reduce_(1, words, lowered, reduce="amin")


def likeliest_words(
    teacher: TeacherHead,
    targets: Tensor,
    how_many: int,
    temperature: float,
    part: VocabularyPart | None = None,
    max_logits: int | None = None,
) -> Tensor:
    """Find the likeliest words at each token, and the token itself, with their log-probabilities.

    Args:
        teacher: Head of the model, with its hidden states.
        targets: [R] int64, the tokens themselves.
        how_many: Number k of words besides the token.
        temperature: Number that divides logits.
        part: Words of this rank.
        max_logits: Most logits that are computed at a time.

    Returns:
        [R, 2, k + 1] at least float32: words, which are whole numbers and thereby exact, and their log-probabilities.
        The token itself is the last word, or -1 if it is one of the others.
    """
    hidden, num_words = teacher.hidden, teacher.weight.shape[0]
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    is_small = hidden.device.type == "cpu" and hidden.dtype.itemsize >= 4
    rows = max(1, (CPU_MAX_LOGITS if is_small else (max_logits or MAX_LOGITS)) // num_words)
    found = torch.empty(len(hidden), 2, how_many + 1, dtype=dtype, device=hidden.device)
    for first in range(0, len(hidden), rows):
        chunk = slice(first, min(first + rows, len(hidden)))
        logits, target = teacher.logits(chunk, temperature), targets[chunk].unsqueeze(1)
        own = _logits_of(logits, GivenWords(target, target, torch.ones_like(target, dtype=torch.bool)), part)
        largest, words = logits.topk(min(how_many, num_words), dim=1)
        if part is not None:
            both = (part.peers.gather_even(one, WORDS) for one in (largest, words + part.first))
            largest, words = (torch.cat(one.unbind(), dim=1) for one in both)
            largest, places = largest.topk(how_many, dim=1)
            words = words.gather(1, places)
        is_there = (words == target).any(dim=1, keepdim=True)
        found[chunk, 0] = torch.cat([words, target.masked_fill(is_there, -1)], dim=1).to(dtype)
        found[chunk, 1] = torch.cat([largest, own], dim=1) - _normalizer(logits, part).unsqueeze(1)
    return found
