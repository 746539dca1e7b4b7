"""Divergences by chunks: the values and gradients of a float64 loop over single words, for all forms of a teacher."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from leaderless.algorithms.divergences import TAIL_FLOOR, Divergence, DivergenceKind, Tail
from leaderless.models import divergence_scores
from leaderless.models.divergence_scores import Lesson, TeacherHead, TeacherWords, likeliest_words, score_divergences
from leaderless.models.logit_form import LogitForm

ROWS, HIDDEN, TAUGHT, VOCABULARY = 23, 12, 9, 31
FORMS = (LogitForm(), LogitForm(1.7), LogitForm(1.3, 4.0))
KINDS, TAILS = get_args(DivergenceKind), get_args(Tail)
SILENT = 3
"""Token about which the teacher says nothing."""


@pytest.fixture(autouse=True)
def _chunks_of_four_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence_scores, "CPU_MAX_LOGITS", 2 * 4 * VOCABULARY)


def naive(log_p: list[Tensor], log_q: list[Tensor], divergence: Divergence) -> Tensor:
    """A divergence, added up word by word."""
    total, beta = torch.zeros((), dtype=torch.float64), divergence.beta
    for own, other in zip(log_p, log_q, strict=True):
        p, q = own.exp(), other.exp()
        mixed = (beta * q + (1 - beta) * p).log()
        if divergence.kind == "reverse_kl":
            total = total + p * (own - other)
        elif divergence.kind == "forward_kl":
            total = total + q * (other - own)
        else:
            total = total + beta * q * (other - mixed) + (1 - beta) * p * (own - mixed)
    return total


def of_given_words(log_p: Tensor, words: list[int], log_q: list[float], divergence: Divergence) -> Tensor:
    """The same where a teacher gives some words, of log-probabilities [vocabulary] of the student."""
    own, other = [log_p[word] for word in words], [torch.tensor(one, dtype=torch.float64) for one in log_q]
    if divergence.tail == "renormalize":
        totals = (torch.stack(one).logsumexp(0) for one in (own, other))
        own, other = ([one - total for one in both] for both, total in zip((own, other), totals, strict=True))
    else:
        left = [log_p[word].exp() for word in range(len(log_p)) if word not in words]
        rest = torch.stack(left).sum() if left else torch.zeros((), dtype=torch.float64)
        own.append(rest.clamp(min=TAIL_FLOOR).log())
        left_of_teacher = -math.expm1(math.log(math.fsum(map(math.exp, log_q))))
        other.append(torch.tensor(math.log(max(left_of_teacher, TAIL_FLOOR)), dtype=torch.float64))
    return naive(own, other, divergence)


def applied(form: LogitForm, logits: Tensor) -> Tensor:
    return form.scale * logits if form.softcap is None else form.softcap * (form.scale * logits / form.softcap).tanh()


class Case:
    """A student and a teacher with random weights."""

    def __init__(self, dtype: torch.dtype, form: LogitForm) -> None:
        generator = torch.Generator().manual_seed(1)
        shapes = (
            (ROWS, HIDDEN),
            (ROWS, TAUGHT),
            (VOCABULARY, TAUGHT),
            (VOCABULARY,),
            (VOCABULARY, HIDDEN),
            (VOCABULARY,),
        )
        hidden, taught, weight, bias, own, own_bias = (
            0.6 * torch.randn(one, generator=generator).to(dtype) for one in shapes
        )
        self.hidden, self.head, self.form = hidden.requires_grad_(), nn.Linear(HIDDEN, VOCABULARY, dtype=dtype), form
        with torch.no_grad():
            self.head.weight.copy_(own)
            self.head.bias.copy_(own_bias)
        self.teacher = TeacherHead(taught, weight, bias, form)
        self.targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)

    def words(self, how_many: int, temperature: float) -> TeacherWords:
        """The teacher's likeliest words, but for the token about which it says nothing."""
        found = likeliest_words(self.teacher, self.targets, how_many, temperature)
        words, log_probs = found.unbind(dim=1)
        is_word = words >= 0
        is_word[SILENT] = False
        return TeacherWords(words[is_word].int(), log_probs[is_word], is_word.sum(dim=1))

    def expected(self, divergence: Divergence, words: TeacherWords | None) -> tuple[Tensor, list[Tensor]]:
        """The divergences by loops in float64, and the leaves whose gradients are compared."""
        leaves = [one.detach().double().requires_grad_() for one in (self.hidden, *self.head.parameters())]
        hidden, weight, bias = leaves
        log_p = (applied(self.form, hidden @ weight.t() + bias) / divergence.temperature).log_softmax(1)
        taught, teacher, offset = (
            one.double() for one in (self.teacher.hidden, self.teacher.weight, self.teacher.bias)
        )  # type: ignore[union-attr]
        log_q = (applied(self.form, taught @ teacher.t() + offset) / divergence.temperature).log_softmax(1)
        if words is None:
            return torch.stack([naive(list(p), list(q), divergence) for p, q in zip(log_p, log_q, strict=True)]), leaves
        ends, found = words.sizes.cumsum(0).tolist(), []
        for row, (end, size) in enumerate(zip(ends, words.sizes.tolist(), strict=True)):
            own = words.words[end - size : end].tolist(), words.log_probs[end - size : end].tolist()
            found.append(of_given_words(log_p[row], *own, divergence) if size else 0.0 * log_p[row].sum())
        return torch.stack(found), leaves


def cases() -> Iterator[tuple[DivergenceKind, Tail, int | None]]:
    for kind in KINDS:
        yield kind, "bucket", None
        for tail in TAILS:
            yield from ((kind, tail, how_many) for how_many in (1, 5, VOCABULARY))


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("kind", "tail", "how_many"), [*cases()])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-5)], ids=str)
def test_values_and_gradients_are_those_of_a_loop_in_float64(
    kind: DivergenceKind, tail: Tail, how_many: int | None, form: LogitForm, dtype: torch.dtype, tolerance: float
) -> None:
    case, divergence = Case(dtype, form), Divergence(kind, 0.3, 0.7, tail)
    words = None if how_many is None else case.words(how_many, 0.7)
    result = score_divergences(case.hidden, case.head, Lesson(divergence, words or case.teacher), form)
    expected, leaves = case.expected(divergence, words)
    assert float(expected.detach().abs().max()) > 0.05 or how_many == 1
    up = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
    grads = torch.autograd.grad((up * result).sum(), [case.hidden, *case.head.parameters()])
    wanted = torch.autograd.grad((up * expected).sum(), leaves)
    for one, other in zip((result, *grads), (expected, *wanted), strict=True):
        assert float((one.detach() - other.detach()).norm() / other.detach().norm()) < tolerance
    assert words is None or float(result[SILENT].detach()) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_merged_words_make_a_lower_bound_that_all_words_reach(kind: DivergenceKind) -> None:
    case, divergence = Case(torch.float64, LogitForm()), Divergence(kind, 0.3)
    whole, *given = (
        score_divergences(case.hidden, case.head, Lesson(divergence, teacher), LogitForm()).detach()
        for teacher in (case.teacher, *(case.words(how_many, 1.0) for how_many in (1, 8, VOCABULARY)))
    )
    spoken = torch.arange(ROWS) != SILENT
    first, second, last = (one[spoken] for one in given)
    assert (first <= second + 1e-9).all()
    assert (second <= whole[spoken] + 1e-9).all()
    torch.testing.assert_close(last, whole[spoken])


@pytest.mark.parametrize("teacher", ["head", "words"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_teacher_that_is_the_student_teaches_nothing(kind: DivergenceKind, teacher: str) -> None:
    case = Case(torch.float64, LogitForm())
    case.teacher = TeacherHead(case.hidden.detach(), case.head.weight.detach(), case.head.bias.detach(), LogitForm())
    given = case.teacher if teacher == "head" else case.words(6, 1.0)
    found = score_divergences(case.hidden, case.head, Lesson(Divergence(kind, 0.3), given), LogitForm())
    (gradient,) = torch.autograd.grad(found.sum(), case.hidden)
    assert float(found.detach().abs().max()) < 1e-12
    assert float(gradient.abs().max()) < 1e-9


def test_the_mixture_goes_from_the_forward_to_the_reverse_divergence() -> None:
    # GKD, arXiv 2306.13649, section 2: D(b) / b tends to KL(q || p) for b to 0, and D(b) / (1 - b) to KL(p || q).
    case = Case(torch.float64, LogitForm())

    def scored(divergence: Divergence) -> Tensor:
        return score_divergences(case.hidden, case.head, Lesson(divergence, case.teacher), LogitForm()).detach()

    near = 1e-7
    torch.testing.assert_close(
        scored(Divergence("jensen_shannon", near)) / near, scored(Divergence("forward_kl")), rtol=1e-3, atol=0
    )
    other = scored(Divergence("jensen_shannon", 1 - near)) / near
    torch.testing.assert_close(other, scored(Divergence("reverse_kl")), rtol=1e-3, atol=0)


def test_likeliest_words_are_those_of_a_whole_softmax_and_the_token_itself() -> None:
    case = Case(torch.float64, LogitForm(1.7))
    found = likeliest_words(case.teacher, case.targets, 4, 0.7)
    assert case.teacher.bias is not None
    logits = 1.7 * (case.teacher.hidden @ case.teacher.weight.t() + case.teacher.bias)
    log_q = (logits / 0.7).log_softmax(1)
    seen = set[bool]()
    for row, (words, scores) in enumerate(found):
        best = log_q[row].topk(4).indices.tolist()
        target, is_there = int(case.targets[row]), int(case.targets[row]) in best
        assert words.tolist() == [*best, -1 if is_there else target]
        torch.testing.assert_close(scores, log_q[row][[*best, target]])
        seen.add(is_there)
    assert seen == {True, False}


class Largest(TorchDispatchMode):
    """Watches for the largest tensor that an operation writes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, tuple | list) else (result,):
            if isinstance(one, Tensor):
                self.numel = max(self.numel, one.numel())
        return result


@pytest.mark.parametrize("how_many", [None, 3])
def test_no_tensor_is_larger_than_a_chunk_of_logits(how_many: int | None) -> None:
    case = Case(torch.float64, LogitForm())
    given = case.teacher if how_many is None else case.words(how_many, 1.0)
    with Largest() as watched:
        score_divergences(case.hidden, case.head, Lesson(Divergence(), given), LogitForm()).sum().backward()
    assert watched.numel <= max(4 * VOCABULARY, VOCABULARY * HIDDEN, ROWS * HIDDEN)
    assert watched.numel < ROWS * VOCABULARY
